"""
A checkpoint of any layout, described by torch's metadata classes: for `dcp.load` and for conversion to torch's layout.

Keys are those of torch's flattening. Values that it does not flatten, such as a list of numbers, are objects.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkeep.engine.fill import fill, plain_target, read_whole
from shardkeep.engine.reader import Source
from shardkeep.engine.sources import open_native
from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import Box, Boxes
from shardkeep.format.dtypes import to_torch
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.values import Node, decode_tree, decode_value, unflatten
from shardkeep.layouts import native
from shardkeep.layouts import torch_values as protocol
from shardkeep.options import Options
from shardkeep.state.flatten import traverse_state_dict
from shardkeep.storage.base import ReadableStore
from shardkeep.storage.file_systems import PathLike


class StoredChunk(NamedTuple):
    """The location of a chunk, in `Metadata.storage_data`."""

    row: int
    offsets: tuple[int, ...]
    relative_path: str
    offset: int


class _Leaf(NamedTuple):
    key: str
    row: int
    is_tensor: bool
    origin: int = 0
    """1 for a numpy array, which torch saves as an object."""


class TorchView:
    """An opened checkpoint, of any layout, or the part of it that `tree` names, by the names of torch's flattening."""

    def __init__(self, source: Source, *, tree: Node = None) -> None:
        self._source = source
        self.rows: dict[str, int] = {}
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Of each tensor and object, the keys and positions in the nested state, in its order."""
        self.objects: dict[str, Any] = {}
        """The other values, with a `_Leaf` in place of each stored value."""
        index = source.index
        leaves = {key: _Leaf(key, row, is_tensor=False) for key, row in index.value_rows.items()}
        for (key, row), origin in zip(index.tensor_rows.items(), index.tensors.origin.tolist(), strict=True):
            leaves[key] = _Leaf(key, row, is_tensor=True, origin=origin)

        def visit(path: tuple[str | int, ...], value: Any) -> None:
            key = ".".join(map(str, path))
            if key in self.paths:
                raise MalformedFile(f"two values are called {key!r} by torch's rules", key=key)
            self.paths[key] = path
            if _is_tensor(value):
                self.rows[key] = value.row
            else:
                self.objects[key] = value

        nested = unflatten(decode_tree(index.tree) if tree is None else tree, leaves.__getitem__)
        traverse_state_dict(nested, visit, _is_tensor)

    @classmethod
    def open(cls, store: ReadableStore) -> TorchView | None:
        """Open a native checkpoint; None if there is no commit record."""
        try:
            store.open(RECORD_NAME).close()
        except FileNotFoundError:
            return None
        record = native.read_record(store)  # type: ignore[arg-type]  # it lists only where there is none
        return cls(open_native(store, record, Options()))

    def describe(self, checkpoint_id: PathLike) -> protocol.Metadata:
        """Return torch's metadata, with an object for each chunk. The places of objects are None: see `saved_object`."""
        entries: dict[str, Any] = {}
        places: dict[protocol.MetadataIndex, Any] = {}
        for key in self.paths:
            if key in self.rows:
                entries[key] = self._tensor(key, self.rows[key], places)
            else:
                entries[key] = protocol.BytesStorageMetadata()
                places[protocol.MetadataIndex(key)] = None
        meta = protocol.StorageMeta(checkpoint_id=checkpoint_id, save_id=self._source.record.save_id)
        return protocol.Metadata(entries, planner_data=self.paths, storage_data=places, storage_meta=meta)

    def _tensor(self, key: str, row: int, places: dict[protocol.MetadataIndex, Any]) -> protocol.TensorStorageMetadata:
        index = self._source.index
        stored, files = index.chunks.take(index.chunk_rows(row)), self._source.record.files
        chunks = []
        for number in range(len(stored)):
            box = stored.boxes.box(number, len(index.shape(row)))
            chunks.append(protocol.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            file, start = int(stored.file[number]), int(stored.start[number])
            # A forged file number is reported when the chunk is read.
            name = files[file].name if 0 <= file < len(files) else ""
            index_of = protocol.MetadataIndex(key, torch.Size(box.offsets), number)
            places[index_of] = StoredChunk(row, box.offsets, name, start)
        properties = protocol.TensorProperties(dtype=to_torch(index.dtype(row)))
        return protocol.TensorStorageMetadata(properties, torch.Size(index.shape(row)), chunks)

    def fill(self, wanted: Sequence[tuple[int, Box, str]], targets: Sequence[torch.Tensor]) -> None:
        """Fill tensors, given for each the row of the stored tensor, the box of it, and the key for messages."""
        into = [plain_target(target, key=key) for (_, _, key), target in zip(wanted, targets, strict=True)]
        rows, boxes = np.array([row for row, _, _ in wanted], np.int64), Boxes.of([box for _, box, _ in wanted])
        fill(self._source, rows, boxes, into, Options())
        for target, filled in zip(targets, into, strict=True):
            if filled is not target:
                target.copy_(filled)

    def saved_object(self, key: str, options: Options) -> io.BytesIO:
        """Return an object as `torch.save` writes it."""
        stream = io.BytesIO()
        torch.save(self._filled(self.objects[key], options), stream)
        stream.seek(0)
        return stream

    def _filled(self, value: Any, options: Options) -> Any:
        index = self._source.index
        if isinstance(value, _Leaf) and not value.is_tensor:
            return decode_value(index.value_data.raw(value.row), key=value.key, allow_pickle=options.allow_pickle)
        if isinstance(value, _Leaf):
            [tensor] = read_whole(self._source, np.asarray(index.tensors.alias, np.int64)[[value.row]], options)
            return tensor.numpy() if value.origin == 1 else tensor
        if isinstance(value, (list, tuple)):
            return type(value)([self._filled(each, options) for each in value])
        if isinstance(value, dict):
            return type(value)((key, self._filled(each, options)) for key, each in value.items())
        return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Leaf) and value.is_tensor and value.origin == 0
