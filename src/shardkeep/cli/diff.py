"""
`shardkeep diff`: what differs between two checkpoints of any layout and sharding.

Keys, shapes and dtypes come from the indexes. Tensors whose digests prove that they are equal are not read, so comparing a
checkpoint with its copy takes milliseconds and does not import torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Any

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.contents import Item, Unreadable, iter_items, plain_value, stored_chunks
from shardkeep.cli.runs import Run, open_checkpoint_or_run, open_with_hints, suggest_path
from shardkeep.engine.reader import open_checked
from shardkeep.errors import CheckpointNotFound, StorageError
from shardkeep.format.data_file import DIGEST_NBYTES
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.opening import Checkpoint
from shardkeep.state.patterns import matcher

if TYPE_CHECKING:
    from shardkeep.cli.tensors import TensorChange

_FEW_CHANGES = 10
"""With at most this many changed elements, the first of them is printed."""
_MAX_VALUE_WIDTH = 30

Pair = tuple[Item, Item]


@dataclass
class Difference:
    """All differences between two checkpoints, A and B, by their keys in A."""

    only_in_a: dict[str, Item]
    only_in_b: dict[str, Item]
    other_kind: dict[str, Pair] = field(default_factory=dict)
    """Those whose shape or dtype differs, or that are a tensor in one and a value in the other."""
    other_values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    other_elements: dict[str, TensorChange] = field(default_factory=dict)
    equal_keys: int = 0
    """Keys that are equal, or, with `--keys-only`, have the same shape and dtype."""
    equal_by_digests: int = 0
    """Equal keys that were not read."""

    @property
    def count(self) -> int:
        of_both: list[dict[str, Any]] = [self.other_kind, self.other_values, self.other_elements]
        return len(self.only_in_a) + len(self.only_in_b) + sum(map(len, of_both))


@command(
    argument("a", metavar="A", help="a checkpoint, or a run: its last two checkpoints, if B is not given"),
    argument("b", metavar="B", nargs="?", help="another checkpoint, or a run: its last checkpoint"),
    argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob"),
    argument(
        "--strip-prefix", metavar="TEXT", default="", help="only keys of A with this prefix, without it (B: an export)"
    ),
    argument("--rtol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X times |b| (0)"),
    argument("--atol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X (0: bits are compared)"),
    argument("--keys-only", action="store_true", help="compare keys, shapes and dtypes; read no values"),
    argument("--ignore-dtype", action="store_true", help="compare the numbers of different dtypes"),
    argument("--limit", type=int, default=20, metavar="N", help="lines of each kind (20; 0: all)"),
    examples="""
  shardkeep diff runs/a/step-500 runs/b/step-500
  shardkeep diff runs/a --keys-only
  shardkeep diff step-500 hf --strip-prefix model. --ignore-dtype --rtol 1e-2
  shardkeep diff runs/a/step-500 runs/a/step-600 'model.*.weight' --keys-only
