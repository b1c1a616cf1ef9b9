"""Whether two plain values are the same, by their stored form first, so that what cannot be rebuilt is compared too."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.cli.contents import Item, iter_items, key_filter, plain_value
from shardkeep.cli.output import (
    ReadProgress,
    Table,
    UsageError,
    echo,
    format_count,
    format_number,
    format_shape,
    print_json,
    printable,
    styled,
    to_json,
)
from shardkeep.cli.runs import open_with_hints
from shardkeep.engine.reader import open_checked
from shardkeep.errors import StorageError
from shardkeep.format.boxes import ITEMSIZES, segment_starts
from shardkeep.format.checksum import DIGEST_NBYTES
from shardkeep.format.index import Index
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import FileEntry
from shardkeep.opening import Checkpoint

if TYPE_CHECKING:
    from shardkeep.cli.tensors import TensorChange


@dataclass(frozen=True)
class ValueChange:
    """A plain value before and after; a text in brackets stands for one that may not be rebuilt."""

    before: Any
    after: Any


def compare_values(
    a: Checkpoint, one: Item, b: Checkpoint, other: Item, *, rtol: float, atol: float
) -> ValueChange | None:
    """Return how two values differ; None where they do not."""
    if a.index.value_data.raw(one.row) == b.index.value_data.raw(other.row):
        return None
    (before, hidden), (after, too) = plain_value(a, one.key), plain_value(b, other.key)
    if hidden or too:
        return ValueChange(f"({hidden})" if hidden else before, f"({too})" if too else after)
    if type(before) is type(after) and isinstance(before, (int, float, str, bytes)) and before == after:
        return None
    if _both_numbers(before, after) and math.isclose(before, after, rel_tol=0.0, abs_tol=atol + rtol * abs(after)):
        return None
    return ValueChange(before, after)


def _both_numbers(before: Any, after: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after))


# Which tensors of two checkpoints are equal by the digests of the blocks they lie in, without reading them. No torch.
#
# Blocks belong to files, not to tensors, so a block may hold parts of neighbours. Where two tensors have the same
# boxes at
# the same distance from the beginning of a block, and all blocks they touch have equal digests, they are equal; where
# not,
# nothing is known, and they must be read.


class FileDigests:
    """The digests of one checkpoint's files, each read once, with its size and header checked, and where chunks lie."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._store = checkpoint.source.store
        self._of_file: dict[int, bytes] = {}
        index = checkpoint.index
        ends = np.asarray(index.chunk_ends, np.int64)
        itemsizes = np.repeat(ITEMSIZES[index.tensors.dtype], ends - segment_starts(ends))
        self._places = np.stack(
            [
                index.chunks.boxes.volumes() * itemsizes,
                np.asarray(index.chunks.file, np.int64),
                np.asarray(index.chunks.start, np.int64),
            ],
            axis=1,
        )

    def places(self, item: Item) -> list[list[int]]:
        """Return bytes, file and start of each chunk of a tensor."""
        places: list[list[int]] = self._places[self.checkpoint.index.chunk_rows(item.row)].tolist()
        return places

    def of_file(self, number: int) -> bytes:
        """Return the digests of all blocks of a file, end to end; empty where it has none."""
        if number not in self._of_file:
            reader, digests = open_checked(self._store, self.entry(number))
            reader.close()
            self._of_file[number] = digests
        return self._of_file[number]

    def entry(self, number: int) -> FileEntry:
        """Return what the commit record says of a file."""
        return self.checkpoint.record.files[number]


class DigestComparison:
    """Which tensors of two checkpoints are known to be equal."""

    def __init__(self, one: Checkpoint, other: Checkpoint) -> None:
        self._sides: tuple[FileDigests, FileDigests] | None = None
        if one.record.format == other.record.format == NATIVE:
            self._sides = FileDigests(one), FileDigests(other)
            self._same_boxes = _same_boxes(one.index, other.index)

    def known(self, item: Item, its_item: Item) -> bool:
        """Say whether two tensors of one shape and dtype are known to be equal; False where nothing is known."""
        if self._sides is None:
            return False
        one, other = self._sides
        a, b = one.checkpoint.index, other.checkpoint.index
        if not (self._same_boxes and item.row == its_item.row):
            mine, its = a.chunk_rows(item.row), b.chunk_rows(its_item.row)
            axes = len(item.shape)
            if not (
                np.array_equal(a.chunks.offsets[mine, :axes], b.chunks.offsets[its, :axes])
                and np.array_equal(a.chunks.sizes[mine, :axes], b.chunks.sizes[its, :axes])
            ):
                return False
        try:
            places = zip(one.places(item), other.places(its_item), strict=True)
            return all(_equal(one, other, *place, *its_place[1:]) for place, its_place in places)
        except StorageError:
            return False  # whoever reads the values says what is wrong


