"""
What a checkpoint of torch's layout holds, in the columns of the native index: from its `.metadata`, or from the columns
beside it, of which nothing is decoded that is not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from shardkeep.errors import MalformedFile
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.columns import ITEMSIZES, Tuples, concat_ranges, matrix_of, segment_starts
from shardkeep.format.index import Chunks, Tensors
from shardkeep.format.record import Totals
from shardkeep.format.sealed import tail_of
from shardkeep.format.torch_columns import TorchColumns, decode_path
from shardkeep.format.tree import Container, Node, encode_tree
from shardkeep.layout.torch_files import METADATA_NAME, Sums
from shardkeep.layout.torch_index import read_index
from shardkeep.layout.torch_metadata import Place, TorchMetadata, decode_torch_metadata
from shardkeep.run.read import Reads

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Contents:
    """Tensors sorted by key, their chunks, and where everything lies."""

    checksum: str
    """Tells this `.metadata` from any other."""
    nbytes: int
    """Of `.metadata`."""
    keys: list[str]
    tensors: Tensors
    chunk_ends: Any
    chunks: Chunks
    """Their files are rows of `files`, their starts rows of `places`."""
    places: Sequence[Place]
    objects: Mapping[str, Place]
    files: list[str]
    sums: dict[str, Sums]
    save_id: str
    paths: Mapping[str, Path]

    @cached_property
    def tree(self) -> bytes:
        """The skeleton of the nested state."""
        return encode_tree(_tree(self.paths))

    @property
    def totals(self) -> Totals:
        """How much there is."""
        itemsizes = ITEMSIZES.tolist()
        sizes = [
            math.prod(shape) * itemsizes[code]
            for shape, code in zip(self.tensors.shape.tolist(), self.tensors.dtype.tolist(), strict=True)
        ]
        return Totals(
            tensors=len(self.keys), chunks=len(self.chunks), values=len(self.objects), tensor_bytes=sum(sizes)
        )


def read_contents(store: Reads) -> Contents:
    """
    Read what a checkpoint holds.

    Raises:
        BlobNotFound: there is none.
        DamagedCheckpoint: it is not what was saved.

    """
    found = read_index(store, METADATA_NAME)
    if not isinstance(found, bytes):
        return _of_columns(found.columns, found.name, checksum=text_of(found.tail.seal), nbytes=found.metadata_nbytes)
    tail = tail_of(found)
    metadata = decode_torch_metadata(found, where=METADATA_NAME)
    return _of_metadata(metadata, checksum=text_of(digest(found) if tail is None else tail.seal), nbytes=len(found))


def _of_metadata(metadata: TorchMetadata, *, checksum: str, nbytes: int) -> Contents:
    keys = sorted(metadata.tensors, key=str.encode)
    entries = [metadata.tensors[key] for key in keys]
    axes = max((len(entry.shape) for entry in entries), default=0)
    stored = [pair for entry in entries for pair in entry.chunks]
    for key, entry in zip(keys, entries, strict=True):
        if any(len(box.sizes) != len(entry.shape) for box, _ in entry.chunks):
            raise MalformedFile(f"{key!r}: chunks with another number of axes than the tensor", key=key)
    files = sorted({place.file for place in (*(place for _, place in stored), *metadata.objects.values())})
    number = {name: row for row, name in enumerate(files)}
    return Contents(
        checksum=checksum,
        nbytes=nbytes,
        keys=keys,
        tensors=Tensors(
            dtype=np.array([entry.dtype.code for entry in entries], np.uint8),
            ndim=np.array([len(entry.shape) for entry in entries], np.uint8),
            shape=matrix_of([entry.shape for entry in entries], axes, 1),
            origin=np.zeros(len(entries), np.uint8),
            alias=np.arange(len(entries)),
        ),
        chunk_ends=np.cumsum([len(entry.chunks) for entry in entries], dtype=np.int64),
        chunks=Chunks(
            offsets=matrix_of([box.offsets for box, _ in stored], axes, 0),
            sizes=matrix_of([box.sizes for box, _ in stored], axes, 1),
            file=np.array([number[place.file] for _, place in stored], np.int64),
            start=np.arange(len(stored)),
        ),
        places=[place for _, place in stored],
        objects=metadata.objects,
        files=files,
        sums=metadata.sums,
        save_id=metadata.save_id,
        paths=metadata.paths,
    )


def _of_columns(columns: TorchColumns, where: str, *, checksum: str, nbytes: int) -> Contents:
    rest = decode_torch_metadata(columns.rest, where=where)
    codes = np.array([0, *(entry.dtype.code for entry in rest.tensors.values())], np.uint8)
    texts = columns.key_texts[: len(columns.kind)]
    raw = [text.encode() for text in texts]
    order = np.array(sorted(range(len(raw)), key=raw.__getitem__), np.int64)
    kind = np.asarray(columns.kind, np.int64)
    rows, objects = order[kind[order] > 0], order[kind[order] == 0]
    # Chunks in the order of the sorted tensors, without those that hold nothing.
    counts = np.asarray(columns.chunk_ends, np.int64) - segment_starts(columns.chunk_ends)
    chunks = concat_ranges(segment_starts(columns.chunk_ends)[rows], counts[rows])
    owner = np.repeat(np.arange(len(rows)), counts[rows])
    filled = (np.asarray(columns.sizes)[chunks] > 0).all(axis=1)
    chunks, owner = chunks[filled], owner[filled]
    places = columns.place_of_chunk[chunks]
    for row in np.flatnonzero(places < 0).tolist():
        places[row] = _place_elsewhere(columns, int(rows[owner[row]]), int(chunks[row]))
    found = {texts[row]: int(columns.place_of_entry[row]) for row in objects.tolist()}
    if lost := [name for name, place in found.items() if place < 0]:
        raise MalformedFile(f"the metadata do not say where {lost[0]!r} is", key=lost[0])
    held = np.array(list(found.values()), np.int64)
    file_of = np.asarray(columns.places.file, np.int64)
    used = np.unique(np.concatenate([file_of[places], file_of[held]])).tolist()
    files = sorted(columns.names.files[each] for each in used)
    number = np.zeros(len(columns.names.files), np.int64)
    number[used] = [files.index(columns.names.files[each]) for each in used]
    lazy = _Places(columns)
    return Contents(
        checksum=checksum,
        nbytes=nbytes,
        keys=[texts[row] for row in rows.tolist()],
        tensors=Tensors(
            dtype=codes[kind[rows]],
            ndim=np.asarray(columns.ndim)[rows].astype(np.uint8),
            shape=np.asarray(columns.shape, np.int64)[rows],
            origin=np.zeros(len(rows), np.uint8),
            alias=np.arange(len(rows)),
        ),
        chunk_ends=np.cumsum(np.bincount(owner, minlength=len(rows)), dtype=np.int64),
        chunks=Chunks(
            offsets=np.asarray(columns.offsets, np.int64)[chunks],
            sizes=np.asarray(columns.sizes, np.int64)[chunks],
            file=number[file_of[places]],
            start=places,
        ),
        places=lazy,
        objects={name: lazy[place] for name, place in found.items()},
        files=files,
        sums=rest.sums,
        save_id=rest.save_id,
        paths=_Paths(columns, texts),
    )


def _place_elsewhere(columns: TorchColumns, entry: int, chunk: int) -> int:
    """Return the place of a chunk that has it under another chunk's row, or without an offset."""
    offset = columns.offsets[chunk, : int(columns.ndim[entry])].tolist()
    place = columns.find_place(entry, offset)
    if place < 0 and not any(offset):
        place = int(columns.place_of_entry[entry])
    if place < 0:
        key = columns.key_texts[entry]
        raise MalformedFile(f"the metadata do not say where {key!r} at {tuple(offset)} is", key=key)
    return place


