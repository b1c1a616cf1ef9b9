"""
Hugging Face's files under torch's names: constants and helpers, the header of a save plan's items, and writing them.

The engine's file job writes the tensors straight from their memory. Files are durable on return; if anything fails, all of
them are removed. A tensor is resolved when its first bytes are written and released after its last ones, so tensors that
a planner makes for the save are never all alive.
"""

from __future__ import annotations

import io
import json
import math
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardkeep.conversion.pipeline import FileParts, file_parts
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.workers import Scattered
from shardkeep.engine.writer import Window, write_files
from shardkeep.errors import MalformedFile, UnsupportedLeaf
from shardkeep.format.boxes import Box
from shardkeep.format.data_file import MAX_HEADER_NBYTES
from shardkeep.format.dtypes import DTYPES, DType, Ints, of_torch
from shardkeep.layouts import safetensors
from shardkeep.layouts.native import chunk_name
from shardkeep.layouts.safetensors_publish import SaveNames
from shardkeep.layouts.torch_values import WriteItem
from shardkeep.storage.base import BlobWriter, Store
from shardkeep.storage.buffers import address_of, copy_memory, view_memory

_metadata_fn: str = safetensors.INDEX_NAME
_gen_file_name = safetensors.file_name

DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"

DTYPE_MAP: dict[str, torch.dtype] = {
    row.safetensors: getattr(torch, row.name)
    for row in DTYPES
    if row.safetensors is not None and hasattr(torch, row.name)
}
"""All dtypes that safetensors and the installed torch have; torch's own table lacks bool, fp8 and unsigned ones."""

HF_DCP_VERSION: float = 1.0
DCP_VERSION_KEY = "DCP_VERSION"
DCP_SHARDING_INFO_KEY = "DCP_SHARDING_INFO"

NUM_BYTES_FOR_HEADER_LEN = 8

SHARDED_DIR_NAME = "sharded"


@dataclass
class _HFStorageInfo:
    """The location of a chunk of a tensor."""

    relative_path: str
    """As in torch, the whole path of the file."""
    shape: torch.Size
    dtype: torch.dtype


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """Read the header from the beginning of a stream; return it and the bytes that it and its length take."""
    read = file_bytes.read
    length = read(NUM_BYTES_FOR_HEADER_LEN)
    if len(length) != NUM_BYTES_FOR_HEADER_LEN:
        raise MalformedFile(f"a safetensors file of {len(length)} bytes: not even the length of a header")
    nbytes: int = struct.unpack("<Q", length)[0]
    if nbytes > MAX_HEADER_NBYTES:
        raise MalformedFile(f"a header of {nbytes} bytes, more than the {MAX_HEADER_NBYTES} that safetensors allows")
    return json.loads(read(nbytes)), nbytes + NUM_BYTES_FOR_HEADER_LEN


def _get_dtype(dtype_str: str) -> torch.dtype:
    """Return the torch dtype for one of safetensors; the default dtype if torch has none."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Return the offsets of each tensor in its whole tensor, which a header of shards has; else None."""
    said = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {})
    return json.loads(said[safetensors.CUSTOM_METADATA_KEY]) if safetensors.CUSTOM_METADATA_KEY in said else None


# -- the layout of a file ----------------------------------------------------------------------------------------------


class ItemTensor(NamedTuple):
    """The tensor of an item, as it lies in a file."""

    item: WriteItem
    dtype: DType
    shape: Ints

    @property
    def key(self) -> str:
        """Its name."""
        return self.item.index.fqn

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def planned_tensor(item: WriteItem) -> ItemTensor:
    """Return the tensor that a plan says an item is."""
    if item.tensor_data is None:
        raise no_tensor(item)
    dtype = of_torch(item.tensor_data.properties.dtype, key=item.index.fqn)
    return ItemTensor(item, dtype, tuple(item.tensor_data.chunk.sizes))


def no_tensor(item: WriteItem) -> UnsupportedLeaf:
    """Return the error for an object in a format that holds only tensors."""
    return UnsupportedLeaf(
        f"{item.index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
        hint="leave it out of this save, or save it with FileSystemWriter",
        key=item.index.fqn,
    )


def aligned_order(tensors: Sequence[ItemTensor]) -> list[ItemTensor]:
    """Sort tensors so that each is aligned to its elements, without gaps between them."""
    return sorted(tensors, key=lambda tensor: -safetensors.alignment_of(tensor.nbytes))


def header_of(tensors: Sequence[ItemTensor], metadata: Mapping[str, str], *, where: str) -> bytes:
    """Make the header of a file with these tensors, in this order; `metadata` is added to what torch writes."""
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
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        safetensors.FORMAT_KEY: safetensors.FORMAT_VALUE,
        **metadata,
    }
    return safetensors.build_header(parts, said, where=where)


