"""
A part of a stream as a stream of its own, and small sums over shapes.
"""

from __future__ import annotations

import dataclasses
import heapq
import io
import logging
import math
import os
import queue
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, cast

import torch
from torch.futures import Future

from shardkeep.codecs.stream_extensions import (
    ExtensionRegistry,
    StreamTransformExtension,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
)
from shardkeep.dcp._impl.hf_files import aligned_order, header_of, planned_tensor
from shardkeep.dcp._impl.interop import to_classes_of_caller
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.engine.fill import ChunkRequest, fill_items
from shardkeep.engine.reader import ReadableStore
from shardkeep.engine.sources import latest
from shardkeep.engine.stagers import BlockingAsyncStager
from shardkeep.engine.torch_source import ItemFiles, item_batches, read_items
from shardkeep.engine.torch_view import TorchView, is_native
from shardkeep.engine.torch_writer import (
    Data,
    HashingStream,
    WrittenItem,
    lay_out,
    plain_tensor,
    write_stream,
)
from shardkeep.engine.workers import FollowUpError, budget_for_store, run_workers
from shardkeep.engine.writer import FileJob, write_files
from shardkeep.errors import (
    BlobNotFound,
    BrokenProtocol,
    CheckpointError,
    CheckpointExists,
    MalformedFile,
    StateError,
    StateMismatch,
)
from shardkeep.format.boxes import Box, Ints
from shardkeep.format.dtypes import DType, known_to_torch
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts.torch import SUMS_SUFFIX, Sums, encode_sums, metadata_name
from shardkeep.layouts.torch_metadata import ItemLocation, item_location, sums_of
from shardkeep.layouts.torch_pickle import data_files_of, encode_metadata, read_metadata, set_sums
from shardkeep.layouts.torch_publish import Commit, commit_target_for, first_number
from shardkeep.layouts.torch_values import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    STATE_DICT_TYPE,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    SerializationFormat,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteItem,
    WriteItemType,
    WriteResult,
    _StorageInfo,
    _StoragePrefix,
    is_tensor_entry,
)
from shardkeep.options import Options
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage.base import Store, is_name, preferred_requests
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.file_systems import (
    FileSystem,
    FileSystemBase,
    FsspecFileSystem,
    PathLike,
    StreamStore,
    file_system_at,
    file_system_for,
    is_of_store,
    store_of,
    sync_stream,
    write_all,
)


class _ReaderView(io.IOBase):
    """
    The `len` bytes of a stream from `offset` on, read as if there were no others.

    Where it stands is where the stream stands: two views of one stream are used in turn, each after a `seek`.
    """

    def __init__(self, base_stream: io.IOBase, offset: int, len: int) -> None:  # noqa: A002 - torch's name
        super().__init__()
        self.offset = offset
        self.len = len
        self.base_stream = base_stream
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place, and return it, both counted from the view's start."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell() if whence == os.SEEK_CUR else 0, os.SEEK_END: self.len}
        if whence not in start:
            raise ValueError(f"whence is {whence}, expected one of os.SEEK_SET, os.SEEK_CUR, os.SEEK_END")
        target = start[whence] + offset
        if target < 0:
            raise ValueError(f"cannot go to {target}, before the start of the view")
        self.base_stream.seek(self.offset + target)
        return target

    def tell(self) -> int:
        """Return where the view stands, counted from its start."""
        return self.base_stream.tell() - self.offset

    def readable(self) -> bool:
        """Say whether the stream can be read."""
        return self.base_stream.readable()

    def seekable(self) -> bool:
        """Say whether the stream can be moved in."""
        return self.base_stream.seekable()

    def readinto(self, b: Any) -> int:
        """Fill a buffer as far as the view goes; return how much was read."""
        left = self._left()
        if left == 0:
            return 0
        room = memoryview(b).cast("B")
        read: int = self.base_stream.readinto(room[:left])  # type: ignore[attr-defined]  # binary streams have it
        return read

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, or all that are left in the view."""
        left = self._left()
        wanted = left if size is None or size < 0 else min(size, left)
        data: bytes = self.base_stream.read(wanted)
        return data

    def _left(self) -> int:
        return max(0, self.len - self.tell())


def _create_file_view(file: io.IOBase, offset: int, length: int) -> io.IOBase:
    """Return a part of a stream as a stream."""
    return _ReaderView(file, offset, length)


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=False)]


def _normalize_device_info(device_type: str, device_id: int) -> str:
    """Return how a device is written in a placement."""
    return "cpu" if device_type == "cpu" else f"{device_type}:{device_id}"


# Which file of a rank each item goes to: objects in turn, tensors where there is least so far, the largest first.


def _item_size(item: WriteItem) -> int:
    """Return the bytes that an item writes of its tensor; 0 for an object."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Spread items over this many files."""
    if bins == 1:
        return [items]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    for number, item in enumerate(objects):
        buckets[number % bins].append(item)
    sizes = [(0, number) for number in range(bins)]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for item in sorted(tensors, key=_item_size, reverse=True):
        size, number = sizes[0]
        buckets[number].append(item)
        heapq.heapreplace(sizes, (size + _item_size(item), number))
    return buckets


