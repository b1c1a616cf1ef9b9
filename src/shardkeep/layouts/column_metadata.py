"""
Metadata into the columns that stand beside a large `.metadata`, and back: entry by entry, as they are asked for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shardkeep.format.boxes import IntArray, Tuples, matrix_of, segment_starts
from shardkeep.format.index import Strings, pack_strings
from shardkeep.format.pickles import collector_paused
from shardkeep.format.torch_columns import (
    Names,
    PlaceColumns,
    TorchColumns,
    decode_path,
    encode_path,
)
from shardkeep.layouts.lazy_dicts import LazyItems, LazyValues
from shardkeep.layouts.torch_pickle import (
    decode_metadata,
    encode_metadata,
    has_only_its_fields,
    is_plain_index,
)
from shardkeep.layouts.torch_values import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
    is_torchs,
)

log = logging.getLogger("shardkeep")

MOST_AXES = 64
_DICTS = (dict, LazyItems, LazyValues)
"""Dicts of another class may hold more than their items."""
_FIELDS = {"relative_path", "offset", "length", "transform_descriptors", "shardkeep_data_start"}


class _NoColumns(Exception):
    """Somebody put into the metadata what columns cannot hold; only the pickle can."""


def columns_of(value: Metadata) -> TorchColumns | None:
    """Return metadata as columns; None where they hold more than the default planners and our writer put into them."""
    try:
        return _Encoder(value).columns()
    except (_NoColumns, OverflowError, UnicodeEncodeError):
        return None
    except Exception as exc:  # noqa: BLE001 - whatever somebody put into them: a save must not fail for its columns
        log.warning(
            "the checkpoint gets no columns beside its metadata, so reading these takes longer: %s: %s",
            type(exc).__name__,
            exc,
        )
        return None


class _Encoder:
    """Metadata on the way into columns."""

    def __init__(self, value: Metadata) -> None:
        self._value = value
        self._rows: dict[str, int] = {}
        self._kinds: dict[Any, int] = {}
        self._prototypes: list[TensorProperties] = []
        self._offsets: list[torch.Size] = []
        self._chunk_ends: list[int] = []
        self._begins: dict[int, dict[torch.Size, int]] = {}

    def columns(self) -> TorchColumns:
        _insist(type(self._value) is Metadata and type(self._value.state_dict_metadata) in _DICTS)
        entries = self._value.state_dict_metadata
        self._rows = {key: row for row, key in enumerate(entries)}
        kind, size, sizes = [], [], []
        for key, entry in entries.items():
            _insist(type(key) is str)
            if type(entry) is TensorStorageMetadata:
                _insist(has_only_its_fields(entry))
                kind.append(self._kind(entry.properties) + 1)
                size.append(_size(entry.size, len(entry.size)))
                for chunk in entry.chunks:
                    self._offsets.append(_size(chunk.offsets, len(entry.size)))
                    sizes.append(_size(chunk.sizes, len(entry.size)))
            else:
                _insist(type(entry) is BytesStorageMetadata and not vars(entry))
                kind.append(0)
                size.append(torch.Size())
            self._chunk_ends.append(len(sizes))
        places, files, ways = self._places()
        path_key, paths, only_paths = self._paths()
        axes = max(map(len, size), default=0)
        _insist(axes <= MOST_AXES)
        return TorchColumns(
            keys=_strings(key.encode() for key in self._rows),
            kind=_numbers(kind),
            ndim=_numbers([len(each) for each in size]),
            shape=matrix_of(size, axes, 1),
            chunk_ends=_numbers(self._chunk_ends),
            offsets=matrix_of(self._offsets, axes, 0),
            sizes=matrix_of(sizes, axes, 1),
            places=places,
            path_key=path_key,
            paths=paths,
            names=Names(files, ways, len(self._prototypes), has_paths=only_paths),
            rest=self._rest(keeps_planner_data=not only_paths),
        )

    def _kind(self, properties: TensorProperties) -> int:
        state = properties.__getstate__()
        found = self._kinds.get(state)
        if found is None:
            found = self._kinds[state] = len(self._prototypes)
            self._prototypes.append(properties)
        return found

    def _places(self) -> tuple[PlaceColumns, list[str], list[list[str]]]:
        _insist(type(self._value.storage_data) in _DICTS)
        files: dict[str, int] = {}
        ways: dict[tuple[str, ...], int] = {}
        rows: list[tuple[int, ...]] = []
        for index, info in self._value.storage_data.items():
            _insist(is_plain_index(index) and type(info) is _StorageInfo and index.fqn in self._rows)
            row, start, way = self._rows[index.fqn], info.data_start, 0
            _insist(vars(info).keys() <= _FIELDS and type(info.relative_path) is str)
            _insist(type(info.offset) is type(info.length) is int and type(start) in (int, type(None)))
            if info.transform_descriptors is not None:
                _insist(type(info.transform_descriptors) is list)
                _insist({*map(type, info.transform_descriptors)} <= {str})
                way = ways.setdefault(tuple(info.transform_descriptors), len(ways)) + 1
            rows.append(
                (
                    row,
                    0 if index.offset is None else self._chunk(row, index.offset, index.index) + 1,
                    0 if index.index is None else index.index + 1,
                    files.setdefault(info.relative_path, len(files)),
                    info.offset,
                    info.length,
                    0 if start is None else start - info.offset + 1,
                    way,
                )
            )
        table = np.array(rows, np.int64).reshape(len(rows), 8)
        _insist(not (table < 0).any())
        return PlaceColumns(*table.T), list(files), [list(way) for way in ways]

    def _chunk(self, row: int, offset: torch.Size, hint: int | None) -> int:
        """Return the row of a chunk of an entry that begins there; another may, if one of them is empty."""
        first, end = self._chunk_ends[row - 1] if row else 0, self._chunk_ends[row]
        if hint is not None and 0 <= hint < end - first and self._offsets[first + hint] == offset:
            return first + hint
        if row not in self._begins:
            self._begins[row] = {self._offsets[chunk]: chunk for chunk in range(first, end)}
        _insist(offset in self._begins[row])
        return self._begins[row][offset]

    def _paths(self) -> tuple[IntArray, Strings, bool]:
        """Return the paths that the planner data hold, and whether these hold nothing else: else they are kept too."""
        said = self._value.planner_data
        found: list[bytes] = []
        keys: list[int] = []
        for key, path in said.items() if isinstance(said, dict) else ():
            if type(key) is str and type(path) is tuple and {*map(type, path)} <= {str, int}:
                found.append(encode_path(path, key))
                keys.append(self._rows.setdefault(key, len(self._rows)))
        whole = bool(keys) and type(said) in _DICTS and len(keys) == len(said)
        return _numbers(keys), _strings(found), whole

    def _rest(self, *, keeps_planner_data: bool) -> bytes:
        """Return all that is no column as metadata of their own."""
        kinds: dict[str, Any] = {
            str(row): TensorStorageMetadata(properties, torch.Size(), [])
            for row, properties in enumerate(self._prototypes)
        }
        made = dataclasses.replace(
            self._value,
            state_dict_metadata=kinds,
            storage_data={},
            planner_data=self._value.planner_data if keeps_planner_data else None,
        )
        vars(made).update({key: each for key, each in vars(self._value).items() if key not in vars(made)})
        return encode_metadata(made, warns=False)


def _insist(fits: bool) -> None:
    if not fits:
        raise _NoColumns


def _size(size: Any, ndim: int) -> torch.Size:
    _insist(type(size) is torch.Size and len(size) == ndim)
    return size  # type: ignore[no-any-return]  # seen


def _numbers(numbers: list[int]) -> IntArray:
    return np.array(numbers, np.int64)


def _strings(strings: Any) -> Strings:
    ends, data = pack_strings(strings)
    return Strings(ends, memoryview(data))


# -- and back ----------------------------------------------------------------------------------------------------------


def metadata_of(columns: TorchColumns, *, where: str) -> Metadata:
    """Return metadata whose entries, places and paths are made of columns when they are asked for."""
    with collector_paused():
        return _metadata_of(columns, where)


def _metadata_of(columns: TorchColumns, where: str) -> Metadata:
    made = decode_metadata(columns.rest, where=where)
    decoder = _Decoder(columns, [entry.properties for entry in made.state_dict_metadata.values()])  # type: ignore[union-attr]  # of tensors
    keys, count = columns.key_texts, len(columns.kind)
    made.state_dict_metadata = LazyValues.of(keys[:count], decoder.entry)
    made.storage_data = LazyItems.of(_Places(decoder, len(columns.places)))
    if columns.names.has_paths:
        made.planner_data = LazyValues.of((keys[row] for row in columns.path_key.tolist()), decoder.path)
    return made


class _Decoder:
    """Makes values of columns."""

    def __init__(self, columns: TorchColumns, kinds: list[TensorProperties]) -> None:
        self._columns = columns
        self._kinds = [vars(kind) for kind in kinds]
        self._rows: dict[str, int] = {}
        firsts = segment_starts(columns.chunk_ends)
        self._entries = Tuples(columns.kind, columns.ndim, columns.shape, firsts, columns.chunk_ends)
        self._chunks = Tuples(columns.offsets, columns.sizes)
        self._places = Tuples(*columns.places.columns())
        self._paths = Tuples(columns.path_key, segment_starts(columns.paths.ends), columns.paths.ends)

    def entry(self, row: int) -> TensorStorageMetadata | BytesStorageMetadata:
        kind, ndim, shape, first, end = self._entries[row]
        if not kind:
            return BytesStorageMetadata()
        chunks = []
        for chunk in range(first, end):
            offsets, sizes = self._chunks[chunk]
            chunks.append(ChunkStorageMetadata(torch.Size(offsets[:ndim]), torch.Size(sizes[:ndim])))
        return TensorStorageMetadata(TensorProperties(**self._kinds[kind - 1]), torch.Size(shape[:ndim]), chunks)

    def path(self, row: int) -> tuple[str | int, ...]:
        key, start, end = self._paths[row]
        return decode_path(bytes(self._columns.paths.data[start:end]), self._columns.key_texts[key])

    def place(self, row: int) -> tuple[MetadataIndex, _StorageInfo]:
        names = self._columns.names
        key, chunk, hint, file, start, nbytes, data, way = self._places[row]
        offset = torch.Size(self._chunks[chunk - 1][0][: self._entries[key][1]]) if chunk else None
        index = MetadataIndex(self._columns.key_texts[key], offset, hint - 1 if hint else None)
        info = _StorageInfo(names.files[file], start, nbytes, list(names.ways[way - 1]) if way else None)
        if data:
            info.keep_data_start(start + data - 1)
        return index, info

    def find(self, index: Any) -> int | None:
        """Return the row of a place."""
        if not isinstance(index, MetadataIndex) and not is_torchs(index, "MetadataIndex"):
            return None
        if not self._rows:
            self._rows = {key: row for row, key in enumerate(self._columns.key_texts[: len(self._columns.kind)])}
        row = self._rows.get(index.fqn)
        if row is None:
            return None
        if index.offset is None:
            place = int(self._columns.place_of_entry[row])
        else:
            place = self._columns.find_place(row, list(index.offset), index.index)
        return place if place >= 0 else None


class _Places:
    """Makes the places of all chunks and objects."""

    def __init__(self, decoder: _Decoder, count: int) -> None:
        self._decoder = decoder
        self._count = count

    def count(self) -> int:
        return self._count

    def has(self, key: Any) -> bool:
        return self._decoder.find(key) is not None

    def one(self, key: MetadataIndex) -> _StorageInfo:
        row = self._decoder.find(key)
        if row is None:
            raise KeyError(key)
        return self._decoder.place(row)[1]

    def every(self) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
        return map(self._decoder.place, range(self._count))
