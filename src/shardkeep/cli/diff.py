"""
`shardkeep diff`: what differs between two checkpoints, of any layout and spread.

Keys, shapes and dtypes come from the indexes. Values whose digests say that they are equal are not read, so that
comparing a checkpoint with its copy is a matter of milliseconds, and without torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkeep.cli.contents import Item, items_of, wanted_keys
from shardkeep.cli.diff_digests import Equality
from shardkeep.cli.diff_output import document_of, print_difference
from shardkeep.cli.diff_plain import ValueChange, compare_values
from shardkeep.cli.output import print_json
from shardkeep.cli.places import open_one
from shardkeep.cli.problems import NotUsable
from shardkeep.cli.progress import Progress
from shardkeep.opening import Checkpoint

if TYPE_CHECKING:
    from shardkeep.cli.diff_values import Change

EXAMPLES = """
  shardkeep diff runs/a/step-500 runs/b/step-500
  shardkeep diff step-500 hf --strip-prefix model. --ignore-dtype --rtol 1e-2
  shardkeep diff runs/a/step-500 runs/a/step-600 'model.*.weight' --keys-only
"""

_SMALL_NBYTES = 1 << 20
_BATCH_NBYTES = 16 << 20
_BATCH_LENGTH = 4096

Pair = tuple[Item, Item]


@dataclass
class Difference:
    """All that differs between two checkpoints, A and B."""

    only_a: list[Item] = field(default_factory=list)
    only_b: list[Item] = field(default_factory=list)
    kinds: list[Pair] = field(default_factory=list)
    """Keys that are in both, with another shape or dtype, or a tensor in one and a value in the other."""
    tensors: list[tuple[Item, Change]] = field(default_factory=list)
    values: list[tuple[Item, ValueChange]] = field(default_factory=list)
    equal: int = 0
    """Keys that are equal, or, with `--keys-only`, of one shape and dtype."""
    by_digests: int = 0
    """Of those, how many were not read."""

    @property
    def count(self) -> int:
        """How many keys differ."""
        return sum(len(keys) for keys in (self.only_a, self.only_b, self.kinds, self.tensors, self.values))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", metavar="A", help="a checkpoint")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob")
    parser.add_argument("--prefix", metavar="KEY", help="only keys that begin with this")
    parser.add_argument(
        "--strip-prefix", metavar="TEXT", default="", help="only keys of A that begin so, without it (B: an export)"
    )
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X times |b| (0)")
    parser.add_argument(
        "--atol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X (0: bits are compared)"
    )
    parser.add_argument("--keys-only", action="store_true", help="compare keys, shapes and dtypes, and read no values")
    parser.add_argument("--ignore-dtype", action="store_true", help="compare the numbers of different dtypes")
    parser.add_argument("--read", action="store_true", help="read values even where digests say that they are equal")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="lines of each kind (20; 0: all)")


def run(args: argparse.Namespace) -> int:
    """Compare, and print what differs; 1 where something does."""
    if not (args.rtol >= 0 and args.atol >= 0):
        raise NotUsable("tolerances are numbers from 0 up")
    a, b = open_one(args.a), open_one(args.b)
    wanted = wanted_keys(args.pattern, args.prefix)
    strip = args.strip_prefix
    in_a = {item.key[len(strip) :]: item for item in items_of(a, wanted) if item.key.startswith(strip)}
    # Patterns are of names as A has them.
    of_b = wanted if wanted is None else lambda key: wanted(strip + key)
    in_b = {item.key: item for item in items_of(b, of_b)}
    if strip and not in_a:
        raise NotUsable(f"no key of {args.a} begins with {strip!r}", hint="--strip-prefix is for names of A: model.")
    if wanted is not None and not in_a and not in_b:
        raise NotUsable(f"no key of either fits {' '.join([*args.pattern, args.prefix or '']).strip()!r}")
    found = compare_all(a, b, in_a, in_b, args)
    if args.json:
        print_json(document_of(found, args))
    else:
        print_difference(found, args)
    return 1 if found.count else 0


def compare_all(
    a: Checkpoint, b: Checkpoint, in_a: dict[str, Item], in_b: dict[str, Item], args: argparse.Namespace
) -> Difference:
    """Compare these items of two checkpoints."""
    found = Difference(
        only_a=[item for key, item in in_a.items() if key not in in_b],
        only_b=[item for key, item in in_b.items() if key not in in_a],
    )
    to_read: list[Pair] = []
    equality = None if args.keys_only or args.read else Equality(a, b)
    for key, one in in_a.items():
        other = in_b.get(key)
        if other is None:
            continue
        if (
            one.shape != other.shape
            or one.is_tensor != other.is_tensor
            or (one.dtype != other.dtype and not (args.ignore_dtype and one.is_tensor))
        ):
            found.kinds.append((one, other))
        elif args.keys_only:
            found.equal += 1
        elif not one.is_tensor:
            change = compare_values(a, one, b, other, rtol=args.rtol, atol=args.atol)
            found.values += [(one, change)] if change else []
            found.equal += not change
        elif equality and one.dtype == other.dtype and equality.known(one, other):
            found.equal += 1
            found.by_digests += 1
        else:
            to_read.append((one, other))
    for one, tensor_change in sorted(_changes(a, b, to_read, args), key=lambda found: found[0].key.encode()):
        found.tensors.append((one, tensor_change))
    found.equal += len(to_read) - len(found.tensors)
    return found


def _changes(
    a: Checkpoint, b: Checkpoint, pairs: list[Pair], args: argparse.Namespace
) -> Iterator[tuple[Item, Change]]:
    """Read pairs of tensors, several at a time, and say how those differ that do."""
    if not pairs:
        return
    from shardkeep.cli.blocks import calculators  # noqa: PLC0415 - torch only where values are read
    from shardkeep.cli.diff_values import Tolerance, compare, compare_batch  # noqa: PLC0415

    tolerance = Tolerance(args.rtol, args.atol)
    with Progress("comparing", sum(one.nbytes for one, _ in pairs)) as progress, calculators() as threads:

        def work(batch: list[Pair]) -> list[Change]:
            if len(batch) > 1:
                changes = compare_batch(a, b, batch, tolerance)
                progress.add(sum(one.nbytes for one, _ in batch))
                return changes
            stored: tuple[Any, Any] = a[batch[0][0].key], b[batch[0][1].key]
            return [compare(*stored, tolerance, on_block=progress.add)]

        batches = list(_batches(pairs))
        for batch, changes in zip(batches, threads.map(work, batches), strict=True):
            yield from ((pair[0], change) for pair, change in zip(batch, changes, strict=True) if change.changed)


def _batches(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Put small tensors together: one by one, looking for them costs more than reading them."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        its = max(pair[0].nbytes, pair[1].nbytes)
        if its > _SMALL_NBYTES:
            yield [pair]
            continue
        if batch and (nbytes + its > _BATCH_NBYTES or len(batch) == _BATCH_LENGTH):
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += its
    if batch:
        yield batch
