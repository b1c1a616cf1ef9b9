"""
What torch calls the parts of Hugging Face's files, and its helpers that read them from a stream.
"""

from __future__ import annotations

import io
import json
import math
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.engine.memory import Scattered, copy_memory, view_memory
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.workers import run_workers
from shardkeep.engine.writer import remove_blob
from shardkeep.errors import MalformedFile, StateError, UnsupportedLeaf
from shardkeep.format.boxes import Box
from shardkeep.format.data_file import MAX_HEADER_NBYTES
from shardkeep.format.dtypes import DTYPES, DType, Ints, of_torch
from shardkeep.layouts.native import chunk_name
from shardkeep.layouts.safetensors import (
    CUSTOM_METADATA_KEY,
    FILE_COUNT_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    INDEX_NAME,
    SAVE_ID_KEY,
    SAVED_OFFSETS_KEY,
    alignment_of,
    build_header,
    file_name,
)
from shardkeep.layouts.safetensors_publish import SaveNames
from shardkeep.layouts.torch_values import WriteItem
from shardkeep.storage.base import Store
from shardkeep.storage.buffers import address_of

_metadata_fn: str = INDEX_NAME
_gen_file_name = file_name

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
"""Every type that safetensors and the installed torch have; torch's own table lacks bool, fp8 and the unsigned ones."""

HF_DCP_VERSION: float = 1.0
DCP_VERSION_KEY = "DCP_VERSION"
DCP_SHARDING_INFO_KEY = "DCP_SHARDING_INFO"

NUM_BYTES_FOR_HEADER_LEN = 8

SHARDED_DIR_NAME = "sharded"


@dataclass
class _HFStorageInfo:
    """Where a chunk of a tensor lies."""

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
    """Return torch's type for one of safetensors; the default type for one that torch does not have."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Return what a header says about shards: the offsets of each tensor in its whole; None if nothing."""
    said = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {})
    return json.loads(said[CUSTOM_METADATA_KEY]) if CUSTOM_METADATA_KEY in said else None


# A data file of torch's layout that is a safetensors file: which order its tensors have, and its header.


def aligned_order(items: Sequence[WriteItem]) -> list[WriteItem]:
    """Sort tensors so that each is aligned to its elements, without gaps between them."""
    return sorted(items, key=lambda item: -alignment_of(_tensor_nbytes(*_planned_tensor(item))))


def header_of(items: Sequence[WriteItem], *, where: str) -> bytes:
    """Make the header of a file with these tensors, in this order."""
    count = Counter(item.index.fqn for item in items)
    parts: dict[str, tuple[DType, Ints]] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for item in items:
        data = item.tensor_data
        begin = tuple(data.chunk.offsets) if data is not None else ()
        key, part = item.index.fqn, _planned_tensor(item)
        # Of two shards of one tensor in one file, only the place tells which is which.
        name = key if count[key] == 1 else chunk_name(key, Box(begin, part[1]))
        parts[name] = part
        offsets[name] = {SAVED_OFFSETS_KEY: list(begin)}
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
    return build_header(parts, metadata, where=where)


def _planned_tensor(item: WriteItem) -> tuple[DType, Ints]:
    if item.tensor_data is None:
        raise StateError(f"{item.index.fqn!r} is no tensor", key=item.index.fqn)
    return of_torch(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)


def _tensor_nbytes(dtype: DType, shape: Ints) -> int:
    return math.prod(shape) * dtype.itemsize


# A safetensors file that is being written, in parts, from any thread.


