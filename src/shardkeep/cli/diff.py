"""
`shardkeep diff`: what differs between two checkpoints of any layout and sharding.

Keys, shapes and dtypes come from the indexes. Tensors whose digests prove that they are equal are not read, so comparing a
checkpoint with its copy takes milliseconds and does not import torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkeep.cli import argument, command
from shardkeep.cli import output as out
from shardkeep.cli.contents import Item, iter_items, key_filter, plain_value
from shardkeep.cli.runs import Run, open_checkpoint_or_run, open_with_hints
from shardkeep.engine.reader import open_checked
from shardkeep.errors import CheckpointNotFound, StorageError
from shardkeep.format.boxes import ITEMSIZES, segment_starts
from shardkeep.format.data_file import DIGEST_NBYTES
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.opening import Checkpoint

if TYPE_CHECKING:
    from shardkeep.cli.tensors import TensorChange

_SMALL_NBYTES = 1 << 20
_BATCH_NBYTES = 16 << 20
_BATCH_LENGTH = 4096
_FEW_CHANGES = 10
"""With at most this many changed elements, the first of them is printed."""
_MAX_VALUE_WIDTH = 30

Pair = tuple[Item, Item]


@dataclass
class Difference:
    """All differences between two checkpoints, A and B."""

    only_a: list[Item] = field(default_factory=list)
    only_b: list[Item] = field(default_factory=list)
    kinds: list[Pair] = field(default_factory=list)
    """Keys in both whose shape or dtype differs, or that are a tensor in one and a value in the other."""
    tensors: list[tuple[Item, TensorChange]] = field(default_factory=list)
    values: list[tuple[Item, Any, Any]] = field(default_factory=list)
    """Plain values before and after; the reason in parentheses stands for one that cannot be read."""
    equal: int = 0
    """Keys that are equal, or, with `--keys-only`, have the same shape and dtype."""
    by_digests: int = 0
    """Equal keys that were not read."""

    @property
    def count(self) -> int:
        """The number of keys that differ."""
        return sum(len(keys) for keys in (self.only_a, self.only_b, self.kinds, self.tensors, self.values))


@command(
    argument("a", metavar="A", help="a checkpoint, or a run: its last two checkpoints, if B is not given"),
    argument("b", metavar="B", nargs="?", help="another checkpoint, or a run: its last checkpoint"),
    argument("pattern", metavar="PATTERN", nargs="*", help="only these: a key, a dotted prefix, or a glob"),
    argument("--prefix", metavar="KEY", help="only keys that begin with this"),
    argument(
        "--strip-prefix", metavar="TEXT", default="", help="only keys of A with this prefix, without it (B: an export)"
    ),
    argument("--rtol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X times |b| (0)"),
    argument("--atol", type=float, default=0.0, metavar="X", help="allow |a-b| up to X (0: bits are compared)"),
    argument("--keys-only", action="store_true", help="compare keys, shapes and dtypes; read no values"),
    argument("--ignore-dtype", action="store_true", help="compare the numbers of different dtypes"),
    argument("--read", action="store_true", help="read values even if their digests are equal"),
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
    if not (args.rtol >= 0 and args.atol >= 0):
        raise out.UsageError("--rtol and --atol must be 0 or more")
    a, b = _open_both(args)
    wanted = key_filter(args.pattern, args.prefix)
    strip = args.strip_prefix
    in_a = {item.key[len(strip) :]: item for item in iter_items(a, wanted) if item.key.startswith(strip)}
    # Patterns refer to the names in A.
    in_b = {item.key: item for item in iter_items(b, wanted if wanted is None else lambda key: wanted(strip + key))}
    if strip and not in_a:
        raise out.UsageError(
            f"no key of {args.a} begins with {strip!r}", hint="--strip-prefix is a prefix of A: model."
        )
    if wanted is not None and not in_a and not in_b:
        raise out.UsageError(f"no key of either matches {' '.join([*args.pattern, args.prefix or '']).strip()!r}")
    found = _compare(a, b, in_a, in_b, args)
    if args.json:
        out.print_json(_difference_json(found, args))
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
    if other is None:
        if not isinstance(one, Run):
            raise out.UsageError("diff: needs B", hint="of a run alone, the last two checkpoints are compared")
        args.a, args.b = _last(one, 1), _last(one, 0)
        return open_with_hints(args.a), open_with_hints(args.b)
    if isinstance(one, Run):
        args.a = _last(one, 0)
        one = open_with_hints(args.a)
    if isinstance(other, Run):
        args.b = _last(other, 0)
        other = open_with_hints(args.b)
    return one, other


def _last(run: Run, back: int) -> str:
    """Return the path of the last checkpoint of a run, or of one before it; of several of one step only one counts."""
    steps = {entry.name if entry.known_step is None else entry.step: entry for entry in run.entries if entry.committed}
    if len(steps) <= back:
        have = out.format_count(len(steps), "checkpoint")
        raise out.UsageError(f"{run.path} has {have}, and {back + 1} are needed", hint=f"`shardkeep ls {run.path}`")
    return run.path_to(list(steps.values())[back].name)


def _compare(
    a: Checkpoint, b: Checkpoint, in_a: dict[str, Item], in_b: dict[str, Item], args: argparse.Namespace
) -> Difference:
    found = Difference(
        only_a=[item for key, item in in_a.items() if key not in in_b],
        only_b=[item for key, item in in_b.items() if key not in in_a],
    )
    to_read: list[Pair] = []
    native = a.record.format == b.record.format == NATIVE
    digests = (BlockDigests(a), BlockDigests(b)) if native and not (args.keys_only or args.read) else None
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
            change = _compare_values(a, one, b, other, args)
            found.values += [(one, *change)] if change else []
            found.equal += not change
        elif digests and one.dtype == other.dtype and _proved_equal(*digests, one, other):
            found.equal += 1
            found.by_digests += 1
        else:
            to_read.append((one, other))
    found.tensors = sorted(_compare_tensors(a, b, to_read, args), key=lambda changed: out.natural_order(changed[0].key))
    found.equal += len(to_read) - len(found.tensors)
    return found


def _compare_values(
    a: Checkpoint, one: Item, b: Checkpoint, other: Item, args: argparse.Namespace
) -> tuple[Any, Any] | None:
    """Return two values if they differ. Stored forms are compared first, so values that cannot be rebuilt work too."""
    if a.index.value_data.raw(one.row) == b.index.value_data.raw(other.row):
        return None
    (before, hidden), (after, hidden_too) = plain_value(a, one.key), plain_value(b, other.key)
    if hidden or hidden_too:
        return f"({hidden})" if hidden else before, f"({hidden_too})" if hidden_too else after
    if type(before) is type(after) and isinstance(before, (int, float, str, bytes)) and before == after:
        return None
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after))
    if numbers and math.isclose(before, after, rel_tol=0.0, abs_tol=args.atol + args.rtol * abs(after)):
        return None
    return before, after


def _compare_tensors(
    a: Checkpoint, b: Checkpoint, pairs: list[Pair], args: argparse.Namespace
) -> Iterator[tuple[Item, TensorChange]]:
    """Read pairs of tensors on several threads, and yield those that differ."""
    if not pairs:
        return
    from shardkeep.cli import tensors  # noqa: PLC0415 - torch only where values are read

    tolerance = tensors.Tolerance(args.rtol, args.atol)
    with (
        out.ReadProgress("comparing", sum(one.nbytes for one, _ in pairs)) as progress,
        tensors.compute_pool() as threads,
    ):

        def work(batch: list[Pair]) -> list[TensorChange]:
            if len(batch) > 1:
                changes = tensors.compare_tensor_batch(a, b, batch, tolerance)
                progress.add(sum(one.nbytes for one, _ in batch))
                return changes
            stored: tuple[Any, Any] = a[batch[0][0].key], b[batch[0][1].key]
            return [tensors.compare_tensors(*stored, tolerance, on_block=progress.add)]

        batches = list(_batches(pairs))
        for batch, changes in zip(batches, threads.map(work, batches), strict=True):
            yield from ((pair[0], change) for pair, change in zip(batch, changes, strict=True) if change.changed)


def _batches(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Group small tensors, because locating one costs more than reading it."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        size = max(pair[0].nbytes, pair[1].nbytes)
        if size > _SMALL_NBYTES:
            yield [pair]
            continue
        if batch and (nbytes + size > _BATCH_NBYTES or len(batch) == _BATCH_LENGTH):
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += size
    if batch:
        yield batch


# -- equality by digests


class BlockDigests:
    """The block digests of a native checkpoint's tensors; those of a file are read once, with size and header checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._digests: dict[int, bytes] = {}
        index = checkpoint.index
        ends = np.asarray(index.chunk_ends, np.int64)
        itemsizes = np.repeat(ITEMSIZES[index.tensors.dtype], ends - segment_starts(ends))
        columns = (index.chunks.boxes.volumes() * itemsizes, index.chunks.file, index.chunks.start)
        self._ranges = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        self._boxes = [np.asarray(column, np.int64) for column in (index.chunks.offsets, index.chunks.sizes)]

    def of(self, item: Item) -> list[Any] | None:
        """
        Return what proves that a tensor is equal to another one, if that one has the same; None if there are no digests.

        Blocks belong to files, not to tensors, so a block may also hold bytes of neighbours. Two tensors are equal if they
        have the same boxes at the same distance from the beginning of a block, and all blocks that they touch have equal
        digests. Otherwise nothing is known, and they must be read.
        """
        rows, files = self._checkpoint.index.chunk_rows(item.row), self._checkpoint.record.files
        found: list[Any] = [column[rows, : len(item.shape)].tobytes() for column in self._boxes]
        for nbytes, file, start in self._ranges[rows].tolist():
            if file not in self._digests:
                reader, self._digests[file] = open_checked(self._checkpoint.source.store, files[file])
                reader.close()
            block = files[file].block_nbytes
            if not block:
                return None
            first, end = start // block, -(-(start + nbytes) // block)
            digests = self._digests[file][first * DIGEST_NBYTES : end * DIGEST_NBYTES] if nbytes else b""
            found.append((block, start % block, digests) if nbytes else None)
        return found


