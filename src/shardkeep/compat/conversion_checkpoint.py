"""
A checkpoint that is read in windows: first its objects and what its tensors are, then the tensors' values in parts.

Any storage reader will do. What it raises comes as from a load: as `CheckpointException`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardkeep.errors import BlobNotFound, MalformedFile, UnsupportedLeaf
from shardkeep.exchange.archive_file import Part
from shardkeep.exchange.archive_pickle import StandIn
from shardkeep.format.dtypes import of_torch, to_torch
from shardkeep.format.region import flat_range_to_boxes
from shardkeep.protocol.chunks import clashes, within
from shardkeep.protocol.gatherings import _DistWrapper
from shardkeep.protocol.items import _create_read_item_for_byteio, create_read_items_for_chunk_list
from shardkeep.protocol.load_planner import DefaultLoadPlanner
from shardkeep.protocol.lookup import saved_path
from shardkeep.protocol.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, is_tensor_entry
from shardkeep.protocol.objects import load_object
from shardkeep.protocol.plans import LoadPlan, ReadItem
from shardkeep.protocol.problems import NoMetadata
from shardkeep.protocol.storage import StorageReader
from shardkeep.state.toolkit.trees import set_element

T = TypeVar("T")

_MOST_ELEMENTS = 1 << 58
"""No file is large enough for more."""


class CheckpointTensors:
    """The tensors of a checkpoint, read in parts."""

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader
        self._alone = _DistWrapper(None, use_dist=False, coordinator_rank=0)
        self._metadata = Metadata({})
        self._transformed: set[str] = set()
        """Tensors that were saved through an extension: no part of them can be read alone."""
        self._held: tuple[str, torch.Tensor] | None = None

    def read_state(self) -> dict[str, Any]:
        """Return the state that the checkpoint holds, nested as it was saved, with a `StandIn` for each tensor."""
        self._step("plan", self._open)
        state: dict[str, Any] = {}
        objects = []
        for key, entry in self._metadata.state_dict_metadata.items():
            stored = is_tensor_entry(entry)
            set_element(state, saved_path(self._metadata, key), _stand_in(key, entry) if stored else None)
            if not stored:
                objects.append(_create_read_item_for_byteio(MetadataIndex(key), 0, MetadataIndex(key), 0, 0))

        def put(key: str, value: Any) -> None:
            set_element(state, saved_path(self._metadata, key), value)

        self._read(objects, _Objects(put))
        return state

    def fill(self, parts: list[tuple[StandIn, Part]]) -> None:
        """Read bytes of tensors."""
        planner = _Boxes()
        plan: list[ReadItem] = []
        for tensor, part in parts:
            values = torch.frombuffer(part.into, dtype=torch.uint8)
            if tensor.key in self._transformed and values.numel() < tensor.nbytes:
                values.copy_(self._decoded(tensor)[part.start : part.stop])
                continue
            plan += self._items(
                tensor, values.view(to_torch(tensor.dtype)), part.start // tensor.dtype.itemsize, planner
            )
        self._read(plan, planner)

    def _items(self, tensor: StandIn, values: torch.Tensor, start: int, planner: _Boxes) -> list[ReadItem]:
        """Return what is to be read for a run of elements, which begins at `start` and has a place in `values`."""
        at, chunks = 0, []
        for box in flat_range_to_boxes(tensor.shape, start, start + values.numel()):
            planner.add(tensor.key, values[at : at + box.volume].view(box.sizes))
            chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
            at += box.volume
        entry: Any = self._metadata.state_dict_metadata[tensor.key]
        return create_read_items_for_chunk_list(tensor.key, entry, chunks)

    def _decoded(self, tensor: StandIn) -> torch.Tensor:
        """Return the bytes of a whole tensor; one is held at a time."""
        if self._held is None or self._held[0] != tensor.key:
            self._held = None
            values = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
            planner = _Boxes()
            self._read(self._items(tensor, values.view(to_torch(tensor.dtype)), 0, planner), planner)
            self._held = tensor.key, values
        return self._held[1]

    def _open(self) -> None:
        try:
            metadata = self._reader.read_metadata()
        except BlobNotFound as error:
            metadata = self._own_metadata(error)
        for key, entry in metadata.state_dict_metadata.items():
            if is_tensor_entry(entry):
                _check_chunks(key, entry)
        self._metadata = metadata
        places = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
        self._transformed = {
            index.fqn for index, place in places.items() if getattr(place, "transform_descriptors", None)
        }
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def _own_metadata(self, error: BlobNotFound) -> Metadata:
        """Return what rank 0 alone wrote, where ranks were saved without collectives."""
        try:
            return self._reader.read_metadata(rank=0)
        except BlobNotFound:
            raise NoMetadata(
                f"metadata is None; global metadata read failed: {error.message}",
                hint="is there a complete checkpoint at this place?",
            ) from error

    def _read(self, items: list[ReadItem], planner: DefaultLoadPlanner) -> None:
        if items:
            self._step("read", lambda: self._reader.read_data(LoadPlan(items), planner).wait())

    def _step(self, name: str, work: Callable[[], T]) -> T:
        return self._alone.all_gather(name, work)[0]


def _stand_in(key: str, entry: Any) -> StandIn:
    try:
        return StandIn(key, tuple(entry.size), of_torch(entry.properties.dtype))
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{key!r}: {error.message}", hint=error.hint, key=key) from error


def _check_chunks(key: str, entry: Any) -> None:
    """Insist that every element of a tensor is stored, and once."""
    if any(n < 0 for n in entry.size) or math.prod(entry.size) >= _MOST_ELEMENTS:
        raise MalformedFile(f"{key!r}: there is no tensor of {tuple(entry.size)}", key=key)
    chunks = list({(tuple(chunk.offsets), tuple(chunk.sizes)): chunk for chunk in entry.chunks}.values())
    outside = [chunk for chunk in chunks if not within(entry.size, chunk)]
    wrong = f"{outside[0]} is not inside" if outside else ""
    if not wrong and (pairs := clashes(chunks)):
        wrong = f"{pairs[0][0]} and {pairs[0][1]} overlap in"
    stored = 0 if wrong else sum(math.prod(chunk.sizes) for chunk in chunks)
    if not wrong and stored != math.prod(entry.size):
        wrong = f"only {stored} elements are stored of"
    if wrong:
        raise MalformedFile(f"{key!r}: {wrong} a tensor of {tuple(entry.size)}", key=key)


class _Objects(DefaultLoadPlanner):
    """Hands over objects as they are read."""

    def __init__(self, put: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._put = put

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self._put(key, load_object(value, key=key))


class _Boxes(DefaultLoadPlanner):
    """Knows the memory of each box that is read."""

    def __init__(self) -> None:
        super().__init__()
        self._boxes: dict[str, list[torch.Tensor]] = {}

    def add(self, key: str, memory: torch.Tensor) -> None:
        """Give memory for the next box of a tensor."""
        self._boxes.setdefault(key, []).append(memory)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._boxes[index.fqn][index.index or 0]
