"""`FileSystemReader`: loads from torch's layout or the native layout, on any file system or store."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import IO, Any, TypeVar, cast

import torch
from torch.futures import Future

from shardkeep.codecs.stream_extensions import ExtensionRegistry, _StorageReaderTransforms
from shardkeep.dcp._impl.planners import DefaultLoadPlanner
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.sources import latest
from shardkeep.engine.torch_source import ItemFiles, item_batches, read_items
from shardkeep.engine.torch_view import TorchView
from shardkeep.errors import BlobNotFound, BrokenProtocol, CheckpointError, MalformedFile, StateMismatch
from shardkeep.format.boxes import Box, Ints
from shardkeep.format.dtypes import DType, known_to_torch
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import ItemLocation, item_location, metadata_name, sums_of
from shardkeep.layouts.torch_pickle import read_metadata
from shardkeep.options import Options
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage import file_systems
from shardkeep.storage.base import Store

log = logging.getLogger("shardkeep")
T = TypeVar("T")
_Located = tuple[protocol.ReadItem, ItemLocation]


def completed(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def fill_targets(
    requests: Sequence[protocol.ReadItem], planner: protocol.LoadPlanner, fill: Callable[[Sequence[torch.Tensor]], T]
) -> T:
    """Resolve the target tensors of some requests, fill them, and commit them to the planner."""
    targets = [target_of(request, planner) for request in requests]
    synchronize_devices(targets)
    result = fill(targets)
    synchronize_devices(targets)
    # The bytes bypass autograd, which must know that what it saved of these tensors is no longer valid.
    torch.autograd.graph.increment_version(targets)
    for request, target in zip(requests, targets, strict=True):
        planner.commit_tensor(request, target)
    return result


def target_of(request: protocol.ReadItem, planner: protocol.LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if tuple(target.shape) != tuple(request.lengths):
        raise _WrongTarget(
            f"req {request.storage_index} mismatch sizes {target.size()} vs {request.lengths}",
            hint="the planner returned a tensor that does not fit its own plan",
            key=request.storage_index.fqn,
        )
    return target


class _WrongTarget(StateMismatch, AssertionError):
    """A planner returned a tensor of another size than it requested."""


def _read_archives(reader: FileSystemReader, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> None:
    metadata, options = reader._metadata, Options()
    files = ItemFiles(reader.readable_store(), sums_of(metadata))
    objects: list[_Located] = []
    tensors: list[_Located] = []
    for request in plan.items:
        info = reader.storage_data.get(request.storage_index)
        if info is None:
            key = request.storage_index.fqn
            raise MalformedFile(f"the metadata do not say where {request.storage_index} is", key=key)
        is_object = request.type == protocol.LoadItemType.BYTE_IO
        (objects if is_object else tensors).append((request, item_location(info)))

    def undo(request: protocol.ReadItem, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
        made: IO[bytes] = reader.transforms.transform_load_stream(request, descriptors, stream)
        return made

    for some in item_batches(objects, lambda each: each[1].nbytes):
        raw = read_items(files, [files.item(place, request.storage_index.fqn) for request, place in some], options)
        for (request, place), data in zip(some, raw, strict=True):
            stream = io.BytesIO(data)
            if place.descriptors:
                stream = io.BytesIO(undo(request, place.descriptors, stream).read(-1))
            planner.load_bytes(request, stream)
    described = _stored_chunks({} if metadata is None else metadata.state_dict_metadata)
    casts: dict[str, str] = {}
    for some in item_batches(tensors, lambda each: each[1].nbytes):

        def fill(targets: Sequence[torch.Tensor], some: Sequence[_Located] = some) -> dict[str, str]:
            wanted = []
            for (request, place), target in zip(some, targets, strict=True):
                index = request.storage_index
                shape, dtype = described.get((index.fqn, index.offset), ((), None))
                box = Box(tuple(request.storage_offsets), tuple(request.lengths))
                wanted.append(ChunkRequest(place, index.fqn, shape, dtype, box, target, request))
            return fill_items(files, wanted, options, undo=undo)

        casts |= fill_targets([request for request, _ in some], planner, fill)
    if isinstance(planner, DefaultLoadPlanner):
        return  # it has logged conversions itself
    for change in sorted(set(casts.values())):
        key = next(key for key, each in casts.items() if each == change)
        log.warning("tensors are converted as they are loaded: %s (%r, and perhaps others)", change, key)


def _stored_chunks(entries: Mapping[str, Any]) -> dict[tuple[str, Ints | None], tuple[Ints, DType | None]]:
    """Return shape and dtype of each chunk, by the key and the offsets in its index; those of a whole tensor may be None."""
    known, found = known_to_torch(), dict[tuple[str, Ints | None], tuple[Ints, DType | None]]()
    for key, entry in entries.items():
        for chunk in entry.chunks if protocol.is_tensor_entry(entry) else ():
            form = tuple(chunk.sizes), known.get(entry.properties.dtype)
            found[key, chunk.offsets] = form
            if not any(chunk.offsets):
                found[key, None] = form
    return found


def _read_native(
    view: TorchView, places: Mapping[Any, Any], plan: protocol.LoadPlan, planner: protocol.LoadPlanner
) -> None:
    tensors: list[protocol.ReadItem] = []
    for request in plan.items:
        if request.type == protocol.LoadItemType.BYTE_IO:
            planner.load_bytes(request, view.saved_object(request.storage_index.fqn, Options()))
        else:
            tensors.append(request)

    def fill(targets: Sequence[torch.Tensor]) -> None:
        wanted = []
        for request in tensors:
            chunk = places[request.storage_index]
            at = tuple(a + b for a, b in zip(chunk.offsets, request.storage_offsets, strict=True))
            wanted.append((chunk.row, Box(at, tuple(request.lengths)), request.storage_index.fqn))
        view.fill(wanted, targets)

    fill_targets(tensors, planner, fill)


class FileSystemReader(file_systems.CheckpointPlace, protocol.StorageReader):
    """Reads a checkpoint from a directory or a store."""

    _foreign = True

    def __init__(self, path: file_systems.PathLike, _extension_registry: ExtensionRegistry | None = None) -> None:
        """Set where the checkpoint is: a directory, or the URL of a store, or any URL that fsspec opens."""
        super().__init__()
        self.fs, self.path = file_systems.file_system_for(path)
        self.storage_data: dict[Any, Any] = {}
        self.load_id = str(uuid.uuid4())
        self._extension_registry = _extension_registry
        self.rank: int | None = None
        self.use_collectives = True
        self._metadata: protocol.Metadata | None = None
        self._native: TorchView | None = None

    def _slice_file(self, file: IO[bytes], sinfo: protocol._StorageInfo) -> IO[bytes]:
        return cast("IO[bytes]", _create_file_view(cast("io.IOBase", file), sinfo.offset, sinfo.length))

    def _get_metadata_path(self, rank: int | None = None) -> file_systems.PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    @property
    def reads_unchanged(self) -> bool:
        """Whether only the extensions that are always registered transform what is read."""
        return self._extension_registry is None and "transforms" not in vars(self)

    @cached_property
    def transforms(self) -> Any:
        """Undoes what extensions did to the items."""
        return _StorageReaderTransforms(self._extension_registry)

    def reset(self, checkpoint_id: file_systems.PathLike | None = None) -> None:
        self.storage_data = {}
        if checkpoint_id:
            self.fs, self.path = file_systems.file_system_at(self.fs, checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def readable_store(self) -> Store | file_systems.StreamStore:
        """Return the store that the checkpoint is in, or its files as streams of the file system."""
        return self.open_store() if file_systems.has_store(self.fs) else file_systems.StreamStore(self.fs, self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> protocol.Metadata:
        name = metadata_name(kwargs.get("rank"))
        store = self.readable_store()
        try:
            if (
                kwargs.get("rank") is None
                and not isinstance(store, file_systems.StreamStore)
                and latest(store) == RECORD_NAME
            ):
                raise BlobNotFound(f"{name}: a native checkpoint was saved here since", name=name)
            metadata = read_metadata(store, name, where=str(self.fs.concat_path(self.path, name)))
            self._native = None
        except BlobNotFound:
            self._native = TorchView.open(store) if kwargs.get("rank") is None else None
            if self._native is None:
                raise
            metadata = self._native.describe(self.path)
        if metadata.storage_meta is None:
            metadata.storage_meta = protocol.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return protocol.to_classes_of_caller(metadata)

    def set_up_storage_reader(
        self, metadata: protocol.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if metadata.storage_data is None:
            raise BrokenProtocol(f"the metadata of {self.path} do not say where the items are (storage_data is None)")
        self.storage_data = metadata.storage_data
        self._metadata = metadata
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: protocol.LoadPlan) -> protocol.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[protocol.LoadPlan]) -> list[protocol.LoadPlan]:
        return plans

    def read_data(self, plan: protocol.LoadPlan, planner: protocol.LoadPlanner) -> Future[None]:
        if self._native is not None:
            _read_native(self._native, self.storage_data, plan, planner)
        else:
            _read_archives(self, plan, planner)
        return completed(None)


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from any URL that fsspec opens."""

    _file_system = file_systems.FsspecFileSystem

    def __init__(self, path: file_systems.PathLike, **kwargs: Any) -> None:
        """Set where the checkpoint is; `kwargs` are for the file system: credentials, endpoints."""
        super().__init__(path)
        self.fs, self.path = open_with_fsspec(path, kwargs)