def _proved_equal(one: BlockDigests, other: BlockDigests, item: Item, other_item: Item) -> bool:
    try:
        found = one.of(item)
        return found is not None and found == other.of(other_item)
    except StorageError:
        return False  # reading the values will report the problem


# -- output


def _print_difference(found: Difference, args: argparse.Namespace) -> None:
    print(f"A  {args.a}\nB  {args.b}\n")
    both = ("key", "A", "B")
    for title, items in (("only in A", found.only_a), ("only in B", found.only_b)):
        table = out.Table(("key", "what"), flexible="key", indent="  ", show_headings=False)
        _print_section(title, table, [(out.printable(item.key), item.what) for item in items], args.limit)
    kinds = [(out.printable(one.key), one.what, other.what) for one, other in found.kinds]
    _print_section("different shape or dtype", out.Table(both, flexible="key", indent="  "), kinds, args.limit)
    values = [(out.printable(item.key), _brief(before), _brief(after)) for item, before, after in found.values]
    _print_section("different values", out.Table(both, flexible="key", indent="  "), values, args.limit)
    columns = ("changed", "share", "max", "relative")
    table = out.Table(("key", *columns), right=columns, flexible="key", indent="  ")
    _print_section("different elements", table, list(starmap(_tensor_row, found.tensors)), args.limit, noun="tensor")
    if found.tensors:
        print(out.styled("  max: greatest |a-b|; relative: norm of the change divided by the norm of A", "dim"))
    unread = f", {found.by_digests:,} of them by their digests, without reading" if found.by_digests else ""
    same = "with the same shapes and dtypes" if args.keys_only else f"equal{unread}"
    if not found.count:
        print(out.styled(f"no difference: {out.format_count(found.equal, 'key')} {same}", "green"))
    else:
        print(f"{out.styled(f'{found.count:,} differ', 'red')}; {out.format_count(found.equal, 'key')} {same}")


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


