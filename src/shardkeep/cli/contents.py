"""The items of a checkpoint of any layout, read from its index without torch and without reading tensor data."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from shardkeep.cli import output as out
from shardkeep.engine.safetensors_source import FORMAT as SAFETENSORS
from shardkeep.errors import CheckpointError
from shardkeep.format import dtypes
from shardkeep.format.boxes import Box
from shardkeep.opening import Checkpoint
from shardkeep.state.patterns import matcher

VALUE = "value"
_MAX_VALUE_NBYTES = 1 << 20
"""Values that take more to read are not listed; only torch's layout keeps values outside of the index."""


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
        return f"{self.dtype} {out.format_shape(self.shape)}" if self.is_tensor else VALUE

    @property
    def description(self) -> str:
        """Dtype, shape, size, and the tensor it is tied to."""
        tied = f", shared with {out.printable(self.tied_to)}" if self.tied_to else ""
        return f"{self.what}, {out.format_size(self.nbytes)}{tied}"


def iter_items(checkpoint: Checkpoint, wanted: Callable[[str], bool] | None = None) -> Iterator[Item]:
    """Yield the items of a checkpoint, sorted by key, with numbers in natural order."""
    index = checkpoint.index
    tensors, values = index.keys.all(), index.value_keys.all()
    columns = (index.tensors.dtype, index.tensors.ndim, index.tensors.shape, index.tensors.alias)
    codes, ndims, shapes, owners = (column.tolist() for column in columns)
    ends, value_ends = [*index.chunk_ends.tolist(), 0], [*index.value_data.ends.tolist(), 0]
    named = [(raw.decode(), row, True) for row, raw in enumerate(tensors)]
    named += [(raw.decode(), row, False) for row, raw in enumerate(values)]
    named = [each for each in named if wanted is None or wanted(each[0])]
    for key, row, is_tensor in sorted(named, key=lambda each: out.natural_order(each[0])):
        if not is_tensor:  # torch's layout stores values elsewhere: their size is 0 here
            yield Item(key, row, VALUE, nbytes=value_ends[row] - value_ends[row - 1])
            continue
        dtype, shape, owner = dtypes.by_code(codes[row]), tuple(shapes[row][: ndims[row]]), owners[row]
        nbytes, tied_to = math.prod(shape) * dtype.itemsize, "" if owner == row else tensors[owner].decode()
        yield Item(key, row, dtype.name, shape, nbytes, chunks=ends[owner] - ends[owner - 1], tied_to=tied_to)


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


def find_items(checkpoint: Checkpoint, key: str) -> list[Item]:
    """Return the item of a key, or those below a prefix; a `UsageError` names keys that are spelt alike."""
    if found := list(iter_items(checkpoint, key.__eq__)) or list(iter_items(checkpoint, key_filter([], key))):
        return found
    missing = checkpoint.missing_key(key)
    raise out.UsageError(missing.message, hint=missing.hint or "`shardkeep ls CHECKPOINT` lists its keys")


def value_text(checkpoint: Checkpoint, item: Item) -> str:
    """Return a plain value as Python writes it, or the reason why it is not shown, in parentheses."""
    if (nbytes := checkpoint.source.value_nbytes(item.key)) > _MAX_VALUE_NBYTES:
        return f"({out.format_size(nbytes)}: `shardkeep show` reads it)"
    value, why_not = plain_value(checkpoint, item.key)
    return f"({why_not})" if why_not else out.printable(repr(value))


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


def summarize(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint in two lines."""
    record, totals = checkpoint.record, checkpoint.record.totals
    step = f"step {record.step}, " if record.step is not None else ""
    try:
        age_s = (datetime.now(timezone.utc) - datetime.fromisoformat(record.saved_at)).total_seconds()
        age = f"{out.format_age(age_s)} ago"
    except (ValueError, TypeError):  # no valid time, or no time zone
        age = ""
    holds = [out.format_count(totals.tensors, "tensor")] + (
        [out.format_count(totals.values, "value")] if totals.values else []
    )
    ranks = "" if record.format == SAFETENSORS else f" by {out.format_count(record.world_size, 'rank')}"
    return (
        f"{record.format}, {step}saved {age}{ranks}\n"
        f"{', '.join(holds)}, {out.format_size(totals.tensor_bytes)};"
        f" {out.format_count(len(record.files), 'file')} of {out.format_size(record.stored_nbytes)}"
    )


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a checkpoint as JSON."""
    record, totals = checkpoint.record, checkpoint.record.totals
    named = ("format", "step", "saved_at", "writer", "world_size", "meta")
    return {
        **{name: getattr(record, name) for name in named},
        **{name: getattr(totals, name) for name in ("tensors", "values", "chunks", "tensor_bytes")},
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
            {"offsets": box.offsets, "sizes": box.sizes, "file": file, "offset": offset, "nbytes": nbytes}
            for box, file, offset, nbytes in stored_chunks(checkpoint, item)
        ]
    return found


def print_chunks(chunks: Sequence[Chunk]) -> None:
    """Print box, size and location of each chunk; on a terminal, names of files are shortened to fit."""
    widest = max((len(str(chunk.box)) for chunk in chunks), default=0)
    room = out.terminal_width() or sys.maxsize
    for chunk in chunks:
        line, place = f"  {str(chunk.box).ljust(widest)}  {out.format_size(chunk.nbytes):>7}  ", f" at {chunk.offset:,}"
        print(line + out.shorten_middle(out.printable(chunk.file), max(12, room - len(line) - len(place))) + place)
