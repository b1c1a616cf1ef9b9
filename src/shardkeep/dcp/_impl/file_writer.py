"""
`FileSystemWriter`: saves in torch's layout, on any file system or store.

Data files get names that no other file has. The metadata, which name them, are put in place last and in one step; only
then are the files of the replaced checkpoint removed. A save that fails or dies leaves the old checkpoint intact.

Saves in which nothing of the user's takes part go through the engine (`default_save`), all others as streams, item by
item.
"""

from __future__ import annotations

import dataclasses
import heapq
import io
import itertools
import json
import math
import os
import queue
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import compress
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.futures import Future

from shardkeep.codecs.stream_extensions import StreamTransformExtension, _StorageWriterTransforms
from shardkeep.dcp._impl.file_reader import completed, open_with_fsspec
from shardkeep.engine.stagers import BlockingAsyncStager
from shardkeep.engine.tensors import host_addresses, scattered_memory, windows_of
from shardkeep.engine.workers import WINDOW_NBYTES, Scattered, run_workers
from shardkeep.engine.writer import MOST_FILES, FileJob
from shardkeep.errors import BrokenProtocol, CheckpointExists, StateError, UnsupportedLeaf
from shardkeep.format.boxes import Box, IntArray, Ints
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.dtypes import DType, known_to_torch, of_torch
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.torch_zip import frame_tensor
from shardkeep.layouts import safetensors
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.native import chunk_name
from shardkeep.layouts.torch import SUMS_SUFFIX, Sums, encode_sums, metadata_name, with_sums
from shardkeep.layouts.torch_pickle import data_files_of, encode_metadata, set_sums
from shardkeep.layouts.torch_publish import Commit, commit_at
from shardkeep.state.leaves import synchronize_devices, wait_tensor
from shardkeep.storage import file_systems
from shardkeep.storage.buffers import address_of

_FILE_NBYTES = 256 << 20
"""A rank whose part is a multiple of this writes several files, if it may choose."""


# Items lie end to end, objects first, each tensor an archive as `torch.save` writes it. In a save by the engine, a file is
# laid out and goes through the write pipeline, straight from the tensors' memory. Otherwise items are written one after the
# other. Both compute the digests of blocks.

_ALIGNMENT = 64
_LARGE_NBYTES = 1 << 20
_LARGE_ALIGNMENT = 4096
"""Large tensors are read and written with direct I/O, in whole pages."""

Data = torch.Tensor | memoryview


class WrittenItem(NamedTuple):
    offset: int
    nbytes: int
    data_start: int | None = None
    """Where the bytes of a dense row-major tensor begin; None for anything else, and where it is not needed."""
    descriptors: Sequence[str] = ()


