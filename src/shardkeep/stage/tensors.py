"""
Tensors as memory: where their bytes are, and how to copy a part of them when they are not in one piece on the host.

A tensor that is contiguous on the CPU is an address; the pipelines move its bytes with memcpy or read straight into
it. Any other tensor (strided, on an accelerator, of another dtype than what is stored) is copied box by box, so that
at most one window of it is in host memory at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.format.region import Box, Ints, flat_range_to_boxes, slices
from shardkeep.stage.memory import Scattered

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Types of each element size that both torch and numpy have: bytes are moved as these, whatever they mean."""


def host_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes begin if they lie in order in host memory, else 0."""
    return tensor.data_ptr() if tensor.device.type == "cpu" and tensor.is_contiguous() else 0


class HostScattered:
    """A strided tensor in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array: npt.NDArray[np.generic] = tensor.view(_RAW[tensor.element_size()]).numpy()

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


class TorchScattered:
    """A tensor on an accelerator, or one that holds another dtype than the stored one."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype) -> None:
        same = tensor.dtype == stored
        self._tensor = tensor.view(_RAW[tensor.element_size()]) if same else tensor
        self._stored = self._tensor.dtype if same else stored

    def read(self, start: int, stop: int, into: memoryview, *, queued: bool = False) -> None:
        tensor = self._tensor
        size = tensor.element_size()
        flat = torch.frombuffer(into, dtype=tensor.dtype)
        at = 0
        for box in flat_range_to_boxes(tuple(tensor.shape), start // size, stop // size):
            flat[at : at + box.volume].view(box.sizes).copy_(tensor[slices(box)], non_blocking=queued)
            at += box.volume

    def write(self, box: Box, data: memoryview, shape: Ints, part: Box) -> None:
        source = torch.frombuffer(data, dtype=self._stored).view(shape)
        with torch.inference_mode():  # a tensor that was made in it can be changed nowhere else
            self._tensor[slices(box)].copy_(source[slices(part)])


def scattered(tensor: torch.Tensor, stored: torch.dtype) -> Scattered:
    """Choose how to reach a tensor's elements when they hold, or are filled from, elements of type `stored`."""
    if tensor.device.type == "cpu" and tensor.dtype == stored:
        return HostScattered(tensor)
    return TorchScattered(tensor, stored)
