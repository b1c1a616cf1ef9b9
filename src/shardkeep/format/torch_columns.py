"""
What `.metadata` of torch's layout says, once more, in columns: to be opened by a few views, and decoded in part.

    "SKTORCH1" | sections, as `format.sections` lays them

Entries, places and paths stand in the order in which `.metadata` has them. What there is little of (what says which
save it was, properties of tensors, digests) stands in a small `.metadata` of its own, the section `rest`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import IntArray, Rows, segment_starts
from shardkeep.format.index import Shapes, Strings, are_text, decoding, ends_fit, pack_sections, unpack_sections

MAGIC = b"SKTORCH1"
_PLACES = ("place_key", "place_chunk", "place_hint", "place_file", "place_start", "place_nbytes", "place_data",
           "place_way")  # fmt: skip
_SHAPES = Shapes(
    texts=frozenset({"keys", "paths", "rest", "names"}),
    matrices=frozenset({"shape", "offsets", "sizes"}),
    columns=frozenset({"key_ends", "kind", "ndim", "chunk_ends", "path_key", "path_ends", *_PLACES}),
)
PathPart = str | int
Path = tuple[PathPart, ...]
_SAID = msgspec.msgpack.Decoder(list[int | list[str | int]])


@dataclass(frozen=True)
class PlaceColumns(Rows):
    """One row for each stored item. Where there may be nothing to say, 0 says so, and numbers begin with 1."""

    key: IntArray
    """The row of its entry."""
    chunk: IntArray
    """The row of the chunk that it holds, plus 1; 0 for an item that is named without an offset."""
    hint: IntArray
    """The index hint plus 1."""
    file: IntArray
    start: IntArray
    nbytes: IntArray
    data: IntArray
    """Where a tensor's bytes begin after the item's own beginning, plus 1."""
    way: IntArray
    """Which list of extensions it was written through, plus 1."""


class Names(msgspec.Struct, frozen=True, array_like=True):
    """What the numbers of columns stand for."""

    files: list[str]
    ways: list[list[str]]
    """Lists of extensions."""
    kinds: int
    """How many kinds of tensors `rest` describes."""
    has_paths: bool


@dataclass(frozen=True)
class TorchColumns:
    """The columns of a checkpoint."""

    keys: Strings
    """Of all entries; behind them, names that only have a path."""
    kind: IntArray
    """0 for an object; for a tensor, which entry of `rest` has its properties, plus 1."""
    ndim: IntArray
    shape: IntArray
    """Padded with 1."""
    chunk_ends: IntArray
    """The chunks of entry e are rows `chunk_ends[e-1]` to `chunk_ends[e]`."""
    offsets: IntArray
    sizes: IntArray
    places: PlaceColumns
    path_key: IntArray
    """The row of the key that each path is of."""
    paths: Strings
    names: Names
    rest: bytes

    def chunk_rows(self, entry: int) -> tuple[int, int]:
        """Return the first row of an entry's chunks, and the one behind its last."""
        return int(self.chunk_ends[entry - 1]) if entry else 0, int(self.chunk_ends[entry])

    def find_place(self, entry: int, offset: list[int], hint: int | None = None) -> int:
        """Return the row of the place of an entry's chunk that begins there; -1 where there is none."""
        first, end = self.chunk_rows(entry)
        ndim = int(self.ndim[entry])
        if len(offset) != ndim:
            return -1
        # Of chunks that begin at one place, all but one are empty; one of them has the place.
        if hint is not None and 0 <= hint < end - first and self.offsets[first + hint, :ndim].tolist() == offset:
            place = int(self.place_of_chunk[first + hint])
            if place >= 0:
                return place
        there = first + np.flatnonzero((self.offsets[first:end, :ndim] == offset).all(axis=1))
        return int(self.place_of_chunk[there].max(initial=-1))

    @cached_property
    def key_texts(self) -> list[str]:
        """All keys."""
        text = bytes(self.keys.data).decode()
        if not text.isascii():
            return [raw.decode() for raw in self.keys.all()]
        ends = self.keys.ends.tolist()
        return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def place_of_chunk(self) -> IntArray:
        """The row of each chunk's place; -1 for one that has none."""
        return _rows_by(self.places.chunk, len(self.sizes))

    @cached_property
    def place_of_entry(self) -> IntArray:
        """The row of the place that an entry has without an offset; -1 for one that has none."""
        plain = np.flatnonzero(np.asarray(self.places.chunk) == 0)
        found = np.full(len(self.kind), -1, np.int64)
        found[self.places.key[plain]] = plain
        return found


def _rows_by(numbers: IntArray, count: int) -> IntArray:
    found = np.full(count, -1, np.int64)
    rows = np.flatnonzero(np.asarray(numbers) > 0)
    found[np.asarray(numbers, np.int64)[rows] - 1] = rows
    return found