# Data files of a rank: items resolved, written, and what is to be said of each.
#
# Whole tensors of a default planner, written as they are to this machine's disk or to a store, go through the
# engine's
# pipeline. All else is written as a stream, item by item: file systems of others, transformed items, planners that
# make
# what they save.


_MOST_MADE_NBYTES = 64 << 20
"""Of pickled objects, held until they are written."""


class FilePlan(NamedTuple):
    """A data file to write."""

    path: PathLike
    name: str
    items: list[WriteItem]
    header: bytes | None = None
    """What stands before bare tensors; None where each item is an archive of its own."""


def write_plans(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    """Write files; all of them are there, durable if asked for, or none."""
    if writer.serialization_format == SerializationFormat.SAFETENSORS:
        if writer.transforms.extensions:
            raise StateError("extensions cannot be applied to safetensors files", hint="write TORCH_SAVE files")
        plans = [_as_safetensors(plan) for plan in plans]
    plans = [plan._replace(items=_objects_first(plan.items)) for plan in plans]
    if _can_be_laid_out(writer, planner, plans):
        return _write_laid_out(writer, planner, plans)
    return _write_streams(writer, planner, plans)


def _as_safetensors(plan: FilePlan) -> FilePlan:
    if any(item.type == WriteItemType.BYTE_IO for item in plan.items):
        return plan
    tensors = aligned_order(list(map(planned_tensor, plan.items)))
    return plan._replace(items=[tensor.item for tensor in tensors], header=header_of(tensors, {}, where=plan.name))


def _objects_first(items: Sequence[WriteItem]) -> list[WriteItem]:
    return sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO)


