"""
Tensors written to safetensors files, straight from their memory, on several threads.

Files are written beside what is there and are durable on return; if anything fails, all of them are removed.
A tensor is asked for when its turn comes and let go when it is written, so that tensors made for the purpose are never
all alive. Tensors are laid in an order that aligns each to the largest power of two that divides its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.dtypes import DType, Ints, of_torch
from shardkeep.layout.safetensors_files import alignment_of, build_header
from shardkeep.layout.safetensors_names import (
    CUSTOM_METADATA_KEY,
    FILE_COUNT_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    SAVE_ID_KEY,
    SAVED_OFFSETS_KEY,
)
from shardkeep.layout.safetensors_publish import Names
from shardkeep.protocol.plans import WriteItem
from shardkeep.run.workers import run_workers
from shardkeep.stage.memory import Scattered, copy_memory, view_memory
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.storages.hugging_face_names import DCP_VERSION_KEY, HF_DCP_VERSION
from shardkeep.storages.safetensors_output import NewFile
from shardkeep.store.aligned import address_of
from shardkeep.store.protocol import Store

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


def write_files(
    store: Store,
    files: Sequence[FileToWrite],
    resolve: Resolve,
    *,
    names: Names,
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

    layouts = lay_out(_planned)
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


def _planned(item: WriteItem) -> tuple[DType, Ints]:
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
    store: Store, layouts: Sequence[_Layout], resolve: Resolve, *, names: Names, threads: int, window_nbytes: int
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
    names: Names,
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
        source = None if address else scattered(tensor, tensor.dtype)
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