def _same_boxes(a: Index, b: Index) -> bool:
    """Say whether all tensors of two checkpoints are cut in the same way, as saves of one run are."""
    columns = ((a.chunk_ends, b.chunk_ends), (a.tensors.alias, b.tensors.alias))
    boxes = ((a.chunks.offsets, b.chunks.offsets), (a.chunks.sizes, b.chunks.sizes))
    return all(np.array_equal(mine, its) for mine, its in (*columns, *boxes))


def _equal(
    one: FileDigests, other: FileDigests, nbytes: int, file: int, start: int, its_file: int, its_start: int
) -> bool:
    if not nbytes:
        return True
    block = one.entry(file).block_nbytes
    if not block or block != other.entry(its_file).block_nbytes or (start - its_start) % block:
        return False
    mine = _blocks(one.of_file(file), start, nbytes, block)
    return bool(mine) and mine == _blocks(other.of_file(its_file), its_start, nbytes, block)


def _blocks(digests: bytes, start: int, nbytes: int, block: int) -> bytes:
    first, last = start // block, (start + nbytes - 1) // block
    return digests[first * DIGEST_NBYTES : (last + 1) * DIGEST_NBYTES]


# What `shardkeep diff` found, for people and for programs.

_FEW = 10
"""With so few changed elements, the first of them is worth a line."""
_MOST_VALUE = 30


def print_difference(found: Difference, args: argparse.Namespace) -> None:
    """Print what differs, or that nothing does."""
    echo(f"A  {args.a}\nB  {args.b}\n")
    for title, items in (("only in A", found.only_a), ("only in B", found.only_b)):
        _print_items(title, items, args.limit)
    _print_kinds(found, args.limit)
    _print_values(found, args.limit)
    _print_tensors(found, args.limit)
    unread = f", {found.by_digests:,} of them by their digests: not read" if found.by_digests else ""
    same = "the same keys, shapes and dtypes" if args.keys_only else f"equal{unread}"
    if not found.count:
        echo(styled(f"no difference: {format_count(found.equal, 'key')} {same}", "green"))
    else:
        echo(f"{styled(f'{found.count:,} differ', 'red')}; {format_count(found.equal, 'key')} {same}")


def _print_items(title: str, items: Sequence[Item], limit: int) -> None:
    if items:
        echo(styled(f"{title}: {format_count(len(items), 'key')}", "bold"))
        table = Table(("key", "what"), gives_way="key", indent="  ", headless=True)
        for item in _some(items, limit):
            table.add(printable(item.key), item.what)
        table.print()
        _print_rest(items, limit)


def _print_kinds(found: Difference, limit: int) -> None:
    if found.kinds:
        echo(styled(f"another shape or dtype: {format_count(len(found.kinds), 'key')}", "bold"))
        table = Table(("key", "A", "B"), gives_way="key", indent="  ")
        for one, other in _some(found.kinds, limit):
            table.add(printable(one.key), one.what, other.what)
        table.print()
        _print_rest(found.kinds, limit)


def _print_values(found: Difference, limit: int) -> None:
    if found.values:
        echo(styled(f"other values: {format_count(len(found.values), 'key')}", "bold"))
        table = Table(("key", "A", "B"), gives_way="key", indent="  ")
        for item, change in _some(found.values, limit):
            table.add(printable(item.key), _brief(change.before), _brief(change.after))
        table.print()
        _print_rest(found.values, limit)


def _print_tensors(found: Difference, limit: int) -> None:
    if not found.tensors:
        return
    echo(styled(f"other elements: {format_count(len(found.tensors), 'tensor')}", "bold"))
    table = Table(
        ("key", "changed", "share", "max", "relative"), right="changed share max relative", gives_way="key", indent="  "
    )
    for item, change in _some(found.tensors, limit):
        share = f"{change.changed / change.elements:.1%}" if change.changed * 1000 > change.elements else "<0.1%"
        numbers = (
            format_number(float(f"{x:.4g}")) if change.has_numbers else "" for x in (change.max_abs, change.relative)
        )
        table.add(printable(item.key), f"{change.changed:,}", share, *numbers, below=_remark(change))
    table.print()
    _print_rest(found.tensors, limit)
    echo(styled("  max: the greatest |a-b|; relative: the norm of the change by the norm of A", "dim"))


def _remark(change: TensorChange) -> str:
    remarks = []
    if change.changed <= _FEW and change.first is not None:
        remarks.append(f"at {format_shape(change.first)}: {_both(change.before, change.after)}")
    if change.bits_alone:
        remarks.append(f"{change.bits_alone:,} in bits alone (-0.0, or kinds of NaN)")
    if change.not_finite:
        remarks.append(f"{change.not_finite:,} with NaN or Inf on one side")
    return "; ".join(remarks)