def open_with_fsspec(
    path: file_systems.PathLike, kwargs: dict[str, Any]
) -> tuple[file_systems.FileSystemBase, file_systems.PathLike]:
    """Open a URL with fsspec, or, without `kwargs`, with one of our stores if fsspec has none for it."""
    fs = file_systems.FsspecFileSystem()
    try:
        return fs, fs.init_path(path, **kwargs)
    except (ImportError, ValueError, CheckpointError):
        if kwargs or not file_systems.is_of_store(path):
            raise
    return file_systems.file_system_for(path)


class _ReaderView(io.RawIOBase):
    """A part of a stream, as a stream. Views of one stream share its position: each is used after a `seek`."""

    def __init__(self, base_stream: io.IOBase, offset: int, len: int) -> None:  # noqa: A002 - torch's name
        super().__init__()
        self.offset = offset
        self.len = len
        self.base_stream = base_stream
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position, and return it; both count from the start of the view."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.len}
        if whence not in start:
            raise ValueError(f"whence is {whence}, expected one of os.SEEK_SET, os.SEEK_CUR, os.SEEK_END")
        target = start[whence] + offset
        if target < 0:
            raise ValueError(f"cannot seek to {target}, before the start of the view")
        self.base_stream.seek(self.offset + target)
        return target

    def tell(self) -> int:
        return self.base_stream.tell() - self.offset

    def readable(self) -> bool:
        return self.base_stream.readable()

    def seekable(self) -> bool:
        return self.base_stream.seekable()

    def read(self, size: int | None = -1) -> bytes:  # torch's takes it by name, too
        return super().read(-1 if size is None else size) or b""

    def readinto(self, b: Any) -> int:
        """Fill a buffer up to the end of the view; return how many bytes were read."""
        left = max(0, self.len - self.tell())
        read: int = self.base_stream.readinto(memoryview(b).cast("B")[:left])  # type: ignore[attr-defined]  # binary streams have it
        return read


def _create_file_view(file: io.IOBase, offset: int, length: int) -> io.IOBase:
    return _ReaderView(file, offset, length)
