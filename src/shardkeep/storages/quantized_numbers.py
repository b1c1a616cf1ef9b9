"""
From quantized numbers to plain ones, any part of a tensor at a time, bit for bit as torch's reader makes them.

Two forms: 8-bit weights with one scale for each square block, and 4-bit values (MXFP4) with one exponent for each group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from shardkeep.format.region import Box, Ints

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of a 4-bit float (E2M1) stand for."""
_EXPONENT_BIAS = 127


def block_ranges(box: Box, block_size: int) -> Box:
    """Return the box of scales that a box of weights needs."""
    first = tuple(start // block_size for start in box.offsets)
    last = tuple(-(-(start + n) // block_size) for start, n in zip(box.offsets, box.sizes, strict=True))
    return Box(first, tuple(b - a for a, b in zip(first, last, strict=True)))


def scale_blocks(
    weight: torch.Tensor, scales: torch.Tensor, box: Box, block_size: int, to: torch.dtype
) -> torch.Tensor:
    """
    Multiply a part of a matrix by the scales of its blocks, in float32.

    Args:
        weight: the part.
        scales: of the blocks that `block_ranges` says.
        box: where the part lies in its matrix; it may begin and end inside blocks.
        block_size: rows and columns of a block.
        to: the dtype of the result.

    """
    rows, columns = (
        torch.arange(start, start + n, device=weight.device) // block_size - start // block_size
        for start, n in zip(box.offsets, box.sizes, strict=True)
    )
    found = weight.to(torch.float32, copy=True)
    found *= scales.to(torch.float32)[rows][:, columns]
    return found.to(to)


def groups_of(box: Box, group_values: int) -> tuple[int, int]:
    """Return the groups that hold a box of values: the first one, and the one after the last."""
    start, count = box.offsets[-1], box.sizes[-1]
    return start // group_values, -(-(start + count) // group_values)


def expand_groups(blocks: torch.Tensor, scales: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """
    Turn groups of 4-bit values into numbers; two to a byte, the low half first.

    Args:
        blocks: bytes, of shape [..., groups, bytes].
        scales: exponents with a bias of 127, of shape [..., groups].
        to: the dtype of the result, of shape [..., groups * bytes * 2].

    """
    table = torch.tensor(FP4_VALUES, dtype=to, device=blocks.device)
    found = torch.empty(*blocks.shape, 2, dtype=to, device=blocks.device)
    found[..., 0] = table[(blocks & 0x0F).to(torch.int64)]
    found[..., 1] = table[(blocks >> 4).to(torch.int64)]
    found = found.flatten(-2)
    torch.ldexp(found, (scales.to(torch.int32) - _EXPONENT_BIAS).unsqueeze(-1), out=found)
    return found.flatten(-2)


def strips(sizes: Ints, most: int) -> Iterator[Box]:
    """Cut a box of these sizes into ones of at most `most` elements, in row-major order."""
    if not math.prod(sizes):
        return
    steps: list[int] = []
    for size in reversed(sizes):
        steps.insert(0, max(1, min(size, most // math.prod(steps))))
    for start in itertools.product(*(range(0, size, step) for size, step in zip(sizes, steps, strict=True))):
        yield Box(start, tuple(min(step, size - at) for at, size, step in zip(start, sizes, steps, strict=True)))