def _can_be_laid_out(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> bool:
    own = type(planner)
    gives_what_is_there = isinstance(planner, DefaultSavePlanner) and all(
        getattr(own, name) is getattr(DefaultSavePlanner, name) and name not in vars(planner)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )
    transforms = writer.transforms
    untouched = type(transforms) is _StorageWriterTransforms and not transforms.extensions
    here = store_of(writer.fs, writer.path) is not None and all(
        is_name(plan.name) and str(plan.path) == str(writer.fs.concat_path(writer.path, plan.name)) for plan in plans
    )
    return gives_what_is_there and untouched and here


def _write_laid_out(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    options = Options()
    store = store_of(writer.fs, writer.path, durable=writer.sync_files)
    held = _held(planner, plans)
    if held is None or store is None:
        return _write_streams(writer, planner, plans)
    synchronize_devices(data for of_file in held for data in of_file if isinstance(data, torch.Tensor))
    laid = [_lay_out(plan, of_file) for plan, of_file in zip(plans, held, strict=True)]
    budget = budget_for_store(store, options.io_threads, options.host_budget_bytes, coded=False)
    jobs = [job for job, _ in laid]
    with CancelScope(budget=budget.room).active():
        digests = write_files(store, jobs, threads=budget.threads, window_nbytes=budget.window_nbytes)
    results: list[WriteResult] = []
    made = [job.name for job in jobs]
    try:
        for plan, (job, placed), of_file, items in zip(plans, laid, digests, held, strict=True):
            faithful = [_as_planned(item, data) for item, data in zip(plan.items, items, strict=True)]
            sums, data = encode_sums(job.data_nbytes, job.block_nbytes, of_file)
            made.append(f"{plan.name}{SUMS_SUFFIX}")  # before: it may fail with the file in place
            store.put(f"{plan.name}{SUMS_SUFFIX}", data, replace=True)
            results += _results(plan, placed, faithful, sums)
    except BaseException:
        for name in made:
            with suppress(CheckpointError):
                store.delete(name)
        raise
    return results


def _held(planner: SavePlanner, plans: list[FilePlan]) -> list[list[Data]] | None:
    """Return what goes into each file; None where so much is made for it that it must be made piece by piece."""
    made = 0
    held: list[list[Data]] = []
    for plan in plans:
        held.append([])
        for item in plan.items:
            data = _data_of(planner, item)
            held[-1].append(data)
            made += 0 if isinstance(data, torch.Tensor) else data.nbytes
            if made > _MOST_MADE_NBYTES:
                return None
    return held


def _lay_out(plan: FilePlan, data: list[Data]) -> tuple[FileJob, list[WrittenItem]]:
    if plan.header is None:
        return lay_out(plan.name, data)
    for item, each in zip(plan.items, data, strict=True):
        _check_as_planned(item, each)
    job, placed = lay_out(plan.name, [memoryview(plan.header), *data], framed=False)
    return job, placed[1:]


def _check_as_planned(item: WriteItem, data: Data) -> None:
    if not _as_planned(item, data):
        raise StateError(
            f"{item.index.fqn!r} is not the dense tensor that was planned: a safetensors file cannot hold it",
            hint="write TORCH_SAVE files, or leave it out",
            key=item.index.fqn,
        )


def _data_of(planner: SavePlanner, item: WriteItem) -> Data:
    """Resolve an item: a tensor whose memory can be written as it is, or bytes."""
    data = planner.resolve_data(item)
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise BrokenProtocol(f"{key!r} is to be written as bytes, and the planner gave a {type(data).__name__}")
        return memoryview(data.getvalue())  # its own from now on: a planner may use the stream again
    if not isinstance(data, torch.Tensor):
        raise BrokenProtocol(f"{key!r} is to be written as a tensor, and the planner gave a {type(data).__name__}")
    return _plain_or_saved(key, data)


def _plain_or_saved(key: str, data: torch.Tensor) -> Data:
    plain = plain_tensor(key, data)
    if plain is not None:
        return plain
    made = io.BytesIO()
    torch.save(data.detach().cpu(), made)
    return made.getbuffer()


def _as_planned(item: WriteItem, data: Data) -> bool:
    """Say whether the bytes of a tensor are what its metadata will say they are."""
    planned = item.tensor_data
    if planned is None or not isinstance(data, torch.Tensor):
        return False
    return data.dtype == planned.properties.dtype and tuple(data.shape) == tuple(planned.chunk.sizes)


def _results(plan: FilePlan, placed: list[WrittenItem], faithful: list[bool], sums: Sums) -> list[WriteResult]:
    results = []
    for item, place, as_planned in zip(plan.items, placed, faithful, strict=True):
        info = _StorageInfo(plan.name, place.offset, place.nbytes, place.descriptors or None)
        if place.data_start is not None and as_planned:
            info.keep_data_start(place.data_start)
        results.append(WriteResult(index=item.index, size_in_bytes=place.nbytes, storage_data=info))
    if results:
        results[0].storage_data.keep_sums((sums.nbytes, sums.block_nbytes, sums.checksum))
    return results


def _write_item(
    transforms: Any,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat,
) -> WriteResult:
    """Write one item to a stream that others write to as well; for writers that have files of their own."""
    if serialization_format != SerializationFormat.TORCH_SAVE and isinstance(data, torch.Tensor):
        raise StateError(f"{write_item.index.fqn!r}: a safetensors file is not written item by item")
    item = data.getbuffer() if isinstance(data, io.BytesIO) else _plain_or_saved(write_item.index.fqn, data)
    out = HashingStream(cast("IO[bytes]", stream), at=stream.tell())

    def wrap(raw: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        wrapped, descriptors = transforms.transform_save_stream(write_item, raw)
        return wrapped, list(descriptors)

    [place] = write_stream(out, [item], wrap)
    info = _StorageInfo(storage_key, place.offset, place.nbytes, place.descriptors or None)
    return WriteResult(index=write_item.index, size_in_bytes=place.nbytes, storage_data=info)


def _write_streams(writer: _FileSystemWriter, planner: SavePlanner, plans: list[FilePlan]) -> list[WriteResult]:
    results: dict[str, list[WriteResult]] = {}
    stop = threading.Event()

    def write(plan: FilePlan, _: memoryview) -> bool:
        results[plan.name] = _write_one_stream(
            writer.fs, writer.transforms, planner, plan, sync=writer.sync_files, stop=stop
        )
        return True

    try:
        run_workers(plans, write, threads=max(1, min(writer.thread_count, len(plans))), buffer_nbytes=0, stop=stop)
    except BaseException:
        for plan in plans:
            for path in (plan.path, f"{os.fspath(plan.path)}{SUMS_SUFFIX}"):
                with suppress(Exception):  # whatever a file system raises: the failure is what counts
                    writer.fs.rm_file(path)
        raise
    return [result for plan in plans for result in results[plan.name]]


def _write_one_stream(
    fs: FileSystemBase, transforms: Any, planner: SavePlanner, plan: FilePlan, *, sync: bool, stop: threading.Event
) -> list[WriteResult]:
    turn = iter(plan.items)
    faithful: list[bool] = []

    def wrap(out: IO[bytes]) -> tuple[IO[bytes], list[str]]:
        item = next(turn)
        if type(transforms) is _StorageWriterTransforms and not transforms.extensions:
            return out, []
        stream, descriptors = transforms.transform_save_stream(item, out)
        return stream, list(descriptors)

    def resolved() -> Iterator[Data]:
        for item in plan.items:
            if stop.is_set():
                raise FollowUpError("the save was given up")
            data = _data_of(planner, item)
            synchronize_devices([data] if isinstance(data, torch.Tensor) else [])
            faithful.append(_as_planned(item, data))
            if plan.header is not None:
                _check_as_planned(item, data)
            yield data

    with fs.create_stream(plan.path, "wb") as raw:
        out = HashingStream(raw)  # type: ignore[arg-type]  # opened to be written
        if plan.header is not None:
            out.write(plan.header)
        placed = write_stream(out, resolved(), wrap, framed=plan.header is None)
        sync_stream(raw, sync=sync)
    sums, data = encode_sums(out.nbytes, out.block_nbytes, out.digests())
    with fs.create_stream(f"{os.fspath(plan.path)}{SUMS_SUFFIX}", "wb") as raw:
        write_all(raw, data, sync=sync)
    return _results(plan, placed, faithful, sums)


# The items of a load plan, from files of torch's layout into what the planner gives for them.
#
# Planners that make room for each item when asked, and take it back when it is filled, are asked for a bounded amount
# at
# a time; the default one has its tensors in place.

log = logging.getLogger("shardkeep")


def read_plan(
    store: ReadableStore,
    metadata: Metadata | None,
    places: Mapping[Any, Any],
    plan: LoadPlan,
    planner: LoadPlanner,
    transforms: Any,
) -> None:
    """Read every item of the plan."""
    options = Options()
    files = ItemFiles(store, _sums_in(metadata))
    wanted = [(request, _place(places, request)) for request in plan.items]
    objects = [each for each in wanted if each[0].type == LoadItemType.BYTE_IO]
    tensors = [each for each in wanted if each[0].type != LoadItemType.BYTE_IO]

    for some in item_batches(objects, lambda each: each[1].nbytes):
        _read_objects(files, some, planner, transforms, options)
    # A planner of another kind may make room for each tensor when it is asked.
    in_place = getattr(
        type(planner), "resolve_tensor", None
    ) is DefaultLoadPlanner.resolve_tensor and "resolve_tensor" not in vars(planner)
    chunks = _Chunks(metadata)
    casts: dict[str, str] = {}
    for some in [tensors] if in_place else item_batches(tensors, lambda each: each[1].nbytes):
        casts |= _read_tensors(files, some, chunks, planner, transforms, options)
    if isinstance(planner, DefaultLoadPlanner):
        return  # it has said so itself
    for change in sorted(set(casts.values())):
        key = next(key for key, each in casts.items() if each == change)
        log.warning("tensors are converted as they are loaded: %s (%r, and perhaps others)", change, key)


def _place(places: Mapping[Any, Any], request: ReadItem) -> ItemLocation:
    info = places.get(request.storage_index)
    if info is None:
        key = request.storage_index.fqn
        raise MalformedFile(f"the metadata do not say where {request.storage_index} is", key=key)
    return item_location(info)


def _sums_in(metadata: Metadata | None) -> dict[str, Sums]:
    said = getattr(metadata, "shardkeep_sums", None) or {}
    try:
        return sums_of(said)
    except (AttributeError, TypeError, ValueError) as exc:
        raise MalformedFile(f"what the metadata say of the files' digests makes no sense: {exc}") from exc


def _read_objects(
    files: ItemFiles, some: list[tuple[ReadItem, ItemLocation]], planner: LoadPlanner, transforms: Any, options: Options
) -> None:
    items = [files.item(place, request.storage_index.fqn) for request, place in some]
    held = read_items(files, items, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
    for (request, place), data in zip(some, held, strict=True):
        stream = io.BytesIO(data)
        if place.descriptors:
            stream = io.BytesIO(transforms.transform_load_stream(request, place.descriptors, stream).read(-1))
        planner.load_bytes(request, stream)


def _read_tensors(
    files: ItemFiles,
    some: list[tuple[ReadItem, ItemLocation]],
    chunks: _Chunks,
    planner: LoadPlanner,
    transforms: Any,
    options: Options,
) -> dict[str, str]:
    targets = [_target(request, planner) for request, _ in some]
    wanted = []
    for (request, place), target in zip(some, targets, strict=True):
        shape, dtype = chunks.of(request)
        box = Box(tuple(request.storage_offsets), tuple(request.lengths))
        wanted.append(ChunkRequest(place, request.storage_index.fqn, shape, dtype, box, target, request))

    def undo(request: ReadItem, descriptors: Any, stream: IO[bytes]) -> IO[bytes]:
        made: IO[bytes] = transforms.transform_load_stream(request, descriptors, stream)
        return made

    synchronize_devices(targets)
    threads = preferred_requests(files.store, options.io_threads)
    _, casts = fill_items(files, wanted, undo=undo, threads=threads, budget_nbytes=options.host_budget_bytes)
    synchronize_devices(targets)
    # The bytes went past autograd, which must not take what it saved from these tensors for still valid.
    torch.autograd.graph.increment_version(targets)
    for (request, _), target in zip(some, targets, strict=True):
        planner.commit_tensor(request, target)
    return casts


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if tuple(target.shape) != tuple(request.lengths):
        raise _WrongTarget(
            f"req {request.storage_index} mismatch sizes {target.size()} vs {request.lengths}",
            hint="the planner gave a tensor that does not fit its own plan",
            key=request.storage_index.fqn,
        )
    return target


class _WrongTarget(StateMismatch, AssertionError):
    """A planner gave a tensor of another size than it asked for."""


class _Chunks:
    """What the metadata say of each stored chunk."""

    def __init__(self, metadata: Metadata | None) -> None:
        self._entries = {} if metadata is None else metadata.state_dict_metadata
        self._sizes: dict[str, dict[Ints, Ints]] = {}

    def of(self, request: ReadItem) -> tuple[Ints, DType | None]:
        """Return shape and dtype of the chunk that a request reads from; no dtype where nothing is said of it."""
        index = request.storage_index
        entry: Any = self._entries.get(index.fqn)
        if entry is None or not is_tensor_entry(entry):
            return (), None
        sizes = self._sizes.get(index.fqn)
        if sizes is None:
            sizes = self._sizes[index.fqn] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
        shape = sizes.get(tuple(index.offset) if index.offset is not None else (0,) * len(entry.size))
        dtype = known_to_torch().get(entry.properties.dtype)
        return ((), None) if shape is None else (shape, dtype)


# `FileSystemWriter`: a save in torch's layout, on any file system or store.
#
# Data files get names that no other file has; the metadata, which name them, are put in place last and in one step.
# Only
# then are the files of the checkpoint that was replaced removed. A save that fails or dies leaves what was there
# before.


class CheckpointThere(CheckpointExists, RuntimeError):
    """A checkpoint is there already, and the writer may not replace it."""


def _generate_uuid() -> str:
    return str(uuid.uuid4())


class _FileSystemWriter(StorageWriter):
    """Writes items into a few files a rank."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: where the checkpoint goes: a directory, or a URL (`s3://`, `gs://`, `az://`, `file://`, or what fsspec
                opens).
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files survive a loss of power before the save ends.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.

        """
        super().__init__()
        self.fs: FileSystemBase
        self.fs, self.path = file_system_for(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.save_id = _generate_uuid()
        self.overwrite = overwrite
        self.transforms = _StorageWriterTransforms(_extensions)
        self.serialization_format = serialization_format
        self.rank: int | None = None
        self.use_collectives = True
        self._began_s = time.time()
        self._written: list[str] = []

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id:
            self.fs, self.path = file_system_at(self.fs, checkpoint_id)
        self.save_id = _generate_uuid()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._began_s = time.time()
        self._written = []  # of a save before this one, which is not to be discarded with it

    def _alone_s(self, metadata: Metadata) -> float:
        """Return how long the coordinator may be at work on this save when the other ranks are done."""
        return 0.0

    def _metadata_exists(self) -> bool:
        # Where each rank has metadata of its own, others may have put theirs there in this very save.
        own = self._get_metadata_path(None if self.use_collectives else self.rank)
        return self.fs.exists(own) or self.fs.exists(self.fs.concat_path(self.path, RECORD_NAME))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.fs.mkdir(self.path)
        if self._metadata_exists():
            if not self.overwrite:
                raise CheckpointThere(
                    f"{self.path}: Checkpoint already exists and self.overwrite={self.overwrite}.",
                    hint="save to another place, or pass overwrite=True",
                )
            warnings.warn(f"{self.path} holds a checkpoint, which this save will replace", stacklevel=2)
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) if plan.storage_data is None else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        buckets = (
            _split_by_size_and_type(self.thread_count, plan.items)
            if self.single_file_per_rank
            else [[item] for item in plan.items]
        )
        files: queue.Queue[tuple[PathLike, str, list[Any]]] = queue.Queue()
        number = first_number(commit_target_for(self.fs, self.path, sync=self.sync_files))
        for bucket in filter(None, self._split_formats(buckets)):
            # A name that is taken belongs to a checkpoint that must stay whole until this one is.
            while True:
                name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
                path = self.fs.concat_path(self.path, name)
                number += 1
                if not self.fs.exists(path):
                    break
            files.put((path, name, bucket))
        self._written = [name for _, name, _ in files.queue]
        return self._write_data(planner, files)

    def _supersede_common(self) -> None:
        """Take away the metadata of all ranks together, once each rank has put its own in their place."""
        self._commit().supersede_common()

    def _discard_written(self) -> None:
        """Remove what this rank wrote last; for a save that failed on another rank, and was not committed."""
        self._commit().remove({name + suffix for name in self._written for suffix in ("", SUMS_SUFFIX)})

    def _split_formats(self, buckets: list[list[WriteItem]]) -> list[list[WriteItem]]:
        """Keep objects apart from tensors where tensors are to be in safetensors files."""
        if self.serialization_format == SerializationFormat.TORCH_SAVE:
            return buckets
        objects = [[item for item in bucket if item.type == WriteItemType.BYTE_IO] for bucket in buckets]
        tensors = [[item for item in bucket if item.type != WriteItemType.BYTE_IO] for bucket in buckets]
        return [*objects, *tensors]

    def _write_data(
        self, planner: SavePlanner, file_queue: queue.Queue[tuple[PathLike, str, list[Any]]]
    ) -> Future[list[WriteResult]]:
        """Write files, each given by its path, its name in the checkpoint, and its items."""
        plans = []
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()
            plans.append(FilePlan(path, name, items))
        written: Future[list[WriteResult]] = Future()
        written.set_result(write_plans(self, planner, plans))
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: dict[str, Sums] = {}
        places: dict[Any, Any] = {}
        for result in (each for of_rank in results for each in of_rank):
            places[result.index] = result.storage_data
            if isinstance(result.storage_data, _StorageInfo) and (of_file := result.storage_data.take_sums()):
                nbytes, block_nbytes, checksum = of_file
                sums[result.storage_data.relative_path] = Sums(
                    nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum
                )
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        set_sums(metadata, sums)
        rank = None if self.use_collectives else self.rank
        self._commit().publish(
            metadata_name(rank),
            encode_metadata(metadata),
            sums=sums,
            own=self._written,
            keep=data_files_of(metadata),
            began_s=self._began_s,
        )

    def _commit(self) -> Commit:
        return Commit(commit_target_for(self.fs, self.path, sync=self.sync_files))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _get_metadata_path(self, rank: int | None = None) -> PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    @property
    def checkpoint_id(self) -> PathLike:
        """Where the checkpoint goes."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return is_of_store(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)


class FileSystemWriter(_FileSystemWriter, BlockingAsyncStager):
    """
    Writes a checkpoint in torch's layout into a directory: a few data files a rank, and `.metadata`.

    Any torch reads it. Digests of the data files are kept beside them, which our reader checks.
    """

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: where the checkpoint goes: a directory, or a URL (`s3://`, `gs://`, `az://`, `file://`, or what fsspec
                opens).
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files survive a loss of power before the save ends.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            cache_staged_state_dict: keep the memory of staged states for the next save.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.

        """
        _FileSystemWriter.__init__(
            self,
            path=path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=thread_count,
            per_thread_copy_ahead=per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Return a copy of the state in host memory."""
        return super().stage(state_dict)


# `FileSystemReader`: a load from torch's layout or the native one, on any file system.
#
# Tensors are read in ranges, by several threads, straight into place; what has digests is checked. Nothing of a file
# is
# unpickled but what the allow-list of `protocol.pickled_metadata` and `torch.load(weights_only=True)` let through;
# objects go to the planner as bytes.


class FileSystemReader(StorageReader):
    """Reads a checkpoint that is a directory of files, or a place of a store."""

    def __init__(self, path: PathLike, _extension_registry: ExtensionRegistry | None = None) -> None:
        """
        Point to a checkpoint.

        Args:
            path: its directory, or the URL of its place: `s3://`, `gs://`, `az://`, `file://`, or what fsspec opens.
            _extension_registry: knows the extensions that items were written through.

        """
        super().__init__()
        self.fs: FileSystemBase
        self.fs, self.path = file_system_for(path)
        self.storage_data: dict[Any, Any] = {}
        self.load_id = str(uuid.uuid4())
        self.transforms = _StorageReaderTransforms(_extension_registry)
        self.rank: int | None = None
        self.use_collectives = True
        self._metadata: Metadata | None = None
        self._native: TorchView | None = None

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        return cast("IO[bytes]", _create_file_view(cast("io.IOBase", file), sinfo.offset, sinfo.length))

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.storage_data = {}
        if checkpoint_id:
            self.fs, self.path = file_system_at(self.fs, checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def _store(self) -> Store | StreamStore:
        return store_of(self.fs, self.path, foreign=True) or StreamStore(self.fs, self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = metadata_name(kwargs.get("rank"))
        store = self._store()
        try:
            if kwargs.get("rank") is None and not isinstance(store, StreamStore) and latest(store) == RECORD_NAME:
                raise BlobNotFound(f"{name}: a native checkpoint was saved here since", name=name)
            metadata = read_metadata(store, name, where=str(self.fs.concat_path(self.path, name)))
            self._native = None
        except BlobNotFound:
            if kwargs.get("rank") is not None or not is_native(store):
                raise
            self._native = TorchView.open(store, self.path)
            metadata = self._native.metadata()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return to_classes_of_caller(metadata)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if metadata.storage_data is None:
            raise BrokenProtocol(f"the metadata of {self.path} do not say where anything is (storage_data is None)")
        self.storage_data = metadata.storage_data
        self._metadata = metadata
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._native is not None:
            self._native.read(self.storage_data, plan, planner)
        else:
            read_plan(self._store(), self._metadata, self.storage_data, plan, planner, self.transforms)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _get_metadata_path(self, rank: int | None = None) -> PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    @property
    def checkpoint_id(self) -> PathLike:
        """Where the checkpoint is."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return is_of_store(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)


# Torch's layout on whatever fsspec opens: object stores, HTTP, memory. Object stores it has nothing for are ours.


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint in torch's layout to a place that fsspec opens."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        """
        Point to a place.

        Args:
            path: a URL, or a path.
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files of this machine survive a loss of power; others are durable when they are closed.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.
            kwargs: for the file system: credentials, endpoints.

        """
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.fs, self.path = _opened(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return FsspecFileSystem.validate_checkpoint_id(checkpoint_id) or is_of_store(checkpoint_id)


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from a place that fsspec opens."""

    def __init__(self, path: PathLike, **kwargs: Any) -> None:
        """
        Point to a checkpoint.

        Args:
            path: a URL, or a path.
            kwargs: for the file system: credentials, endpoints.

        """
        super().__init__(path)
        self.fs, self.path = _opened(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return FsspecFileSystem.validate_checkpoint_id(checkpoint_id) or is_of_store(checkpoint_id)


def _opened(path: PathLike, kwargs: dict[str, Any]) -> tuple[FileSystemBase, PathLike]:
    """
    Open a place with fsspec; where it has nothing for an object store that we have a store for, with that.

    What is said in `kwargs` is meant for fsspec, and would not be understood by another.
    """
    fs = FsspecFileSystem()
    try:
        return fs, fs.init_path(path, **kwargs)
    except (ImportError, ValueError, CheckpointError):
        if kwargs or not is_of_store(path):
            raise
    return file_system_for(path)