def _tensor_row(item: Item, change: TensorChange) -> tuple[str, ...]:
    share = f"{change.changed / change.elements:.1%}" if change.changed * 1000 > change.elements else "<0.1%"
    sizes = (change.max_abs, change.relative)
    numbers = (out.format_number(float(f"{size:.4g}")) if change.has_numbers else "" for size in sizes)
    return out.printable(item.key), f"{change.changed:,}", share, *numbers, _note(change)


def _note(change: TensorChange) -> str:
    notes = []
    if change.changed <= _FEW_CHANGES and change.first is not None:
        notes.append(f"at {out.format_shape(change.first)}: {_distinct(change.before, change.after)}")
    if change.bits_alone:
        notes.append(f"{change.bits_alone:,} differ only in bits (-0.0, or kinds of NaN)")
    if change.not_finite:
        notes.append(f"{change.not_finite:,} with NaN or Inf on one side")
    return "; ".join(notes)


def _distinct(before: Any, after: Any) -> str:
    """Return both numbers with nine digits, or with all digits if nine are the same."""
    if all(isinstance(value, (float, complex)) for value in (before, after)):
        texts = f"{before:.9g}", f"{after:.9g}"
        if texts[0] != texts[1]:
            return " → ".join(texts)
    return f"{before!r} → {after!r}"


def _brief(value: Any) -> str:
    return out.shorten(out.printable(repr(value)), _MAX_VALUE_WIDTH)


def _difference_json(found: Difference, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "a": args.a,
        "b": args.b,
        "equal": found.count == 0,
        "different_keys": found.count,
        "equal_keys": found.equal,
        "equal_by_digests": found.by_digests,
        "only_in_a": [{"key": item.key, **_kind_json(item)} for item in found.only_a],
        "only_in_b": [{"key": item.key, **_kind_json(item)} for item in found.only_b],
        "other_kind": [{"key": one.key, "a": _kind_json(one), "b": _kind_json(other)} for one, other in found.kinds],
        "other_values": [{"key": item.key, "a": before, "b": after} for item, before, after in found.values],
        "other_elements": [
            {"key": item.key, **_kind_json(item), **_change_json(change)} for item, change in found.tensors
        ],
    }


def _kind_json(item: Item) -> dict[str, Any]:
    return {"dtype": item.dtype, "shape": list(item.shape)} if item.is_tensor else {"dtype": None, "shape": None}


def _change_json(change: TensorChange) -> dict[str, Any]:
    return {
        "elements": change.elements,
        "changed": change.changed,
        "bits_alone": change.bits_alone,
        "not_finite": change.not_finite,
        "max_abs": change.max_abs if change.has_numbers else None,
        "norm": change.norm if change.has_numbers else None,
        "relative_norm": change.relative if change.has_numbers else None,
        "first": {"index": list(change.first or ()), "a": change.before, "b": change.after},
    }
