"""
Tensors of a checkpoint, block by block, so that one of any size is looked at in little memory. Imports torch.

Blocks follow the boxes in which the tensor is stored: each is one run of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.region import Box, flat_range_to_boxes, slices
from shardkeep.opening import StoredTensor
from shardkeep.options import cores

BLOCK_ELEMENTS = 4 << 20
"""Read at a time, at most."""
PIECE_ELEMENTS = 1 << 18
"""Calculated with at a time: 2 MiB as float64, which stay in the CPU's cache and cost no fresh memory."""
_MOST_THREADS = 4
"""Each holds a block or two."""
_SUB_BYTE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


@contextmanager
def calculators() -> Iterator[ThreadPoolExecutor]:
    """
    Lend threads that read and calculate, one a core. Work that waits is called off when the caller fails.

    Torch itself calculates with one thread in each: its own would wait for each other in every small step.
    """
    before = torch.get_num_threads()
    with ThreadPoolExecutor(min(_MOST_THREADS, cores()), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(before)


def blocks_of(stored: StoredTensor, block_elements: int = BLOCK_ELEMENTS) -> Iterator[Box]:
    """Cut a tensor into boxes of at most so many elements, in the order in which they are stored."""
    for box in stored.boxes:
        for start in range(0, box.volume, block_elements):
            for part in flat_range_to_boxes(box.sizes, start, min(box.volume, start + block_elements)):
                yield Box(tuple(map(sum, zip(box.offsets, part.offsets, strict=True))), part.sizes)


def read_block(stored: StoredTensor, box: Box) -> torch.Tensor:
    """Read one box."""
    return stored[slices(box)]


def pieces_of(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a flat block into pieces to calculate with."""
    for start in range(0, len(block), PIECE_ELEMENTS):
        yield block.narrow(0, start, min(PIECE_ELEMENTS, len(block) - start))


def as_numbers(block: torch.Tensor) -> torch.Tensor:
    """
    Return elements as something that can be calculated with, exactly: float64 or complex128; int64 where that rounds.

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
    return block.to(torch.int64 if dtype.itemsize == 8 else torch.float64)


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
