"""
The items of a checkpoint of any layout, read from its index without torch and without reading tensor data.

Listing a checkpoint of a million keys takes the memory of its index and one small object per key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from shardkeep.cli.output import (
    UsageError,
    did_you_mean,
    echo,
    format_count,
    format_duration,
    format_shape,
    format_size,
    printable,
    shorten_middle,
    terminal_width,
)
from shardkeep.errors import CheckpointError
from shardkeep.format import dtypes
from shardkeep.format.boxes import Box
from shardkeep.opening import Checkpoint
from shardkeep.state.patterns import matcher

VALUE = "value"


class Chunk(NamedTuple):
    """One stored box of a tensor."""

    box: Box
    file: str
    offset: int
    """Where its bytes begin in the file; in torch's layout, where its archive begins."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """One key of a checkpoint."""

    key: str
    row: int
    dtype: str
    """A torch dtype name; "value" if it is not a tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    """Size of the tensor, even if it shares its bytes with another."""
    chunks: int = 0
    tied_to: str = ""
    """Key of the tensor whose bytes it shares."""

    @property
    def is_tensor(self) -> bool:
        return self.dtype != VALUE

    @property
    def own_nbytes(self) -> int:
        """Bytes stored for this key and no other."""
        return 0 if self.tied_to else self.nbytes

    @property
    def what(self) -> str:
        """Dtype and shape: bfloat16 [4096, 1024]."""
        return f"{self.dtype} {format_shape(self.shape)}" if self.is_tensor else VALUE


def iter_items(checkpoint: Checkpoint, wanted: Callable[[str], bool] | None = None) -> Iterator[Item]:
    """Yield the items of a checkpoint, sorted by key."""
    tensors, values = checkpoint.index.keys.all(), checkpoint.index.value_keys.all()
    make = _tensor_maker(checkpoint, tensors)
    both = [(raw, row, True) for row, raw in enumerate(tensors)] + [(raw, row, False) for row, raw in enumerate(values)]
    both.sort()
    for raw, row, is_tensor in both:
        key = raw.decode()
        if wanted is None or wanted(key):
            yield make(key, row) if is_tensor else Item(key, row, VALUE, nbytes=_value_nbytes(checkpoint, row))


def _value_nbytes(checkpoint: Checkpoint, row: int) -> int:
    """Return the size of a value in the index; 0 for torch's layout, which stores values elsewhere."""
    ends = checkpoint.index.value_data.ends
    return int(ends[row]) - (int(ends[row - 1]) if row else 0)


def _tensor_maker(checkpoint: Checkpoint, keys: list[bytes]) -> Callable[[str, int], Item]:
    index = checkpoint.index
    columns = index.tensors
    codes, ndims, shapes, owners = (
        column.tolist() for column in (columns.dtype, columns.ndim, columns.shape, columns.alias)
    )
    ends = [*index.chunk_ends.tolist(), 0]

    def make(key: str, row: int) -> Item:
        dtype = dtypes.by_code(codes[row])
        shape = tuple(shapes[row][: ndims[row]])
        owner = owners[row]
        first = ends[owner - 1] if owner else 0
        return Item(
            key=key,
            row=row,
            dtype=dtype.name,
            shape=shape,
            nbytes=math.prod(shape) * dtype.itemsize,
            chunks=ends[owner] - first,
            tied_to="" if owner == row else keys[owner].decode(),
        )

    return make


def stored_chunks(checkpoint: Checkpoint, item: Item) -> list[Chunk]:
    """Return where the parts of a tensor are stored."""
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


def find_item(checkpoint: Checkpoint, key: str) -> Item:
    """
    Return the item of a key.

    Raises:
        UsageError: there is none; the hint names keys that are spelt alike or lie below it.

    """
    if key in checkpoint:
        raw = key.encode()
        row = checkpoint.index.keys.find(raw)
        if row is not None:
            return _tensor_maker(checkpoint, checkpoint.index.keys.all())(key, row)
        row = checkpoint.index.value_keys.find(raw) or 0
        return Item(key, row, VALUE, nbytes=_value_nbytes(checkpoint, row))
    below = [name for name in checkpoint if name.startswith(f"{key}.")]
    if below:
        some = ", ".join(below[:3]) + (", …" if len(below) > 3 else "")
        raise UsageError(f"{key!r} is not a key, but a prefix of {format_count(len(below), 'key')}: {some}")
    hint = did_you_mean(key, checkpoint, otherwise="`shardkeep ls CHECKPOINT` lists its keys")
    raise UsageError(f"the checkpoint has no key {key!r}", hint=hint)