""",
    paged=True,
)
def diff(args: argparse.Namespace) -> int:
    if not (0 <= args.rtol < math.inf and 0 <= args.atol < math.inf):
        raise out.UsageError("--rtol and --atol must be 0 or more, and finite")
    a, b = _open_both(args)
    wanted, strip = matcher(args.pattern or None), args.strip_prefix
    in_a = {item.key[len(strip) :]: item for item in iter_items(a, wanted) if item.key.startswith(strip)}
    # Patterns refer to the names in A.
    in_b = {item.key: item for item in iter_items(b, lambda key: wanted(strip + key))}
    if strip and not in_a:
        raise out.UsageError(
            f"no key of {args.a} begins with {strip!r}", hint="--strip-prefix is a prefix of A: model."
        )
    if args.pattern and not in_a and not in_b:
        raise out.UsageError(f"no key of either matches {' '.join(args.pattern)!r}")
    found = _compare(a, b, in_a, in_b, args)
    if args.json:
        head = {"a": args.a, "b": args.b, "equal": not found.count, "different_keys": found.count}
        out.print_json(head | vars(found))
    else:
        _print_difference(found, args)
    return 1 if found.count else 0


def _open_both(args: argparse.Namespace) -> tuple[Checkpoint, Checkpoint]:
    """Open what is compared, and put its paths into `args`: of a run the last checkpoint, of one run alone the last two."""
    one = open_checkpoint_or_run(args.a)
    try:
        other = None if args.b is None else open_checkpoint_or_run(args.b)
    except CheckpointNotFound:
        if not isinstance(one, Run):
            raise
        other, args.pattern = None, [args.b, *args.pattern]
    back = 0
    if other is None:
        if not isinstance(one, Run):
            raise out.UsageError("diff: needs B", hint="of a run alone, the last two checkpoints are compared")
        back, other = 1, one
    (args.a, a), (args.b, b) = _choose(one, args.a, back), _choose(other, args.b, 0)
    return a, b


def _choose(found: Checkpoint | Run, path: str, back: int) -> tuple[str, Checkpoint]:
    """Return path and checkpoint: of a run its last one, or one before that; of several of one step only one counts."""
    if not isinstance(found, Run):
        return path, found
    steps = {
        entry.name if entry.known_step is None else entry.step: entry for entry in found.entries if entry.committed
    }
    if len(steps) <= back:
        have = out.format_count(len(steps), "checkpoint")
        hint = "" if steps else suggest_path(path)
        raise out.UsageError(f"{path} has {have}, and {back + 1} are needed", hint=hint or f"`shardkeep ls {path}`")
    path = found.path_to(list(steps.values())[back].name)
    return path, open_with_hints(path)


def _compare(
    a: Checkpoint, b: Checkpoint, in_a: dict[str, Item], in_b: dict[str, Item], args: argparse.Namespace
) -> Difference:
    found = Difference(
        only_in_a={item.key: item for key, item in in_a.items() if key not in in_b},
        only_in_b={item.key: item for key, item in in_b.items() if key not in in_a},
    )
    to_read: list[Pair] = []
    native = a.record.format == b.record.format == NATIVE
    digests = (BlockDigests(a), BlockDigests(b)) if native and not args.keys_only else None
    for key, one in in_a.items():
        other = in_b.get(key)
        if other is None:
            continue
        if (
            one.shape != other.shape
            or one.is_tensor != other.is_tensor
            or (one.dtype != other.dtype and not (args.ignore_dtype and one.is_tensor))
        ):
            found.other_kind[one.key] = one, other
        elif args.keys_only:
            found.equal_keys += 1
        elif not one.is_tensor:
            if change := _compare_values(a, one, b, other, args):
                found.other_values[one.key] = change
            found.equal_keys += not change
        elif digests and one.dtype == other.dtype and _proved_equal(*digests, one, other):
            found.equal_keys += 1
            found.equal_by_digests += 1
        else:
            to_read.append((one, other))
    found.other_elements = _compare_tensors(a, b, to_read, args)
    found.equal_keys += len(to_read) - len(found.other_elements)
    return found


def _compare_values(
    a: Checkpoint, one: Item, b: Checkpoint, other: Item, args: argparse.Namespace
) -> tuple[Any, Any] | None:
    """Return two values if they differ. Stored forms are compared first, so values that cannot be rebuilt work too."""
    if a.index.value_data.raw(one.row) == b.index.value_data.raw(other.row):
        return None
    before, after = plain_value(a, one.key), plain_value(b, other.key)
    if repr(before) == repr(after) and not isinstance(before, Unreadable):
        return None
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after))
    if numbers and math.isclose(before, after, rel_tol=0.0, abs_tol=args.atol + args.rtol * abs(after)):
        return None
    return before, after


def _compare_tensors(
    a: Checkpoint, b: Checkpoint, pairs: list[Pair], args: argparse.Namespace
) -> dict[str, TensorChange]:
    if not pairs:
        return {}
    from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

    with out.byte_bar("comparing", sum(one.nbytes for one, _ in pairs)) as update:
        changes = tensors.compare_tensors(a, b, pairs, args.rtol, args.atol, lambda read: update(advance=read))
    return {one.key: change for (one, _), change in zip(pairs, changes, strict=True) if change.changed}


class BlockDigests:
    """The block digests of a native checkpoint's tensors; those of a file are read once, with size and header checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = {file.name: file for file in checkpoint.record.files}
        self._digests: dict[str, bytes] = {}

    def of(self, item: Item) -> list[Any] | None:
        """
        Return what proves that a tensor is equal to another one, if that one has the same; None if there are no digests.

        Blocks belong to files, not to tensors, so a block may also hold bytes of neighbours. Two tensors are equal if they
        have the same boxes at the same distance from the beginning of a block, and all blocks that they touch have equal
        digests. Otherwise nothing is known, and they must be read.
        """
        found: list[Any] = []
        for chunk in stored_chunks(self._checkpoint, item):
            file = self._files[chunk.file]
            if not file.block_nbytes:
                return None
            if file.name not in self._digests:
                reader, self._digests[file.name] = open_checked(self._checkpoint.source.store, file)
                reader.close()
            start = chunk.offset - file.header_nbytes
            first, end = start // file.block_nbytes, -(-(start + chunk.nbytes) // file.block_nbytes)
            digests = self._digests[file.name][first * DIGEST_NBYTES : end * DIGEST_NBYTES]
            found.append((chunk.box, file.block_nbytes, start % file.block_nbytes, digests))
        return found