class NewFile:
    """
    A file of known size. Whoever writes the last part of its data makes it durable.

    It is removed if `undo` is closed, whether it was complete or not.
    """

    def __init__(self, store: Store, name: str, header: bytes, data_nbytes: int, undo: ExitStack) -> None:
        self._header_nbytes = len(header)
        self._writer = store.create(name, len(header) + data_nbytes)
        undo.callback(remove_blob, store, name, self._writer)
        self._writer.write_at(0, memoryview(header))  # first: many stores take bytes in order only
        self._lock = threading.Lock()
        self._bytes_left = data_nbytes

    def write(self, start: int, data: memoryview) -> None:
        """Write a part of the data; of a file without data, the empty part, once."""
        if data:
            self._writer.write_at(self._header_nbytes + start, data)
        with self._lock:
            self._bytes_left -= len(data)
            last = not self._bytes_left
        if last:
            self._writer.finish()


# Tensors written to safetensors files, straight from their memory, on several threads.
#
# Files are written beside what is there and are durable on return; if anything fails, all of them are removed.
# A tensor is asked for when its turn comes and let go when it is written, so that tensors made for the purpose are
# never
# all alive. Tensors are laid in an order that aligns each to the largest power of two that divides its size.

Resolve = Callable[[WriteItem], torch.Tensor]


@dataclass(frozen=True)
class FileToWrite:
    """A file and what goes into it."""

    name: str
    items: list[WriteItem]
    """Of different tensors."""


class _Unplanned(Exception):
    """A tensor is not of the size that the plan says."""