def plain_value(checkpoint: Checkpoint, key: str) -> tuple[Any, str]:
    """Return a plain value and "", or None and the reason why it cannot be read."""
    try:
        return checkpoint[key], ""
    except CheckpointError as exc:
        return None, exc.message


def key_filter(patterns: list[str], prefix: str | None) -> Callable[[str], bool] | None:
    """Return the filter for `PATTERN …` and `--prefix`; None if all keys pass."""
    if not patterns and prefix is None:
        return None
    fits = matcher(patterns or None)
    start = prefix or ""
    return lambda key: fits(key) and (key == start or key.startswith(start if start[-1:] in {"", "."} else start + "."))


def age_s(saved_at: str) -> float | None:
    """Return the seconds since a time in ISO format; None if it has no valid time or no time zone."""
    try:
        when = datetime.fromisoformat(saved_at)
    except ValueError:
        return None
    if when.tzinfo is None:
        return None
    return (datetime.now(timezone.utc) - when).total_seconds()


def summarize(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint in two lines."""
    record, totals = checkpoint.record, checkpoint.record.totals
    age = age_s(record.saved_at)
    written = f"saved {format_duration(age)} ago by" if age is not None else "saved by"
    step = f"step {record.step}, " if record.step is not None else ""
    holds = [format_count(totals.tensors, "tensor")] + ([format_count(totals.values, "value")] if totals.values else [])
    stored = record.stored_nbytes
    return (
        f"{record.format}, {step}{written} {format_count(record.world_size, 'rank')}\n"
        f"{', '.join(holds)}, {format_size(totals.tensor_bytes)};"
        f" {format_count(len(record.files), 'file')} of {format_size(stored)}"
    )


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint as JSON."""
    record, totals = checkpoint.record, checkpoint.record.totals
    return {
        "format": record.format,
        "step": record.step,
        "saved_at": record.saved_at,
        "writer": record.writer,
        "world_size": record.world_size,
        "meta": record.meta,
        "tensors": totals.tensors,
        "values": totals.values,
        "chunks": totals.chunks,
        "tensor_bytes": totals.tensor_bytes,
        "stored_bytes": record.stored_nbytes,
        "files": len(record.files),
    }


def item_json(checkpoint: Checkpoint, item: Item, *, chunks: bool) -> dict[str, Any]:
    """Describe an item as JSON."""
    if not item.is_tensor:
        return {"key": item.key, "kind": VALUE, "nbytes": item.nbytes}
    found: dict[str, Any] = {
        "key": item.key,
        "kind": "tensor",
        "dtype": item.dtype,
        "shape": list(item.shape),
        "nbytes": item.nbytes,
        "tied_to": item.tied_to or None,
    }
    if chunks:
        found["chunks"] = [
            {
                "offsets": list(chunk.box.offsets),
                "sizes": list(chunk.box.sizes),
                "file": chunk.file,
                "offset": chunk.offset,
                "nbytes": chunk.nbytes,
            }
            for chunk in stored_chunks(checkpoint, item)
        ]
    return found


def print_chunks(chunks: Sequence[Chunk]) -> None:
    """Print box, size and location of each chunk; on a terminal, names of files are shortened to fit."""
    widest = max((len(str(chunk.box)) for chunk in chunks), default=0)
    room = terminal_width()
    for chunk in chunks:
        line, place = f"  {str(chunk.box).ljust(widest)}  {format_size(chunk.nbytes):>7}  ", f" at {chunk.offset:,}"
        name = printable(chunk.file)
        echo(line + (name if room is None else shorten_middle(name, max(12, room - len(line) - len(place)))) + place)