def _proved_equal(one: BlockDigests, other: BlockDigests, item: Item, other_item: Item) -> bool:
    try:
        found = one.of(item)
        return found is not None and found == other.of(other_item)
    except StorageError:
        return False  # reading the values will report the problem


def _print_difference(found: Difference, args: argparse.Namespace) -> None:
    print(f"A  {args.a}\nB  {args.b}\n")
    both = ("key", "A", "B")
    for title, items in (("only in A", found.only_in_a), ("only in B", found.only_in_b)):
        table = out.Table(("key", "what"), flexible="key", indent="  ", show_headings=False)
        _print_section(title, table, [(key, item.what) for key, item in items.items()], args.limit)
    kinds = [(key, one.what, other.what) for key, (one, other) in found.other_kind.items()]
    _print_section("different shape or dtype", out.Table(both, flexible="key", indent="  "), kinds, args.limit)
    values = [(key, _brief(before), _brief(after)) for key, (before, after) in found.other_values.items()]
    _print_section("different values", out.Table(both, flexible="key", indent="  "), values, args.limit)
    columns = ("changed", "share", "max", "relative")
    table = out.Table(("key", *columns), right=columns, flexible="key", indent="  ")
    rows = list(starmap(_tensor_row, found.other_elements.items()))
    _print_section("different elements", table, rows, args.limit, noun="tensor")
    if found.other_elements:
        print(out.styled("  max: greatest |a-b|; relative: norm of the change divided by the norm of A", "dim"))
    unread = f", {found.equal_by_digests:,} of them by their digests, without reading" if found.equal_by_digests else ""
    same = "with the same shapes and dtypes" if args.keys_only else f"equal{unread}"
    if not found.count:
        print(out.styled(f"no difference: {out.format_count(found.equal_keys, 'key')} {same}", "green"))
    else:
        print(f"{out.styled(f'{found.count:,} differ', 'red')}; {out.format_count(found.equal_keys, 'key')} {same}")
        if prefix := _prefix_of_all(found):
            print(out.wrap_lines(f"the names of B are names of A without {prefix!r}: --strip-prefix {prefix}"))


def _prefix_of_all(found: Difference) -> str:
    """Return what all names of B lack to be names of A, as after an export; empty unless there is such a prefix."""
    if not found.only_in_b or len(found.only_in_b) + len(found.only_in_a) < found.count or found.equal_keys:
        return ""
    first = next(iter(found.only_in_b))
    prefixes = (key.removesuffix(first) for key in found.only_in_a if key.endswith(f".{first}"))
    return next((each for each in prefixes if all(each + key in found.only_in_a for key in found.only_in_b)), "")


def _print_section(
    title: str, table: out.Table, rows: Sequence[Sequence[str]], limit: int, *, noun: str = "key"
) -> None:
    """Print up to `limit` rows below a title, if there are any; a row may end with a note."""
    if not rows:
        return
    print(out.styled(f"{title}: {out.format_count(len(rows), noun)}", "bold"))
    for row in rows[:limit] if limit > 0 else rows:
        table.add(*row[: len(table.headings)], note="".join(row[len(table.headings) :]))
    table.print()
    if 0 < limit < len(rows):
        print(f"  and {len(rows) - limit:,} more (--limit 0 lists them)")
    print()


def _tensor_row(key: str, change: TensorChange) -> tuple[str, ...]:
    share = f"{change.changed / change.elements:.1%}" if change.changed * 1000 > change.elements else "<0.1%"
    numbers = (out.format_number(float(f"{size:.4g}")) for size in (change.max_abs, change.relative))
    note = ""
    if change.changed <= _FEW_CHANGES and change.first is not None:
        note = f"at {out.format_shape(change.first.index)}: {change.first.a!r} → {change.first.b!r}"
    return key, f"{change.changed:,}", share, *numbers, note


def _brief(value: Any) -> str:
    return out.shorten(out.printable(repr(value)), _MAX_VALUE_WIDTH)
