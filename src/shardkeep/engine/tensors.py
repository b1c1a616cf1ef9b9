"""
Tensors as memory: where their bytes are, how to copy a part of them, and which tensors share memory.

A tensor that is contiguous on the CPU is an address. Any other is copied in parts, so that at most one window of it is
in host memory at a time: by ranges of bytes if it is contiguous on an accelerator, else box by box.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shardkeep.engine.workers import Scattered
from shardkeep.format.boxes import (
    Box,
    Ints,
    Stripes,
    contiguous_run,
    cut_stripes,
    flat_range_to_boxes,
    slices,
    strides_of,
    stripes,
)
from shardkeep.state.describe import Description
from shardkeep.state.leaves import TENSORS_IN_CACHE, overlaps_itself
from shardkeep.storage.buffers import address_of, view_memory

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types of each element size that both torch and numpy have: bytes are copied as these, whatever they mean."""


def raw_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the integers of the size of its elements, which every device can copy."""
    return _RAW[tensor.element_size()]


def as_raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(raw_dtype(tensor))


def host_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor that is contiguous in host memory, else 0."""
    return tensor.data_ptr() if tensor.is_cpu and tensor.is_contiguous() else 0


def host_addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    found: list[int] = []
    for at in range(0, len(tensors), TENSORS_IN_CACHE):
        some = tensors[at : at + TENSORS_IN_CACHE]
        plain = all(map(_ON_CPU, some)) and all(map(torch.Tensor.is_contiguous, some))
        found += map(torch.Tensor.data_ptr if plain else host_address, some)
    return found


_ON_CPU = attrgetter("is_cpu")


class _Matrix(NamedTuple):
    """A box of host memory whose rows are the stripes of a stored chunk."""

    stripes: Stripes
    start: int
    """Where the first stripe begins in the chunk, in bytes."""
    rows: npt.NDArray[np.generic]


