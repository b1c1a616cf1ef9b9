"""
What is in a checkpoint, item by item, whatever its layout: read from the index, without a byte of tensor data.

No torch here. A checkpoint of a million keys costs its index and one small object a key, while it is listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from shardkeep.cli.output import UsageError, did_you_mean, format_count, format_duration, format_shape, format_size
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
    """Where in the file its bytes begin; of a torch archive, where the archive begins."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """One key of a checkpoint."""

    key: str
    row: int
    dtype: str
    """A torch name; "value" for what is no tensor."""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    """Bytes of the tensor, also where it shares them with another."""
    chunks: int = 0
    tied_to: str = ""
    """Key of the tensor whose bytes it shares."""
    group: str = ""
    """What its file is called after, which is the top-level key at the time of the save."""

    @property
    def is_tensor(self) -> bool:
        return self.dtype != VALUE

    @property
    def own_nbytes(self) -> int:
        """Bytes that are there because of this key."""
        return 0 if self.tied_to else self.nbytes

    @property
    def what(self) -> str:
        """Say what it is: bfloat16 [4096, 1024]."""
        return f"{self.dtype} {format_shape(self.shape)}" if self.is_tensor else VALUE


def iter_items(checkpoint: Checkpoint, wanted: Callable[[str], bool] | None = None) -> Iterator[Item]:
    """Go through the items of a checkpoint, sorted by key."""
    tensors, values = checkpoint.index.keys.all(), checkpoint.index.value_keys.all()
    make = _tensor_maker(checkpoint, tensors)
    both = [(raw, row, True) for row, raw in enumerate(tensors)] + [(raw, row, False) for row, raw in enumerate(values)]
    both.sort()
    for raw, row, is_tensor in both:
        key = raw.decode()
        if wanted is None or wanted(key):
            yield make(key, row) if is_tensor else Item(key, row, VALUE, nbytes=_value_nbytes(checkpoint, row))


def _value_nbytes(checkpoint: Checkpoint, row: int) -> int:
    """Return what a value takes in the index; 0 where values lie elsewhere, as in torch's layout."""
    ends = checkpoint.index.value_data.ends
    return int(ends[row]) - (int(ends[row - 1]) if row else 0)


def _tensor_maker(checkpoint: Checkpoint, keys: list[bytes]) -> Callable[[str, int], Item]:
    index = checkpoint.index
    columns = index.tensors
    codes, ndims, shapes, owners = (
        column.tolist() for column in (columns.dtype, columns.ndim, columns.shape, columns.alias)
    )
    ends, files = [*index.chunk_ends.tolist(), 0], index.chunks.file
    names = [file.name for file in checkpoint.record.files]

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
            group=names[int(files[first])].split("-", 1)[0] if ends[owner] > first else "",
        )

    return make


def stored_chunks(checkpoint: Checkpoint, item: Item) -> list[Chunk]:
    """Return where a tensor is stored."""
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
        NotUsable: there is none; says which are spelt alike, or lie below it.

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
        raise UsageError(f"{key!r} is no key, but {format_count(len(below), 'key lies', 'keys lie')} below it: {some}")
    hint = did_you_mean(key, checkpoint, otherwise="`shardkeep ls CHECKPOINT` lists its keys")
    raise UsageError(f"the checkpoint has no key {key!r}", hint=hint)


def plain_value(checkpoint: Checkpoint, key: str) -> tuple[Any, str]:
    """Return a plain value, or why it cannot be shown."""
    try:
        return checkpoint[key], ""
    except CheckpointError as exc:
        return None, exc.message


def key_filter(patterns: list[str], prefix: str | None) -> Callable[[str], bool] | None:
    """Make the test of `PATTERN …` and `--prefix`; None where all keys are wanted."""
    if not patterns and prefix is None:
        return None
    fits = matcher(patterns or None)
    begin = prefix or ""
    return lambda key: fits(key) and (key == begin or key.startswith(begin if begin[-1:] in {"", "."} else begin + "."))


def age_s(saved_at: str) -> float | None:
    """Return how long ago that was; None where it does not say."""
    try:
        when = datetime.fromisoformat(saved_at)
    except ValueError:
        return None
    if when.tzinfo is None:
        return None
    return (datetime.now(timezone.utc) - when).total_seconds()


def summarize(checkpoint: Checkpoint) -> str:
    """Say in a line or two what a checkpoint is."""
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
    """Return what a checkpoint is, for programs."""
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
    """Return what a key is, for programs."""
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