def encode_columns(columns: TorchColumns) -> bytes:
    """Write columns. Their numbers must not be negative."""
    places = {f"place_{field.name}": getattr(columns.places, field.name) for field in fields(columns.places)}
    return pack_sections(
        MAGIC,
        {
            "keys": np.frombuffer(columns.keys.data, np.uint8),
            "key_ends": columns.keys.ends,
            "kind": columns.kind,
            "ndim": columns.ndim,
            "shape": columns.shape,
            "chunk_ends": columns.chunk_ends,
            "offsets": columns.offsets,
            "sizes": columns.sizes,
            **places,
            "path_key": columns.path_key,
            "paths": np.frombuffer(columns.paths.data, np.uint8),
            "path_ends": columns.paths.ends,
            "names": np.frombuffer(msgspec.msgpack.encode(columns.names), np.uint8),
            "rest": np.frombuffer(columns.rest, np.uint8),
        },
    )


def decode_columns(data: bytes | memoryview, *, where: str) -> TorchColumns:
    """
    Open columns, and check that they fit each other.

    Raises:
        DamagedCheckpoint: they are not what was written.

    """
    with decoding(where):
        section = unpack_sections(MAGIC, memoryview(data), _SHAPES, where=where)
        columns = TorchColumns(
            keys=Strings(section["key_ends"], section["keys"].data),
            **{name: section[name] for name in ("kind", "ndim", "shape", "chunk_ends", "offsets", "sizes")},
            places=PlaceColumns(*(section[name] for name in _PLACES)),
            path_key=section["path_key"],
            paths=Strings(section["path_ends"], section["paths"].data),
            names=msgspec.msgpack.decode(section["names"].data, type=Names),
            rest=section["rest"].tobytes(),
        )
        sound = _fits(columns)
    if not sound:
        raise MalformedFile(f"{where}: the columns contradict each other", file=where)
    return columns


def _fits(columns: TorchColumns) -> bool:
    # In this order: a matrix without columns costs no bytes, so its rows count only once they agree with columns.
    places, names = columns.places, columns.names
    entries, axes = len(columns.kind), columns.shape.shape[1]
    chunks = int(columns.chunk_ends[-1]) if entries else 0
    return (
        len(columns.ndim) == len(columns.shape) == len(columns.chunk_ends) == entries <= len(columns.keys)
        and columns.offsets.shape == columns.sizes.shape == (chunks, axes)
        and (axes > 0 or chunks <= entries)
        and all(len(column) == len(places) for column in places.columns())
        and len(columns.path_key) == len(columns.paths)
        and ends_fit(columns.keys.ends, len(columns.keys.data))
        and ends_fit(columns.paths.ends, len(columns.paths.data))
        and ends_fit(columns.chunk_ends, chunks)
        and are_text(columns.keys)
        and _below(columns.kind, names.kinds + 1)
        and _below(columns.ndim, axes + 1)
        and _below(places.key, entries)
        and _below(places.chunk, chunks + 1)
        and _below(places.file, len(names.files))
        and _below(places.way, len(names.ways) + 1)
        and _below(columns.path_key, len(columns.keys))
        and _own_chunks(columns)
    )


def _below(numbers: npt.NDArray[Any], limit: int) -> bool:
    return not len(numbers) or int(numbers.max()) < limit


def _own_chunks(columns: TorchColumns) -> bool:
    """Say whether each place that holds a chunk holds one of its own entry, and each chunk has one place at most."""
    chunk = np.asarray(columns.places.chunk, np.int64)
    held = np.flatnonzero(chunk > 0)
    rows, keys = chunk[held] - 1, np.asarray(columns.places.key, np.int64)[held]
    first = segment_starts(columns.chunk_ends)[keys]
    inside = bool(np.all(first <= rows) and np.all(rows < columns.chunk_ends[keys]))
    return inside and not (np.bincount(rows) > 1).any()


def encode_path(path: Path, key: str) -> bytes:
    """Write the path of a key: usually only how long its parts are, as the key has them with dots between them."""
    if ".".join(map(str, path)) == key:
        # Of a number, how long it is, less than nothing.
        return msgspec.msgpack.encode([len(part) if type(part) is str else -len(str(part)) for part in path])
    return msgspec.msgpack.encode([list(path)])


def decode_path(raw: bytes, key: str) -> Path:
    """
    Read the path of a key.

    Raises:
        MalformedFile: it is none.

    """
    try:
        said = _SAID.decode(raw)
        if len(said) == 1 and isinstance(said[0], list):
            return tuple(said[0])
        parts: list[PathPart] = []
        at = 0
        for nbytes in said:
            part = key[at : at + abs(nbytes)]  # type: ignore[arg-type]  # a list stands alone
            parts.append(part if nbytes >= 0 else int(part))  # type: ignore[operator]  # as above
            at += len(part) + 1
    except (msgspec.MsgspecError, ValueError, TypeError) as exc:
        raise MalformedFile(f"the columns of the metadata have no path for {key!r}: {exc}", key=key) from exc
    return tuple(parts)