class HostScattered(Scattered):
    """A strided tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array: npt.NDArray[np.generic] = as_raw(tensor).numpy()
        self.nbytes = tensor.nbytes
        self._matrices: dict[tuple[Ints, Box, Box], _Matrix | None] = {}

    def read(self, start: int, stop: int, into: memoryview, *, queued: bool = False) -> None:  # noqa: ARG002
        array = self._array
        size = array.itemsize
        flat = np.frombuffer(into, array.dtype)
        at = 0
        for box in flat_range_to_boxes(array.shape, start // size, stop // size):
            np.copyto(flat[at : at + box.volume].reshape(box.sizes), array[slices(box)])
            at += box.volume

    def write(self, box: Box, data: memoryview, shape: Ints, part: Box) -> None:
        source = np.frombuffer(data, self._array.dtype).reshape(shape)
        self._array[slices(box)] = source[slices(part)]

    def write_chunk(self, shape: Ints, source: Box, target: Box, data: memoryview, at: int) -> bool:
        key = (shape, source, target)
        if key not in self._matrices:  # a chunk comes in many windows
            self._matrices[key] = self._matrix(shape, source, target)
        matrix = self._matrices[key]
        size, dtype = self._array.itemsize, self._array.dtype
        if matrix is None or at % size or len(data) % size:
            return False
        step = matrix.stripes.steps[0] * size
        low = at - matrix.start
        for first, last, head, tail in cut_stripes(matrix.stripes, low // size, (low + len(data)) // size):
            shape = (last - first, tail - head)
            start = first * step + head * size - low
            matrix.rows[first:last, head:tail] = np.ndarray(shape, dtype, data, start, (step, size))
        return True

    def _matrix(self, shape: Ints, source: Box, target: Box) -> _Matrix | None:
        index: tuple[Any, ...] = (*slices(target), ...)  # without the ellipsis, a tensor of no axes would give a copy
        array, strides = self._array[index], strides_of(shape)
        size = array.itemsize
        if array.shape != source.sizes:  # `as_strided` below needs all of it
            return None
        found = stripes(source.sizes, strides, tuple(n // size for n in array.strides))
        if found is None:
            return None
        start = sum(o * n for o, n in zip(source.offsets, strides, strict=True)) * size
        sides = (found.number, found.width), (found.steps[1] * size, size)
        return _Matrix(found, start, np.lib.stride_tricks.as_strided(array, *sides))


class TorchScattered(Scattered):
    """A tensor on an accelerator, or one that holds another dtype than the stored one."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype) -> None:
        same = tensor.dtype == stored
        self._tensor = as_raw(tensor) if same else tensor
        self._stored = self._tensor.dtype if same else stored
        self._flat: torch.Tensor | None = None
        if same and tensor.is_contiguous():
            # Not `view(-1)`: it keeps the stride of a single element, which then cannot be viewed as bytes.
            self._flat = self._tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._device = tensor.device
        self.nbytes = tensor.nbytes
        kind = None if tensor.is_cpu else torch.accelerator.current_accelerator()
        if kind is not None and kind.type == tensor.device.type:
            self.accelerator = tensor.device.index or 0
            self.address = tensor.data_ptr()

    def read(self, start: int, stop: int, into: memoryview, *, queued: bool = False) -> None:
        tensor = self._tensor
        if self._flat is not None:
            torch.frombuffer(into, dtype=torch.uint8).copy_(self._flat[start:stop], non_blocking=queued)
            return
        size = tensor.element_size()
        flat = torch.frombuffer(into, dtype=tensor.dtype)
        at = 0
        for box in flat_range_to_boxes(tuple(tensor.shape), start // size, stop // size):
            flat[at : at + box.volume].view(box.sizes).copy_(tensor[slices(box)], non_blocking=queued)
            at += box.volume

    def write(self, box: Box, data: memoryview, shape: Ints, part: Box) -> None:
        if address_of(data) % self._stored.itemsize:  # torch may crash on unaligned elements
            data = np.frombuffer(data, np.uint8).copy().data
        source = torch.frombuffer(data, dtype=self._stored).view(shape)
        with torch.inference_mode():  # a tensor made in inference mode can only be changed in it
            self._tensor[slices(box)].copy_(source[slices(part)])

    def write_chunk(self, shape: Ints, source: Box, target: Box, data: memoryview, at: int) -> bool:
        run = contiguous_run(shape, source)
        to = contiguous_run(tuple(self._tensor.shape), target)
        if self._flat is None or run is None or to is None:
            return False
        size = self._tensor.element_size()
        first = run[0] * size
        low, high = max(at, first), min(at + len(data), first + run[1] * size)
        if high > low:
            piece = torch.frombuffer(data[low - at : high - at], dtype=torch.uint8)
            start = to[0] * size + low - first
            with torch.inference_mode():
                self._flat[start : start + high - low].copy_(piece, non_blocking=self.accelerator is not None)
        return True

    def wait(self) -> None:
        if self.accelerator is not None:
            torch.accelerator.current_stream(self._device).synchronize()


def scattered_memory(tensor: torch.Tensor, stored: torch.dtype) -> Scattered:
    """Return the memory of a tensor that holds, or is filled from, elements of type `stored`."""
    if tensor.device.type == "cpu" and tensor.dtype == stored:
        return HostScattered(tensor)
    return TorchScattered(tensor, stored)


def windows_of(tensor: torch.Tensor, window_nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, a window at a time; one is valid until the next."""
    nbytes, address = tensor.numel() * tensor.element_size(), host_address(tensor)
    source = None if address or not nbytes else scattered_memory(tensor, tensor.dtype)
    buffer = memoryview(bytearray(min(nbytes, window_nbytes) if source else 0))
    for at in range(0, nbytes, window_nbytes):
        size = min(window_nbytes, nbytes - at)
        if source is not None:
            source.read(at, at + size, buffer[:size])
        yield buffer[:size] if source else view_memory(address + at, size)


_MOST_SAMPLED, _ELEMENTS = 64, 8
"""Of a state, this many tensors are compared between ranks, and of each about this many elements."""


def sample_replicas(description: Description, compared: npt.NDArray[np.bool_]) -> Callable[[], bytes]:
    """Read a few elements of some `compared` tensors that this rank holds whole; return what digests them by row."""
    # What lies on an accelerator is packed there in the order of the caller's stream, and copied to the host by `read`.
    d = description
    whole = np.all(d.boxes.sizes == d.shape[d.row_tensor], axis=1)
    found = np.flatnonzero(compared[d.row_tensor] & whole & (d.boxes.volumes() > 0))
    rows = found[:: -(-len(found) // _MOST_SAMPLED) or 1].tolist()
    packs: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for row in rows:
        sample = _diagonal(as_raw(d.pieces[row]))
        packs.setdefault((sample.device, sample.dtype), {})[row] = sample
    packed = [(torch.cat(list(samples.values())), list(samples)) for samples in packs.values()]
    sizes = {row: sample.nbytes for samples in packs.values() for row, sample in samples.items()}
    kind = torch.accelerator.current_accelerator()
    devices = {device for device, _ in packs if kind is not None and device.type == kind.type}
    events = {device: torch.accelerator.current_stream(device).record_event() for device in devices}

    def read() -> bytes:
        pairs: list[tuple[int, int]] = []
        for pack, rows in packed:
            data, at = _copied_after(events.get(pack.device), pack).numpy().tobytes(), 0
            for row in rows:
                pairs.append((row, xxhash.xxh3_64_intdigest(data[at : at + sizes[row]])))
                at += sizes[row]
        return np.array(pairs, np.uint64).tobytes()

    return read


def _copied_after(event: torch.Event | None, pack: torch.Tensor) -> torch.Tensor:
    """Copy to the host what was packed before an event, and wait for nothing that was queued after it."""
    if event is None:
        return pack
    before = torch.accelerator.current_stream(pack.device)
    stream = torch.Stream(pack.device)
    stream.wait_event(event)
    torch.accelerator.set_stream(stream)
    try:
        return pack.cpu()  # into ordinary memory: pinning new memory would stop the device
    finally:
        torch.accelerator.set_stream(before)


def _diagonal(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few elements of a tensor of any strides, spread over it."""
    axes = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    shortest = min([n for n, _ in axes], default=1)
    count = min(shortest, _ELEMENTS)
    apart = (shortest - 1) // max(1, count - 1)
    return tensor.as_strided((count,), (apart * sum(step for _, step in axes),))


# Tensors that share memory: those of one storage whose ranges of bytes overlap are copied as one run, so that they stay views of
# each other; the others are copied alone, each with its own bytes and no more. Values are never looked at.

_ALIGNMENT: Final = 16
"""No element is larger: a run that begins at a multiple of it keeps every view of it aligned."""


@dataclass(frozen=True)
class MemoryRun:
    """Bytes of a storage that are copied together, and the tensors in them; equal views are listed once."""

    tensors: list[torch.Tensor]
    start: int
    stop: int
    whole: bool
    """All of the bytes are copied; else only the elements of the one tensor there is."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start if self.whole else self.tensors[0].nbytes


Geometry = tuple[Any, ...]


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor views the memory it begins at."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def geometry(tensor: torch.Tensor) -> Geometry:
    """Return a key that is equal for two tensors that are the same view of a storage."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), form(tensor)


def memory_keys(tensors: Sequence[torch.Tensor]) -> list[Hashable]:
    """Return a key for each tensor, which must have memory: equal for two that view the same memory in the same way."""
    starts = [tensor.data_ptr() for tensor in tensors]
    # Nearly all tensors are the only one at their address, and need no longer key.
    shared = {start for start, times in Counter(starts).items() if times > 1}
    return [
        (tensor.device, start, form(tensor)) if start in shared else start
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def runs(tensors: Iterable[torch.Tensor]) -> Iterator[MemoryRun]:
    """Divide strided tensors with elements into the runs of bytes that are copied."""
    by_storage: dict[int, dict[Geometry, torch.Tensor]] = {}
    for tensor in tensors:
        key = geometry(tensor)
        by_storage.setdefault(key[0], {}).setdefault(key, tensor)
    for views in by_storage.values():
        groups: list[list[torch.Tensor]] = []
        end = 0
        for tensor in sorted(views.values(), key=extent):
            start, stop = extent(tensor)
            if tensor.is_conj() or tensor.is_neg():  # it has other values than its bytes, so a copy cannot stay a view
                yield MemoryRun([tensor], start, stop, whole=False)
            elif groups and start < end:
                groups[-1].append(tensor)
                end = max(end, stop)
            else:
                groups.append([tensor])
                end = stop
        yield from map(_run, groups)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which all bytes of a tensor lie."""
    begin, end = extent(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + end - begin


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor's first byte is, and where the last one ends."""
    first = int(tensor.storage_offset())
    last = first + sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _run(group: list[torch.Tensor]) -> MemoryRun:
    start, stop = extent(group[0])[0], max(extent(tensor)[1] for tensor in group)
    if len(group) > 1:
        return MemoryRun(group, start - start % _ALIGNMENT, stop, whole=True)
    # Dense, or expanded from fewer elements: all bytes between its ends belong to it.
    return MemoryRun(group, start, stop, whole=stop - start == group[0].nbytes or overlaps_itself(group[0]))
