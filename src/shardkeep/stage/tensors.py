"""
Tensors as memory: where their bytes are, and how to copy a part of them when they are not in one piece on the host.

A tensor that is contiguous on the CPU is an address; the pipelines move its bytes with memcpy or read straight into
it. Any other tensor is copied in parts, so that at most one window of it is in host memory at a time: by ranges of
bytes if it lies in order on an accelerator, box by box if it is strided or of another dtype than what is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.errors import CheckpointError
from shardkeep.format.region import (
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
from shardkeep.stage.memory import Scattered
from shardkeep.store.aligned import address_of

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types of each element size that both torch and numpy have: bytes are moved as these, whatever they mean."""


def as_raw(tensor: torch.Tensor) -> torch.Tensor:
    """See a tensor as whole numbers of the size of its elements, which every device can copy."""
    return tensor.view(_RAW[tensor.element_size()])


def host_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes begin if they lie in order in host memory, else 0."""
    return tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0


def _accelerator_of(device: torch.device) -> int | None:
    """Return the index of a device whose streams torch lets us wait for."""
    kind = None if device.type == "cpu" else torch.accelerator.current_accelerator()
    return None if kind is None or kind.type != device.type else device.index or 0


def _no_run() -> CheckpointError:
    return CheckpointError("a run of bytes was to be written to memory whose `run_of` has none: a defect of shardkeep")


class _Matrix(NamedTuple):
    """A box of host memory whose rows are the stripes of a stored chunk."""

    stripes: Stripes
    start: int
    """Where the first of them begins in the chunk, in bytes."""
    rows: npt.NDArray[np.generic]


class HostScattered:
    """A strided tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array: npt.NDArray[np.generic] = as_raw(tensor).numpy()
        self.nbytes = tensor.nbytes
        self.accelerator: int | None = None
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
        index: tuple[Any, ...] = (*slices(target), ...)  # without the dots, no axes would give a copy
        array, strides = self._array[index], strides_of(shape)
        size = array.itemsize
        if array.shape != source.sizes:  # what is strided freely below must all be there
            return None
        found = stripes(source.sizes, strides, tuple(n // size for n in array.strides))
        if found is None:
            return None
        start = sum(o * n for o, n in zip(source.offsets, strides, strict=True)) * size
        sides = (found.number, found.width), (found.steps[1] * size, size)
        return _Matrix(found, start, np.lib.stride_tricks.as_strided(array, *sides))

    def run_of(self, box: Box) -> None:  # noqa: ARG002
        return None

    def write_run(self, start: int, data: memoryview) -> None:  # noqa: ARG002
        raise _no_run()

    def wait(self) -> None:
        """Nothing is queued."""


class TorchScattered:
    """A tensor on an accelerator, or one that holds another dtype than the stored one."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype) -> None:
        same = tensor.dtype == stored
        self._tensor = as_raw(tensor) if same else tensor
        self._stored = self._tensor.dtype if same else stored
        self._flat: torch.Tensor | None = None
        if same and tensor.is_contiguous():
            # Not `view(-1)`: of a single element it keeps the stride, whatever that is, and then there are no bytes.
            self._flat = self._tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        self._device = tensor.device
        self.nbytes = tensor.nbytes
        self.accelerator = _accelerator_of(tensor.device)

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
        if address_of(data) % self._stored.itemsize:  # torch may crash on elements that lie askew
            data = np.frombuffer(data, np.uint8).copy().data
        source = torch.frombuffer(data, dtype=self._stored).view(shape)
        with torch.inference_mode():  # a tensor that was made in it can be changed nowhere else
            self._tensor[slices(box)].copy_(source[slices(part)])

    def write_chunk(self, shape: Ints, source: Box, target: Box, data: memoryview, at: int) -> bool:  # noqa: ARG002
        return False

    def run_of(self, box: Box) -> int | None:
        run = None if self._flat is None else contiguous_run(tuple(self._tensor.shape), box)
        return None if run is None else run[0] * self._tensor.element_size()

    def write_run(self, start: int, data: memoryview) -> None:
        if self._flat is None:
            raise _no_run()
        source = torch.frombuffer(data, dtype=torch.uint8)
        with torch.inference_mode():
            self._flat[start : start + len(data)].copy_(source, non_blocking=self.accelerator is not None)

    def wait(self) -> None:
        if self.accelerator is not None:
            torch.accelerator.current_stream(self._device).synchronize()


def scattered(tensor: torch.Tensor, stored: torch.dtype) -> Scattered:
    """Choose how to reach a tensor's elements when they hold, or are filled from, elements of type `stored`."""
    if tensor.device.type == "cpu" and tensor.dtype == stored:
        return HostScattered(tensor)
    return TorchScattered(tensor, stored)
