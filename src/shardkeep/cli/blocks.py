"""
Tensors of a checkpoint, block by block, so that one of any size is looked at in little memory. Imports torch.

Blocks follow the boxes in which the tensor is stored: each is one run of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.region import Box, flat_range_to_boxes, slices
from shardkeep.opening import StoredTensor

BLOCK_ELEMENTS = 4 << 20
"""At most so many at a time: 32 MiB as float64, in which they are looked at."""
_SUB_BYTE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


def blocks_of(stored: StoredTensor, block_elements: int = BLOCK_ELEMENTS) -> Iterator[Box]:
    """Cut a tensor into boxes of at most so many elements, in the order in which they are stored."""
    for box in stored.boxes:
        for start in range(0, box.volume, block_elements):
            for part in flat_range_to_boxes(box.sizes, start, min(box.volume, start + block_elements)):
                yield Box(tuple(map(sum, zip(box.offsets, part.offsets, strict=True))), part.sizes)


def read_block(stored: StoredTensor, box: Box) -> torch.Tensor:
    """Read one box."""
    return stored[slices(box)]


def as_numbers(block: torch.Tensor) -> torch.Tensor:
    """
    Return elements as something that can be calculated with, exactly: float64, int64, or complex128.

    Raises:
        UnsupportedLeaf: they are no numbers, such as raw bits, or several are packed in one.

    """
    dtype = block.dtype
    name = str(dtype).removeprefix("torch.")
    if dtype.is_complex:
        return block.to(torch.complex128)
    if dtype.is_floating_point and name != "float4_e2m1fn_x2":
        return block.to(torch.float32).to(torch.float64) if dtype.itemsize == 1 else block.to(torch.float64)
    if dtype == torch.uint64:
        # Torch can hardly calculate with it, and int64 would wrap: float64 is exact up to 2**53.
        array = block.numpy()
        return torch.from_numpy(array.astype(np.int64 if not array.size or array.max() < 1 << 63 else np.float64))
    if name in _SUB_BYTE or name.startswith(("bits", "float4")):
        raise UnsupportedLeaf(f"there is no arithmetic with {name}: several numbers may lie in a byte")
    return block.to(torch.int64)


def plain_values(block: torch.Tensor) -> torch.Tensor:
    """Return elements as something that can be printed; raw bits as the bytes that hold them."""
    try:
        numbers = as_numbers(block)
    except UnsupportedLeaf:
        return block.view(torch.uint8)
    if block.dtype == torch.bool:
        return block
    if block.dtype in {torch.float32, torch.complex64}:
        return block  # printed with the digits that it has
    return numbers.to(torch.float32) if block.dtype.is_floating_point and block.dtype.itemsize < 4 else numbers


def first_values(stored: StoredTensor, many: int) -> torch.Tensor:
    """Read the first elements in the order of the tensor, flat."""
    count = min(many, math.prod(stored.shape))
    parts = [read_block(stored, box).reshape(-1) for box in flat_range_to_boxes(stored.shape, 0, count)]
    return torch.cat([plain_values(part) for part in parts]) if parts else torch.empty(0)
