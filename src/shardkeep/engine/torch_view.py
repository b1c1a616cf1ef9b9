"""
A native checkpoint as a storage reader shows it: metadata of the protocol, and items read by the engine.

Names are those that torch's flattening gives the state that was saved. What it does not go into, such as a list of
numbers or a tuple of tensors, is an object of its own, made when it is read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkeep.engine.fill import fill, plain_target, read_whole
from shardkeep.engine.reader import DigestCache, ReadableStore, Source
from shardkeep.engine.sources import open_native
from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Boxes, matrix_of
from shardkeep.format.dtypes import to_torch
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.tree import decode_tree, unflatten
from shardkeep.format.values import decode_value
from shardkeep.layouts import native
from shardkeep.layouts.torch_values import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.options import Options
from shardkeep.state.flatten import traverse_state_dict
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage.file_systems import PathLike


class StoredChunk(NamedTuple):
    """A box of a tensor; stands in `Metadata.storage_data`."""

    row: int
    """Of the tensor in the native index."""
    offsets: tuple[int, ...]
    relative_path: str
    """The file it is in."""
    offset: int
    """Where in that file's data."""


class StoredObject(NamedTuple):
    """An object that is put together when it is read; stands in `Metadata.storage_data`."""

    value: Any
    """Itself, with `_Leaf`s in it."""


class _Leaf(NamedTuple):
    key: str
    row: int
    is_tensor: bool


class TorchView:
    """An opened checkpoint that has a native index."""

    def __init__(self, source: Source, path: PathLike) -> None:
        self._source = source
        self._path = path
        self.rows: dict[str, int] = {}
        """Row in the index of each tensor, by the name that torch gives it; known after `metadata`."""

    @classmethod
    def open(cls, store: ReadableStore, path: PathLike) -> TorchView:
        """Open a native checkpoint."""
        record = native.read_record(store)  # type: ignore[arg-type]  # it lists only where there is none
        return cls(open_native(store, record, Options(), DigestCache()), path)

    def metadata(self) -> Metadata:
        """Describe the checkpoint in the terms of the protocol."""
        index = self._source.index
        rows = {key: _Leaf(key, row, is_tensor=True) for key, row in index.tensor_rows.items()}
        rows.update({key: _Leaf(key, row, is_tensor=False) for key, row in index.value_rows.items()})
        entries: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        places: dict[MetadataIndex, Any] = {}

        def visit(path: tuple[str | int, ...], value: Any) -> None:
            key = ".".join(map(str, path))
            if key in entries:
                raise MalformedFile(f"two values are called {key!r} by torch's rules", key=key)
            paths[key] = path
            if self._is_tensor(value):
                entries[key] = self._tensor(key, value.row, places)
                self.rows[key] = value.row
            else:
                entries[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = StoredObject(value)

        traverse_state_dict(unflatten(decode_tree(index.tree), rows.__getitem__), visit, self._is_tensor)
        meta = StorageMeta(checkpoint_id=self._path, save_id=self._source.record.save_id)
        return Metadata(entries, planner_data=paths, storage_data=places, storage_meta=meta)

    def _is_tensor(self, value: Any) -> bool:
        # An array of numpy is an object to torch.
        return isinstance(value, _Leaf) and value.is_tensor and int(self._source.index.tensors.origin[value.row]) == 0

    def _tensor(self, key: str, row: int, places: dict[MetadataIndex, Any]) -> TensorStorageMetadata:
        index = self._source.index
        rows, ndim = index.chunk_rows(row), len(index.shape(row))
        stored, files = index.chunks.take(rows), self._source.record.files
        boxes = stored.boxes
        chunks = []
        for number in range(rows.stop - rows.start):
            box = boxes.box(number, ndim)
            chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            file, start = int(stored.file[number]), int(stored.start[number])
            # Of a forged file number reading says so.
            name = files[file].name if 0 <= file < len(files) else ""
            index_of = MetadataIndex(key, torch.Size(box.offsets), number)
            places[index_of] = StoredChunk(row, box.offsets, name, start)
        properties = TensorProperties(dtype=to_torch(index.dtype(row)))
        return TensorStorageMetadata(properties, torch.Size(index.shape(row)), chunks)

    def read(self, places: Mapping[Any, Any], plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read every item of a plan."""
        options = Options()
        chunks: list[tuple[ReadItem, StoredChunk, torch.Tensor]] = []
        for request in plan.items:
            place = places[request.storage_index]
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, self.saved_object(place, options))
            else:
                chunks.append((request, place, planner.resolve_tensor(request).detach()))
        into = [plain_target(target, key=request.storage_index.fqn) for request, _, target in chunks]
        axes = self._source.index.tensors.shape.shape[1]
        offsets = [
            tuple(a + b for a, b in zip(place.offsets, request.storage_offsets, strict=True))
            for request, place, _ in chunks
        ]
        boxes = Boxes(
            matrix_of(offsets, axes, 0), matrix_of([tuple(request.lengths) for request, _, _ in chunks], axes, 1)
        )
        synchronize_devices(into)
        fill(
            self._source,
            np.array([place.row for _, place, _ in chunks], np.int64),
            boxes,
            into,
            threads=options.io_threads,
            budget_nbytes=options.host_budget_bytes,
        )
        synchronize_devices(into)
        torch.autograd.graph.increment_version(into)
        for (request, _, target), filled in zip(chunks, into, strict=True):
            if filled is not target:
                target.copy_(filled)
            planner.commit_tensor(request, target)

    def saved_object(self, place: StoredObject, options: Options) -> io.BytesIO:
        """Return an object as `torch.save` writes it."""
        stream = io.BytesIO()
        torch.save(self._filled(place.value, options), stream)
        stream.seek(0)
        return stream

    def _filled(self, value: Any, options: Options) -> Any:
        if isinstance(value, _Leaf):
            return self._leaf(value, options)
        if isinstance(value, (list, tuple)):
            return type(value)([self._filled(each, options) for each in value])
        if isinstance(value, dict):
            return type(value)((key, self._filled(each, options)) for key, each in value.items())
        return value

    def _leaf(self, leaf: _Leaf, options: Options) -> Any:
        index = self._source.index
        if not leaf.is_tensor:
            return decode_value(index.value_data.raw(leaf.row), key=leaf.key, allow_pickle=options.allow_pickle)
        owner = int(index.tensors.alias[leaf.row])
        [tensor] = read_whole(self._source, np.array([owner], np.int64), options)
        return tensor.numpy() if int(index.tensors.origin[leaf.row]) == 1 else tensor


def is_native(store: ReadableStore) -> bool:
    """Say whether a native checkpoint was committed there."""
    try:
        store.open(RECORD_NAME).close()
    except FileNotFoundError:
        return False
    return True
