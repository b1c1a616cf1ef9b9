"""The items of a checkpoint of any layout, read from its index without torch and without reading tensor data."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from shardkeep.cli import output as out
from shardkeep.engine.safetensors_source import FORMAT as SAFETENSORS
from shardkeep.errors import CheckpointError
from shardkeep.format.boxes import Box
from shardkeep.opening import Checkpoint
from shardkeep.state.patterns import matcher, prefixes_of

VALUE = "value"
_MAX_VALUE_NBYTES = 1 << 20
"""Larger values are not listed: torch's layout keeps values outside of the index, so each has to be read."""
_VALUE_WIDTH = 24
"""Of values in a table: every float fits."""
_RAW = re.compile(r"u?int[1-7]|bits.*|float4.*")
"""Dtypes without arithmetic: a byte may hold several numbers."""


@dataclass(frozen=True)
class Chunk:
    box: Box
    file: str
    offset: int
    """Where its bytes begin in the file; in torch's layout, where its archive begins."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    row: int
    dtype: str
    """A torch dtype name; "value" if it is not a tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    """Size of the tensor, even if it shares its bytes with another; of a value, as it is stored."""
    chunks: int = 0
    tied_to: str = ""
    """Key of the tensor whose bytes it shares."""

    @property
    def is_tensor(self) -> bool:
        return self.dtype != VALUE

    @property
    def own_nbytes(self) -> int:
        return 0 if self.tied_to else self.nbytes

    @property
    def what(self) -> str:
        return f"{self.dtype} {out.format_shape(self.shape)}" if self.is_tensor else VALUE


def is_raw(dtype: str) -> bool:
    """Return whether elements of a dtype are bits without a meaning as numbers."""
    return _RAW.fullmatch(dtype) is not None


def iter_items(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> Iterator[Item]:
    """Yield the items of a checkpoint whose keys are wanted, sorted by key, with numbers in natural order."""
    index = checkpoint.index
    value_ends = [*index.value_data.ends.tolist(), 0]
    for key in sorted(filter(wanted, checkpoint), key=out.natural_order):
        row = index.tensor_rows.get(key)
        if row is None:
            row = index.value_rows[key]
            in_index = value_ends[row] - value_ends[row - 1]
            yield Item(key, row, VALUE, nbytes=in_index or checkpoint.source.value_nbytes(key))
            continue
        dtype, shape, chunks = index.dtype(row), index.shape(row), index.chunk_rows(row)
        owner = index.tensors.alias[row]
        tied_to = "" if owner == row else index.keys.raw(owner).decode()
        nbytes = math.prod(shape) * dtype.itemsize
        yield Item(key, row, dtype.name, shape, nbytes, chunks=chunks.stop - chunks.start, tied_to=tied_to)


def matching_items(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[Item]:
    """Return the items that patterns select, or all without any; raise `UsageError` if no key matches."""
    found = list(iter_items(checkpoint, matcher(patterns or None)))
    if not found and patterns:
        otherwise = "a pattern is a key, a dotted prefix of keys, or a glob"
        hint = out.did_you_mean(patterns[0], prefixes_of(checkpoint)) or otherwise
        raise out.UsageError(f"no key matches {' '.join(patterns)!r}", hint=hint)
    return found


def stored_chunks(checkpoint: Checkpoint, item: Item) -> list[Chunk]:
    if not item.is_tensor:
        return []
    index, record = checkpoint.index, checkpoint.record
    itemsize = index.dtype(item.row).itemsize
    rows = index.chunk_rows(item.row)
    found = []
    for row in range(rows.start, rows.stop):
        box = index.chunks.boxes.box(row, len(item.shape))
        file = record.files[int(index.chunks.file[row])]
        offset = file.header_nbytes + checkpoint.source.position(row)[1]
        found.append(Chunk(box, file.name, offset, box.volume * itemsize))
    return found


def find_items(checkpoint: Checkpoint, key: str) -> list[Item]:
    """Return the item of a key, or those below a prefix; the error for neither names keys that are spelt alike."""
    below = f"{key.rstrip('.')}."
    if found := list(iter_items(checkpoint, lambda each: each == key or each.startswith(below))):
        return [item for item in found if item.key == key] or found
    missing = checkpoint.missing_key(key)
    raise out.UsageError(missing.message, hint=missing.hint or "`shardkeep ls CHECKPOINT` lists its keys")


def text_of(checkpoint: Checkpoint, item: Item) -> str:
    """Return dtype, shape and size of a tensor, and the one it is tied to; of a value, the value."""
    if not item.is_tensor:
        return value_text(checkpoint, item)
    tied = f", shared with {out.printable(item.tied_to)}" if item.tied_to else ""
    return f"{item.what}, {out.format_size(item.nbytes)}{tied}"


def brief_value(checkpoint: Checkpoint, item: Item) -> str:
    return out.shorten(value_text(checkpoint, item), _VALUE_WIDTH)


def value_text(checkpoint: Checkpoint, item: Item) -> str:
    """Return a plain value as Python writes it, or the reason why it is not shown, in parentheses."""
    if item.nbytes > _MAX_VALUE_NBYTES:
        return f"({out.format_size(item.nbytes)}: `shardkeep show` reads it)"
    return out.printable(repr(plain_value(checkpoint, item.key)))


@dataclass(frozen=True)
class Unreadable:
    reason: str

    def __repr__(self) -> str:
        return f"({self.reason})"


def plain_value(checkpoint: Checkpoint, key: str) -> Any:
    try:
        return checkpoint[key]
    except CheckpointError as exc:
        return Unreadable(exc.message)


def summarize(checkpoint: Checkpoint) -> str:
    record, totals = checkpoint.record, checkpoint.record.totals
    step = f"step {record.step}, " if record.step is not None else ""
    try:
        age_s = (datetime.now(timezone.utc) - datetime.fromisoformat(record.saved_at)).total_seconds()
        age = f"{out.format_age(age_s)} ago"
    except (ValueError, TypeError):  # no valid time, or no time zone
        age = ""
    values = f", {out.format_count(totals.values, 'value')}" if totals.values else ""
    ranks = "" if record.format == SAFETENSORS else f" by {out.format_count(record.world_size, 'rank')}"
    return (
        f"{record.format}, {step}saved {age}{ranks}\n"
        f"{out.format_count(totals.tensors, 'tensor')}{values}, {out.format_size(totals.tensor_bytes)};"
        f" {out.format_count(len(record.files), 'file')} of {out.format_size(record.stored_nbytes)}"
    )


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    record, totals = checkpoint.record, checkpoint.record.totals
    named = ("format", "step", "saved_at", "writer", "world_size", "meta")
    return {
        **{name: getattr(record, name) for name in named},
        **{name: getattr(totals, name) for name in ("tensors", "values", "chunks", "tensor_bytes")},
        "stored_bytes": record.stored_nbytes,
        "files": len(record.files),
    }


def print_chunks(chunks: Sequence[Chunk]) -> None:
    """Print box, size and location of each chunk; on a terminal, names of files are shortened to fit."""
    widest = max((len(str(chunk.box)) for chunk in chunks), default=0)
    room = out.terminal_width() or sys.maxsize
    for chunk in chunks:
        line, place = f"  {str(chunk.box).ljust(widest)}  {out.format_size(chunk.nbytes):>7}  ", f" at {chunk.offset:,}"
        print(line + out.shorten_name(out.printable(chunk.file), max(12, room - len(line) - len(place))) + place)