# -- writing -----------------------------------------------------------------------------------------------------------

Resolve = Callable[[WriteItem], object]


class _Unplanned(Exception):
    """A tensor is not what the plan says."""


def write_hf_files(
    store: Store,
    files: Mapping[str, Sequence[WriteItem]],
    resolve: Resolve,
    *,
    names: SaveNames,
    file_count: int | None,
    threads: int,
    window_nbytes: int,
) -> dict[int, int]:
    """Write the items of each file; return the bytes of each item, by identity. `file_count` is of all ranks' files."""
    metadata = {safetensors.SAVE_ID_KEY: names.save_id}
    if file_count is not None:
        metadata[safetensors.FILE_COUNT_KEY] = str(file_count)

    def write_as(measure: Callable[[WriteItem], ItemTensor]) -> dict[int, int]:
        laid = [(name, aligned_order(list(map(measure, items)))) for name, items in files.items()]
        made = [
            file_parts(names.written(name), [memoryview(header_of(tensors, metadata, where=name)), *tensors])
            for name, tensors in laid
        ]
        tensors = [tensor for _, of_file in laid for tensor in of_file]
        sink = _TensorSink(made, resolve)
        for tensor in tensors:
            if not tensor.nbytes:  # no window has bytes of it
                sink.check(tensor)
        jobs = [file.job for file in made]
        write_files(store, jobs, threads=threads, window_nbytes=window_nbytes, put=sink.put)
        return {id(tensor.item): tensor.nbytes for tensor in tensors}

    try:
        return write_as(planned_tensor)
    except _Unplanned:
        # The planner stores something else than it planned: resolve every tensor once to measure it.
        return write_as(lambda item: _checked(item, resolve(item))[1])


def _checked(item: WriteItem, tensor: object) -> tuple[torch.Tensor, ItemTensor]:
    """Return a tensor that a safetensors file can hold, and how it lies in the file."""
    if not isinstance(tensor, torch.Tensor):
        raise no_tensor(item)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedLeaf(
            f"{item.index.fqn!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: "
            "a safetensors file cannot hold it",
            key=item.index.fqn,
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor, ItemTensor(item, of_torch(tensor.dtype, key=item.index.fqn), tuple(tensor.shape))


@dataclass
class _Resolved:
    """A tensor that is being written."""

    tensor: torch.Tensor
    """Kept alive as long as its address is used."""
    address: int
    """Of its bytes in host memory; 0 where they are not one run there."""
    scattered: Scattered | None
    bytes_left: int


class _TensorSink:
    """Takes windows from tensors and writes them, without digests: safetensors files hold none."""

    def __init__(self, files: Sequence[FileParts], resolve: Resolve) -> None:
        self._parts = {file.job.name: file.parts for file in files}
        self._resolve = resolve
        self._lock = threading.Lock()  # a planner may not be used by several threads
        self._resolved: dict[int, _Resolved] = {}

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        """Write a window: from the memory of its tensor if it has one, else from a copy."""
        parts = self._parts[window.job.name]
        data = own[: window.nbytes]
        used: list[tuple[ItemTensor, int]] = []
        for row in window.rows:
            begin, part = int(window.job.start[row]), parts[row]
            low, high = max(begin, window.start), min(begin + part.nbytes, window.stop)
            into = data[low - window.start : high - window.start]
            if isinstance(part, memoryview):
                into[:] = part[low - begin : high - begin]
            elif isinstance(part, ItemTensor):
                source = self._take(part)
                used.append((part, high - low))
                if source.scattered is not None:
                    source.scattered.read(low - begin, high - begin, into)
                elif len(into) == window.nbytes:
                    data = view_memory(source.address + low - begin, window.nbytes)
                else:
                    copy_memory(address_of(into), source.address + low - begin, len(into))
        file.write_at(window.offset, data)
        with self._lock:
            for part, nbytes in used:
                found = self._resolved[id(part.item)]
                found.bytes_left -= nbytes
                if not found.bytes_left:
                    del self._resolved[id(part.item)]
        return b""

    def check(self, tensor: ItemTensor) -> torch.Tensor:
        """Resolve a tensor; `_Unplanned` is raised if it is not what the file was laid out for."""
        found, described = _checked(tensor.item, self._resolve(tensor.item))
        if described != tensor:
            raise _Unplanned
        return found

    def _take(self, part: ItemTensor) -> _Resolved:
        with self._lock:
            found = self._resolved.get(id(part.item))
            if found is None:
                tensor = self.check(part)
                address = host_address(tensor)
                source = None if address else scattered_memory(tensor, tensor.dtype)
                found = self._resolved[id(part.item)] = _Resolved(tensor, address, source, part.nbytes)
            return found