def plain_tensor(key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor whose memory can be written as it is; None for one that only torch can write."""
    tensor = wait_tensor(tensor.detach())
    if tensor.device.type == "meta":
        raise StateError(
            f"{key!r} is on the meta device: it has no values to save", hint="materialize it first", key=key
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.resolve_conj().resolve_neg() if tensor.dtype in known_to_torch() else None


def lay_out(
    name: str, items: Sequence[Data], *, framed: bool = True, together_nbytes: int = 0
) -> tuple[FileJob, list[WrittenItem]]:
    """Lay items out in a new file, and say where each lies; tensors are `framed` as archives of `torch.save`."""
    layout, where = place_items(items, framed=framed)
    placed = [WrittenItem(at, nbytes, None if begin < 0 else begin) for at, nbytes, begin in where.T.tolist()]
    return layout.job(name, items, together_nbytes), placed


class FileLayout(NamedTuple):
    """Where items lie in a file, and what stands between them: the same for all items of such types and sizes."""

    nbytes: int
    start: IntArray
    address: IntArray
    """Of what stands between the items; 0 for these."""
    between: memoryview
    rows: IntArray
    """Of each item, or -1 if it has no bytes."""
    is_tensor: npt.NDArray[np.bool_]
    """Of each item."""

    def job(self, name: str, items: Sequence[Data], together_nbytes: int) -> FileJob:
        """Return the file of some items; it and those beside it, of so many bytes together, have blocks of one size."""
        # Because many small blocks keep many threads waiting.
        held, found = self.rows >= 0, np.zeros(len(items), np.int64)
        tensors: Sequence[Any] = items if self.is_tensor.all() else [*compress(items, self.is_tensor.tolist())]
        found[self.is_tensor] = host_addresses(tensors)
        for at in np.flatnonzero(~self.is_tensor).tolist():
            found[at] = address_of(cast("memoryview", items[at]))
        address, scattered = self.address.copy(), dict[int, Scattered]()
        address[self.rows[held]] = found[held]
        for at in np.flatnonzero(held & (found == 0)).tolist():
            tensor = cast("torch.Tensor", items[at])
            scattered[int(self.rows[at])] = scattered_memory(tensor, tensor.dtype)
        return FileJob(
            name=name,
            header=bytearray(),
            data_nbytes=self.nbytes,
            block_nbytes=block_nbytes_for(max(self.nbytes, together_nbytes)),
            start=self.start,
            address=address,
            scattered=scattered,
            owners=[self.between, *(items if found.all() else compress(items, found.tolist()))],
        )


def place_items(items: Sequence[Data], *, framed: bool = True) -> tuple[FileLayout, IntArray]:
    """Lay items out, and say of each, in three rows: where it begins, its bytes, and where those of a tensor begin, or -1."""
    kinds = [(b"", 0, b"", False)]  # what is before the data, their bytes, what is behind them
    known: dict[Any, tuple[int, int]] = {}
    numbers, end = [0], 0
    for item in items:
        tensor = item if isinstance(item, torch.Tensor) else None
        key: Any = item.nbytes if tensor is None else (tensor.dtype, tensor.shape, end % _LARGE_ALIGNMENT)
        if (found := known.get(key)) is None:
            # Of what a frame depends on, so that there are few.
            alike = key if tensor is None else (*key[:2], end % _alignment(item.nbytes))
            if (found := known.get(alike)) is None:
                head, tail = _frame(tensor, end) if framed and tensor is not None else (b"", b"")
                found = known[alike] = len(kinds), len(head) + item.nbytes + len(tail)
                kinds.append((head, item.nbytes, tail, tensor is not None))
            known[key] = found
        numbers.append(found[0])
        end += found[1]
    kind = np.array([*numbers, 0], np.int64)
    # The end of one archive and the beginning of the next are one source, of which there are few.
    pairs, which = np.unique(kind[:-1] * len(kinds) + kind[1:], return_inverse=True)
    joints = [kinds[pair // len(kinds)][2] + kinds[pair % len(kinds)][0] for pair in pairs.tolist()]
    between, joint_nbytes = memoryview(b"".join(joints)), np.array([*map(len, joints)], np.int64)
    of_kind = np.array([(len(head), nbytes, len(tail), tensor) for head, nbytes, tail, tensor in kinds], np.int64)
    before, nbytes, behind, is_tensor = of_kind[kind[1:-1]].T
    sizes, address = np.zeros((2, len(which), 2), np.int64)
    sizes[:, 0] = joint_nbytes[which]
    address[:, 0] = (address_of(between) + np.cumsum(joint_nbytes) - joint_nbytes)[which]
    sizes[:-1, 1] = nbytes
    held, starts = sizes > 0, np.cumsum(sizes).reshape(sizes.shape) - sizes
    rows = np.where(held, np.cumsum(held).reshape(held.shape) - 1, -1)[:-1, 1]
    begin = starts[:-1, 1]
    layout = FileLayout(end, starts[held], address[held], between, rows, is_tensor > 0)
    return layout, np.stack([begin - before, before + nbytes + behind, np.where(is_tensor, begin, -1)])


def _frame(tensor: torch.Tensor, at: int) -> tuple[bytes, bytes]:
    """Return what comes before and after a tensor's bytes in its archive."""
    alignment = _alignment(tensor.nbytes)
    return _frame_at(tensor.dtype, tuple(tensor.shape), at % alignment, alignment)


def _alignment(nbytes: int) -> int:
    return _LARGE_ALIGNMENT if nbytes >= _LARGE_NBYTES else _ALIGNMENT


@lru_cache(maxsize=4096)
def _frame_at(dtype: torch.dtype, shape: Ints, at: int, alignment: int) -> tuple[bytes, bytes]:
    return frame_tensor(of_torch(dtype), shape, at=at, alignment=alignment)


class HashingStream:
    """A file that is written from beginning to end and hashed at the same time."""

    block_nbytes = 256 << 10
    """Bytes of the file per digest: its size is not known when its first block is hashed."""

    def __init__(self, raw: IO[bytes], at: int = 0) -> None:
        self._raw = raw
        self._hash = xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self.nbytes = at

    def write(self, data: Any) -> int:
        left = view = memoryview(data).cast("B")
        file_systems.write_all(self._raw, view)
        while left:
            part = left[: self.block_nbytes - self.nbytes % self.block_nbytes]
            left = left[len(part) :]
            self._hash.update(part)
            self.nbytes += len(part)
            if self.nbytes % self.block_nbytes == 0:
                self._digests.append(self._hash.digest())
                self._hash.reset()
        return len(view)

    def flush(self) -> None:
        self._raw.flush()

    def tell(self) -> int:
        return self.nbytes

    def digests(self) -> bytes:
        """Return the digests of all blocks, when everything is written."""
        last = [self._hash.digest()] if self.nbytes % self.block_nbytes else []
        return b"".join([*self._digests, *last])


def write_stream(
    out: HashingStream, items: Iterable[tuple[protocol.WriteItem, Data]], transforms: Any, *, framed: bool = True
) -> list[WrittenItem]:
    """Write items one after the other, through the extensions; each is taken from the iterable when it is written."""
    placed = []
    for planned, item in items:
        offset = out.nbytes
        stream, descriptors = transforms.transform_save_stream(planned, out)
        if isinstance(item, torch.Tensor):
            head, tail = _frame(item, offset) if framed else (b"", b"")
            stream.write(head)
            for part in windows_of(item, WINDOW_NBYTES):
                stream.write(part)
            stream.write(tail)
        else:
            stream.write(item)
        if stream is not out:
            stream.close()
        placed.append(WrittenItem(offset, out.nbytes - offset, None if framed else offset, list(descriptors)))
    return placed


def _is_object(item: protocol.WriteItem) -> bool:
    return item.type == protocol.WriteItemType.BYTE_IO


def _split_by_size_and_type(bins: int, items: list[protocol.WriteItem]) -> list[list[protocol.WriteItem]]:
    """Distribute items over files: objects in turn, then the largest tensor first to the smallest file."""
    return [[items[row] for row in bucket] for bucket in divide_rows(bins, list(map(protocol.chunk_nbytes, items)))]


def divide_rows(bins: int, sizes: Sequence[int | None]) -> list[list[int]]:
    """Distribute rows, given the bytes of each, over files, as `_split_by_size_and_type` does; an object has None."""
    if bins == 1:
        return [list(range(len(sizes)))]
    buckets: list[list[int]] = [[] for _ in range(bins)]
    for number, row in enumerate([row for row, size in enumerate(sizes) if size is None]):
        buckets[number % bins].append(row)
    tensors = [(size, row) for row, size in enumerate(sizes) if size is not None]
    loads = [(0, number) for number in range(bins)]
    for size, row in sorted(tensors, key=lambda each: -each[0]):
        load, number = loads[0]
        buckets[number].append(row)
        heapq.heapreplace(loads, (load + size, number))
    return buckets


class ItemTensor(NamedTuple):
    item: protocol.WriteItem
    dtype: DType
    shape: Ints

    @property
    def key(self) -> str:
        return self.item.index.fqn

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def planned_tensor(item: protocol.WriteItem) -> ItemTensor:
    if item.tensor_data is None:
        raise not_dense(item)
    dtype = of_torch(item.tensor_data.properties.dtype, key=item.index.fqn)
    return ItemTensor(item, dtype, tuple(item.tensor_data.chunk.sizes))


class FilePlan(NamedTuple):
    path: file_systems.PathLike
    name: str
    items: list[protocol.WriteItem]
    tensors: Sequence[ItemTensor] | None = None
    """The tensors of a safetensors file; None if each item is an archive."""
    header: bytes = b""
    """Of a safetensors file."""


def safetensors_plan(
    plan: FilePlan, metadata: Mapping[str, str], measure: Callable[[protocol.WriteItem], ItemTensor]
) -> FilePlan:
    """Order the tensors of a file, and make its header; `metadata` is added to what torch writes."""
    # In this order each tensor is aligned to its elements, without gaps between them.
    tensors = sorted(map(measure, plan.items), key=lambda tensor: -safetensors.alignment_of(tensor.nbytes))
    count = Counter(tensor.key for tensor in tensors)
    parts: dict[str, tuple[DType, Ints]] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for tensor in tensors:
        data = tensor.item.tensor_data
        begin = tuple(data.chunk.offsets) if data is not None else ()
        # Several shards of one tensor in one file are distinguished by where they begin.
        name = tensor.key if count[tensor.key] == 1 else chunk_name(tensor.key, Box(begin, tensor.shape))
        parts[name] = tensor.dtype, tensor.shape
        offsets[name] = {safetensors.SAVED_OFFSETS_KEY: list(begin)}
    said = {
        safetensors.CUSTOM_METADATA_KEY: json.dumps(offsets),
        safetensors.DCP_VERSION_KEY: str(safetensors.HF_DCP_VERSION),
        safetensors.FORMAT_KEY: safetensors.FORMAT_VALUE,
        **metadata,
    }
    header = safetensors.build_model_header(parts, said, where=plan.name)
    return plan._replace(items=[tensor.item for tensor in tensors], tensors=tensors, header=header)


def measured_tensor(planner: protocol.SavePlanner, item: protocol.WriteItem) -> ItemTensor:
    data = resolve(planner, item)
    if not isinstance(data, torch.Tensor):
        raise not_dense(item)
    return ItemTensor(item, of_torch(data.dtype, key=item.index.fqn), tuple(data.shape))


def resolve_planned(plan: FilePlan, planner: protocol.SavePlanner) -> Iterator[Data]:
    """Return the data of each item; a tensor of a safetensors file must be what the header says."""
    for number, item in enumerate(plan.items):
        data = resolve(planner, item)
        if plan.tensors is not None:
            held = (of_torch(data.dtype), tuple(data.shape)) if isinstance(data, torch.Tensor) else None
            if held != (plan.tensors[number].dtype, plan.tensors[number].shape):
                raise not_dense(item)
        yield data


def resolve(planner: protocol.SavePlanner, item: protocol.WriteItem) -> Data:
    """Return the data of an item: a tensor whose memory can be written as it is, or bytes."""
    data = planner.resolve_data(item)
    key = item.index.fqn
    if item.type == protocol.WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise BrokenProtocol(f"{key!r} is planned as bytes, but the planner returned a {type(data).__name__}")
        return memoryview(data.getvalue())  # a copy, because the planner may reuse the stream
    if not isinstance(data, torch.Tensor):
        raise BrokenProtocol(f"{key!r} is planned as a tensor, but the planner returned a {type(data).__name__}")
    return plain_or_saved(key, data)


def plain_or_saved(key: str, data: torch.Tensor) -> Data:
    """Return a tensor whose memory can be written as it is, or else the archive that torch makes of it."""
    plain = plain_tensor(key, data)
    if plain is not None:
        return plain
    archive = io.BytesIO()
    # Cloned, because it would be saved with all of the memory that it is a view of.
    torch.save(data.detach().cpu().clone(), archive)
    return archive.getbuffer()


def not_dense(item: protocol.WriteItem) -> UnsupportedLeaf:
    """Return the error for a tensor that is not what the header of its safetensors file says."""
    return UnsupportedLeaf(
        f"{item.index.fqn!r} is not the dense tensor that was planned: a safetensors file cannot hold it",
        hint="write TORCH_SAVE files, or leave it out",
        key=item.index.fqn,
    )


def written_result(item: protocol.WriteItem, written: WrittenItem, file: str) -> protocol.WriteResult:
    info = protocol._StorageInfo(file, written.offset, written.nbytes, written.descriptors or None)
    info.shardkeep_data_start = written.data_start
    return protocol.WriteResult(index=item.index, size_in_bytes=written.nbytes, storage_data=info)


def _write_item(
    transforms: Any,
    stream: io.IOBase,
    data: io.BytesIO | torch.Tensor,
    write_item: protocol.WriteItem,
    storage_key: str,
    serialization_format: protocol.SerializationFormat,
) -> protocol.WriteResult:
    """Write one item to a stream; for writers of users, which write their files themselves."""
    if serialization_format != protocol.SerializationFormat.TORCH_SAVE and isinstance(data, torch.Tensor):
        raise StateError(f"{write_item.index.fqn!r}: a safetensors file is not written item by item")
    item = data.getbuffer() if isinstance(data, io.BytesIO) else plain_or_saved(write_item.index.fqn, data)
    out = HashingStream(cast("IO[bytes]", stream), at=stream.tell())
    [written] = write_stream(out, [(write_item, item)], transforms)
    return written_result(write_item, written, storage_key)


def write_streams(
    writer: _FileSystemWriter, planner: protocol.SavePlanner, plans: list[FilePlan]
) -> list[protocol.WriteResult]:
    """Write files as streams; if one of them fails, all are removed."""
    results: dict[str, list[protocol.WriteResult]] = {}

    def write(plan: FilePlan, _: memoryview) -> bool:
        results[plan.name] = _write_file(writer, planner, plan)
        return True

    try:
        run_workers(plans, write, threads=max(1, min(writer.thread_count, len(plans))), buffer_nbytes=0)
    except BaseException:
        writer._commit().remove(with_sums(plan.name for plan in plans))
        raise
    return [result for plan in plans for result in results[plan.name]]


def _write_file(writer: _FileSystemWriter, planner: protocol.SavePlanner, plan: FilePlan) -> list[protocol.WriteResult]:
    def resolved() -> Iterator[tuple[protocol.WriteItem, Data]]:
        for item, data in zip(plan.items, resolve_planned(plan, planner), strict=True):
            synchronize_devices([data] if isinstance(data, torch.Tensor) else [])
            yield item, data

    with writer.fs.create_stream(plan.path, "wb") as raw:
        out = HashingStream(raw)  # type: ignore[arg-type]  # opened for writing
        out.write(plan.header)
        written = write_stream(out, resolved(), writer.transforms, framed=plan.tensors is None)
        file_systems.sync_stream(raw, sync=writer.sync_files)
    results = [written_result(*each, plan.name) for each in zip(plan.items, written, strict=True)]
    if writer.writes_sums:
        sums, data = encode_sums(out.nbytes, out.block_nbytes, out.digests())
        with writer.fs.create_stream(f"{os.fspath(plan.path)}{SUMS_SUFFIX}", "wb") as raw:
            file_systems.write_all(raw, data)
            file_systems.sync_stream(raw, sync=writer.sync_files)
        results[0].storage_data.shardkeep_sums = tuple(sums)
    return results


class CheckpointThere(CheckpointExists, RuntimeError):
    """There is a checkpoint, and the writer may not replace it."""


def _generate_uuid() -> str:
    return str(uuid.uuid4())


class _FileSystemWriter(file_systems.CheckpointPlace, protocol.StorageWriter):
    """Writes items into a few files per rank. See `FileSystemWriter` for the arguments."""

    writes_sums = True
    """Whether the digests of a data file are put beside it."""

    def __init__(
        self,
        path: file_systems.PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: protocol.SerializationFormat = protocol.SerializationFormat.TORCH_SAVE,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.fs, self.path = file_systems.file_system_for(path)
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.save_id = _generate_uuid()
        self.overwrite = overwrite
        self._extensions = _extensions
        self.serialization_format = serialization_format
        self.rank: int | None = None
        self.use_collectives = True
        self._began_s = time.time()
        self._written: list[str] = []
        self._splits_files = False
        """Whether to write several files at a time, as `sk.save` does: a writer that the user made has `thread_count`."""

    def reset(self, checkpoint_id: file_systems.PathLike | None = None) -> None:
        if checkpoint_id:
            self.fs, self.path = file_systems.file_system_at(self.fs, checkpoint_id)
        self.save_id = _generate_uuid()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._began_s = time.time()
        self._written = []  # the files of the previous save must not be discarded with this one

    def _get_metadata_path(self, rank: int | None = None) -> file_systems.PathLike:
        return self.fs.concat_path(self.path, metadata_name(rank))

    def _alone_s(self, metadata: protocol.Metadata) -> float:
        return 0.0

    def _metadata_exists(self) -> bool:
        # If each rank writes its own metadata, other ranks may have written theirs in this very save.
        own = self._get_metadata_path(None if self.use_collectives else self.rank)
        return self.fs.exists(own) or self.fs.exists(self.fs.concat_path(self.path, RECORD_NAME))

    def prepare_local_plan(self, plan: protocol.SavePlan) -> protocol.SavePlan:
        self.fs.mkdir(self.path)
        if self._metadata_exists():
            if not self.overwrite:
                raise CheckpointThere(
                    f"{self.path}: Checkpoint already exists and self.overwrite={self.overwrite}.",
                    hint="save to another place, or pass overwrite=True",
                )
            warnings.warn(f"{self.path} holds a checkpoint, which this save will replace", stacklevel=2)
        if self.rank is not None and not self.use_collectives:
            return dataclasses.replace(plan, storage_data=protocol._StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        return [
            dataclasses.replace(plan, storage_data=protocol._StoragePrefix(f"__{rank}_"))
            if plan.storage_data is None
            else plan
            for rank, plan in enumerate(plans)
        ]

    def _settle_plans(self, plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
        """Complete the plans that `prepare_global_plan`, which a subclass may override, returned."""
        return plans

    def write_data(self, plan: protocol.SavePlan, planner: protocol.SavePlanner) -> Future[list[protocol.WriteResult]]:
        buckets = [
            [plan.items[row] for row in rows] for rows in self.divide(list(map(protocol.chunk_nbytes, plan.items)))
        ]
        queued: queue.Queue[tuple[file_systems.PathLike, str, list[Any]]] = queue.Queue()
        if self.serialization_format != protocol.SerializationFormat.TORCH_SAVE:
            # Objects do not go to safetensors files.
            objects = [list(filter(_is_object, bucket)) for bucket in buckets]
            buckets = [*objects, *([item for item in bucket if not _is_object(item)] for bucket in buckets)]
        buckets = list(filter(None, buckets))
        for name, bucket in zip(self.new_names(plan.storage_data.prefix, len(buckets)), buckets, strict=True):
            queued.put((self.fs.concat_path(self.path, name), name, bucket))
        self._written = [name for _, name, _ in queued.queue]
        return self._write_data(planner, queued)

    def divide(self, sizes: Sequence[int | None]) -> list[list[int]]:
        """Distribute items, given the bytes of each, or None for an object, over files."""
        if not self.single_file_per_rank:
            return [[row] for row in range(len(sizes))]
        files = self.thread_count
        if self._splits_files:
            files = max(1, min(MOST_FILES, sum(size or 0 for size in sizes) // _FILE_NBYTES))
        return divide_rows(files, sizes)

    def new_names(self, prefix: str, count: int) -> list[str]:
        """Return names for data files: an existing file belongs to a checkpoint that stays until this save is committed."""
        numbers = itertools.count(self._commit().first_number())
        names = (f"{prefix}{number}{protocol.DEFAULT_SUFFIX}" for number in numbers)
        new = (name for name in names if not self.fs.exists(self.fs.concat_path(self.path, name)))
        return list(itertools.islice(new, count))

    @property
    def writes_archives_unchanged(self) -> bool:
        """Whether tensors are written as `torch.save` does, and no extension transforms them."""
        unchanged = "transforms" not in vars(self) and not self._extensions
        return unchanged and self.serialization_format == protocol.SerializationFormat.TORCH_SAVE

    @cached_property
    def transforms(self) -> Any:
        """Applies the extensions to the items."""
        return _StorageWriterTransforms(self._extensions)

    def _discard_written(self) -> None:
        """Remove what this rank wrote, because the save failed on another rank and was not committed."""
        self._commit().remove(with_sums(self._written))

    def _write_data(
        self, planner: protocol.SavePlanner, file_queue: queue.Queue[tuple[file_systems.PathLike, str, list[Any]]]
    ) -> Future[list[protocol.WriteResult]]:
        """Write files, each given by its path, its name in the checkpoint, and its items."""
        plans = []
        while not file_queue.empty():
            path, name, items = file_queue.get_nowait()
            plans.append(FilePlan(path, name, sorted(items, key=_is_object, reverse=True)))
        if self.serialization_format == protocol.SerializationFormat.SAFETENSORS:
            if self.transforms.extensions:
                raise StateError("extensions cannot be applied to safetensors files", hint="write TORCH_SAVE files")
            plans = [
                plan if any(map(_is_object, plan.items)) else safetensors_plan(plan, {}, planned_tensor)
                for plan in plans
            ]
        return completed(write_streams(self, planner, plans))

    def finish(self, metadata: protocol.Metadata, results: list[list[protocol.WriteResult]]) -> None:
        sums: dict[str, Sums] = {}
        places: dict[Any, Any] = {}
        for result in (each for of_rank in results for each in of_rank):
            places[result.index] = place = result.storage_data
            if isinstance(place, protocol._StorageInfo) and place.shardkeep_sums:
                sums[place.relative_path] = Sums(*place.shardkeep_sums)
                place.shardkeep_sums = None
        metadata.version = protocol.CURRENT_DCP_VERSION
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        set_sums(metadata, sums)
        self._commit().publish(
            metadata_name(None if self.use_collectives else self.rank),
            encode_metadata(metadata),
            sums=sums,
            own=self._written,
            keep=data_files_of(metadata),
            began_s=self._began_s,
        )

    def _commit(self) -> Commit:
        return commit_at(self.fs, self.path, sync=self.sync_files)

    def storage_meta(self) -> protocol.StorageMeta | None:
        return protocol.StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)


class FileSystemWriter(_FileSystemWriter, BlockingAsyncStager):
    """Writes a checkpoint that torch can read into a directory: a few data files per rank, digests, and `.metadata`."""

    def __init__(
        self,
        path: file_systems.PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: protocol.SerializationFormat = protocol.SerializationFormat.TORCH_SAVE,
    ) -> None:
        """
        Set where and how to write.

        Args:
            path: a directory, or a URL (`s3://`, `gs://`, `az://`, `file://`, or any URL that fsspec opens).
            single_file_per_rank: one file per rank and thread, instead of one per tensor or object.
            sync_files: make files durable before the save ends.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: each thread copies one window ahead of its writes.
            cache_staged_state_dict: keep the memory of staged states for the next save.
            overwrite: replace an existing checkpoint; otherwise it is an error.
            _extensions: transform what is written; the first one is nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.

        """
        files = (single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead, overwrite)
        _FileSystemWriter.__init__(self, path, *files, _extensions, serialization_format)
        self.cache_staged_state_dict = cache_staged_state_dict  # the only attribute of a stager that is not a default


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint in torch's layout to any URL that fsspec opens."""

    _file_system = file_systems.FsspecFileSystem

    def __init__(
        self,
        path: file_systems.PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: protocol.SerializationFormat = protocol.SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        """Set where and how to write, as `FileSystemWriter`; `kwargs` are for the file system: credentials, endpoints."""
        files = (single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead)
        super().__init__(path, *files, False, overwrite, _extensions, serialization_format)
        self.fs, self.path = open_with_fsspec(path, kwargs)