@dataclass
class _Layout:
    name: str
    header: bytes
    items: list[WriteItem]
    parts: list[tuple[DType, Ints]]
    starts: list[int]
    data_nbytes: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some bytes of a tensor, and where they go in the data of a file."""

    at: int
    nbytes: int
    address: int
    scattered: Scattered | None
    first: int
    """Where the bytes begin in the tensor."""
    owner: torch.Tensor
    """Kept alive until they are written."""


def write_hf_files(
    store: Store,
    files: Sequence[FileToWrite],
    resolve: Resolve,
    *,
    names: SaveNames,
    file_count: int | None,
    threads: int,
    window_nbytes: int,
) -> dict[int, int]:
    """
    Write files whole and durable, under the names they are written under; return the bytes of each item, by its identity.

    Args:
        store: where they go.
        files: what is written.
        resolve: gives the tensor of an item.
        names: under which names they are written, and the save they are of.
        file_count: how many files this save has, of all ranks; None if that is not known.
        threads: how many to use.
        window_nbytes: memory that each may use.

    Raises:
        UnsupportedLeaf: an item is no tensor that a safetensors file can hold.

    """

    def lay_out(measure: Callable[[WriteItem], tuple[DType, Ints]]) -> list[_Layout]:
        return [_lay_out(file, measure, save_id=names.save_id, file_count=file_count) for file in files]

    layouts = lay_out(_measured_by_plan)
    try:
        _write(store, layouts, resolve, names=names, threads=threads, window_nbytes=window_nbytes)
    except _Unplanned:
        # A planner that stores something else than what it planned: its tensors must be made once to be measured.
        layouts = lay_out(lambda item: _described(item, _checked(item, resolve(item))))
        _write(store, layouts, resolve, names=names, threads=threads, window_nbytes=window_nbytes)
    return {
        id(item): _nbytes(part) for layout in layouts for item, part in zip(layout.items, layout.parts, strict=True)
    }


# -- what goes where ---------------------------------------------------------------------------------------------------


def _measured_by_plan(item: WriteItem) -> tuple[DType, Ints]:
    if item.tensor_data is None:
        raise no_tensor(item)
    return _dtype(item, item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)


def _dtype(item: WriteItem, dtype: torch.dtype) -> DType:
    try:
        return of_torch(dtype)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{item.index.fqn!r}: {error.message}", hint=error.hint, key=item.index.fqn) from None


def no_tensor(item: WriteItem) -> UnsupportedLeaf:
    """Return the error for an object in a format of tensors."""
    return UnsupportedLeaf(
        f"{item.index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
        hint="leave it out of this save, or save it with FileSystemWriter",
        key=item.index.fqn,
    )


def _described(item: WriteItem, tensor: torch.Tensor) -> tuple[DType, Ints]:
    return _dtype(item, tensor.dtype), tuple(tensor.shape)


def _checked(item: WriteItem, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise no_tensor(item)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedLeaf(
            f"{item.index.fqn!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: "
            "a safetensors file cannot hold it",
            key=item.index.fqn,
        )
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _nbytes(part: tuple[DType, Ints]) -> int:
    dtype, shape = part
    return math.prod(shape) * dtype.itemsize


def _lay_out(
    file: FileToWrite, measure: Callable[[WriteItem], tuple[DType, Ints]], *, save_id: str, file_count: int | None
) -> _Layout:
    measured = [(item, measure(item)) for item in file.items]
    measured.sort(key=lambda entry: -alignment_of(_nbytes(entry[1])))
    parts = [part for _, part in measured]
    offsets = {
        item.index.fqn: {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets) if item.tensor_data else []}
        for item, _ in measured
    }
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
        SAVE_ID_KEY: save_id,
    }
    if file_count is not None:
        metadata[FILE_COUNT_KEY] = str(file_count)
    header = build_header({item.index.fqn: part for item, part in measured}, metadata, where=file.name)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + _nbytes(part))
    return _Layout(file.name, header, [item for item, _ in measured], parts, starts[:-1], starts[-1])


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(
    store: Store, layouts: Sequence[_Layout], resolve: Resolve, *, names: SaveNames, threads: int, window_nbytes: int
) -> None:
    with ExitStack() as undo:

        def work(task: tuple[NewFile, list[_Piece]], buffer: memoryview) -> bool:
            file, pieces = task
            file.write(pieces[0].at if pieces else 0, _gathered(pieces, buffer))
            return True

        tasks = _tasks(store, layouts, resolve, names, window_nbytes, undo)
        run_workers(tasks, work, threads=threads, buffer_nbytes=window_nbytes)
        undo.pop_all()


def _tasks(
    store: Store,
    layouts: Sequence[_Layout],
    resolve: Resolve,
    names: SaveNames,
    window_nbytes: int,
    undo: ExitStack,
) -> Iterator[tuple[NewFile, list[_Piece]]]:
    """Open the files, one after the other, and cut what goes into them into windows."""
    for layout in layouts:
        file = NewFile(store, names.written(layout.name), layout.header, layout.data_nbytes, undo)
        if not layout.data_nbytes:
            yield file, []
        together: list[_Piece] = []
        room = window_nbytes
        for piece in _pieces(layout, resolve, window_nbytes):
            if piece.nbytes > room or (together and piece.nbytes == window_nbytes):
                yield file, together
                together, room = [], window_nbytes
            together.append(piece)
            room -= piece.nbytes
        if together:
            yield file, together


def _pieces(layout: _Layout, resolve: Resolve, window_nbytes: int) -> Iterator[_Piece]:
    for item, part, start in zip(layout.items, layout.parts, layout.starts, strict=True):
        tensor = _checked(item, resolve(item))
        if _described(item, tensor) != part:
            raise _Unplanned
        address = host_address(tensor)
        source = None if address else scattered_memory(tensor, tensor.dtype)
        nbytes = _nbytes(part)
        for first in range(0, nbytes, window_nbytes):
            size = min(window_nbytes, nbytes - first)
            yield _Piece(start + first, size, address and address + first, source, first, tensor)


def _gathered(pieces: Sequence[_Piece], buffer: memoryview) -> memoryview:
    """Return pieces that follow each other as one run of bytes: the tensor's own memory, if it is one."""
    if len(pieces) == 1 and pieces[0].address:
        return view_memory(pieces[0].address, pieces[0].nbytes)
    window = buffer[: sum(piece.nbytes for piece in pieces)]
    for piece in pieces:
        low = piece.at - pieces[0].at
        if piece.address:
            copy_memory(address_of(window) + low, piece.address, piece.nbytes)
        elif piece.scattered is not None:
            piece.scattered.read(piece.first, piece.first + piece.nbytes, window[low : low + piece.nbytes])
    return window