def _both(before: Any, after: Any) -> str:
    """Return both with as many digits as it takes to tell them apart, nine at least."""
    if all(isinstance(value, (float, complex)) for value in (before, after)):
        texts = f"{before:.9g}", f"{after:.9g}"
        if texts[0] != texts[1]:
            return " → ".join(texts)
    return f"{before!r} → {after!r}"


def _brief(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= _MOST_VALUE else text[: _MOST_VALUE - 1] + "…"


def _some(items: Sequence[Any], limit: int) -> Sequence[Any]:
    return items[:limit] if limit > 0 else items


def _print_rest(items: Sequence[Any], limit: int) -> None:
    if 0 < limit < len(items):
        echo(f"  and {len(items) - limit:,} more (--limit 0 lists them)")
    echo()


def difference_json(found: Difference, args: argparse.Namespace) -> dict[str, Any]:
    """Return all that differs, for programs."""
    return {
        "a": args.a,
        "b": args.b,
        "equal": found.count == 0,
        "different_keys": found.count,
        "equal_keys": found.equal,
        "equal_by_digests": found.by_digests,
        "only_in_a": [_item(item) for item in found.only_a],
        "only_in_b": [_item(item) for item in found.only_b],
        "other_kind": [{"key": one.key, "a": _kind(one), "b": _kind(other)} for one, other in found.kinds],
        "other_values": [
            {"key": item.key, "a": to_json(change.before), "b": to_json(change.after)} for item, change in found.values
        ],
        "other_elements": [{"key": item.key, **_kind(item), **_change(change)} for item, change in found.tensors],
    }


def _item(item: Item) -> dict[str, Any]:
    return {"key": item.key, **_kind(item)}


def _kind(item: Item) -> dict[str, Any]:
    return {"dtype": item.dtype, "shape": list(item.shape)} if item.is_tensor else {"dtype": None, "shape": None}


def _change(change: TensorChange) -> dict[str, Any]:
    return {
        "elements": change.elements,
        "changed": change.changed,
        "bits_alone": change.bits_alone,
        "not_finite": change.not_finite,
        "max_abs": change.max_abs if change.has_numbers else None,
        "norm": change.norm if change.has_numbers else None,
        "relative_norm": change.relative if change.has_numbers else None,
        "first": {"index": list(change.first or ()), "a": to_json(change.before), "b": to_json(change.after)},
    }


# `shardkeep diff`: what differs between two checkpoints, of any layout and spread.
#
# Keys, shapes and dtypes come from the indexes. Values whose digests say that they are equal are not read, so that
# comparing a checkpoint with its copy is a matter of milliseconds, and without torch.

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
    tensors: list[tuple[Item, TensorChange]] = field(default_factory=list)
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
        raise UsageError("tolerances are numbers from 0 up")
    a, b = open_with_hints(args.a), open_with_hints(args.b)
    wanted = key_filter(args.pattern, args.prefix)
    strip = args.strip_prefix
    in_a = {item.key[len(strip) :]: item for item in iter_items(a, wanted) if item.key.startswith(strip)}
    # Patterns are of names as A has them.
    of_b = wanted if wanted is None else lambda key: wanted(strip + key)
    in_b = {item.key: item for item in iter_items(b, of_b)}
    if strip and not in_a:
        raise UsageError(f"no key of {args.a} begins with {strip!r}", hint="--strip-prefix is for names of A: model.")
    if wanted is not None and not in_a and not in_b:
        raise UsageError(f"no key of either fits {' '.join([*args.pattern, args.prefix or '']).strip()!r}")
    found = compare_all(a, b, in_a, in_b, args)
    if args.json:
        print_json(difference_json(found, args))
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
    equality = None if args.keys_only or args.read else DigestComparison(a, b)
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
) -> Iterator[tuple[Item, TensorChange]]:
    """Read pairs of tensors, several at a time, and say how those differ that do."""
    if not pairs:
        return
    from shardkeep.cli.tensors import (  # noqa: PLC0415
        Tolerance,
        compare_tensor_batch,
        compare_tensors,
        compute_pool,
    )

    tolerance = Tolerance(args.rtol, args.atol)
    with ReadProgress("comparing", sum(one.nbytes for one, _ in pairs)) as progress, compute_pool() as threads:

        def work(batch: list[Pair]) -> list[TensorChange]:
            if len(batch) > 1:
                changes = compare_tensor_batch(a, b, batch, tolerance)
                progress.add(sum(one.nbytes for one, _ in batch))
                return changes
            stored: tuple[Any, Any] = a[batch[0][0].key], b[batch[0][1].key]
            return [compare_tensors(*stored, tolerance, on_block=progress.add)]

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