class _Places(Sequence[Place]):
    """Places, made of columns when they are asked for."""

    def __init__(self, columns: TorchColumns) -> None:
        places = columns.places
        self._rows = Tuples(places.file, places.start, places.nbytes, places.data, places.way)
        self._names = columns.names
        self._count = len(places)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, row: int) -> Place: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Place]: ...
    def __getitem__(self, row: int | slice) -> Place | Sequence[Place]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(self._count))]
        if not 0 <= row < self._count:
            raise IndexError(row)
        file, start, nbytes, data, way = self._rows[row]
        ways = tuple(self._names.ways[way - 1]) if way else ()
        return Place(self._names.files[file], start, nbytes, start + data - 1 if data else None, ways)


class _Paths(Mapping[str, Path]):
    """The path of every name; those that have none, or none that can be, stand at the top."""

    def __init__(self, columns: TorchColumns, names: list[str]) -> None:
        self._columns = columns
        self._names = names

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {key: row for row, key in enumerate(self._columns.path_key.tolist())}

    @cached_property
    def _keys(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self._names)}

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Any:
        kind = self._columns.kind.tolist()
        tensors = [name for name, each in zip(self._names, kind, strict=True) if each]
        return iter([*tensors, *(name for name, each in zip(self._names, kind, strict=True) if not each)])

    def __getitem__(self, name: str) -> Path:
        row = self._rows.get(self._keys[name])
        return (row is not None and decode_path(self._columns.paths.raw(row), name)) or (name,)


def _tree(paths: Mapping[str, Path]) -> Node:
    """Make the skeleton of the nested state; where paths contradict each other, all names stand side by side."""
    root: dict[Any, Any] = {}
    try:
        for name, path in paths.items():
            if ".".join(map(str, path)) != name:
                raise ValueError
            here = root
            for part in path[:-1]:
                here = here.setdefault(part, {})
            if path[-1] in here:
                raise ValueError
            here[path[-1]] = None
        return _container(root)
    except (ValueError, AttributeError, TypeError):
        return Container("dict", tuple((name, None) for name in paths))


def _container(held: dict[Any, Any]) -> Container:
    numbers = [part for part in held if type(part) is int]
    if numbers and (len(numbers) != len(held) or sorted(numbers) != list(range(len(numbers)))):
        raise ValueError
    parts = sorted(numbers) if numbers else list(held)
    children = tuple((part, None if held[part] is None else _container(held[part])) for part in parts)
    return Container("list" if numbers else "dict", children)
