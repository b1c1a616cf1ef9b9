"""Tensors as the bytes they are, for dtypes that torch can store and neither send nor copy."""

from __future__ import annotations

from typing import Final

import torch

_SENT_BY_ALL: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
"""What every backend can send."""
_CARRIERS: Final = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row of bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same size as which every backend can send the bits of this one; itself if it can."""
    return dtype if dtype in _SENT_BY_ALL else _CARRIERS.get(dtype.itemsize, dtype)


def copy_bits(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy tensors of one shape: bit for bit where the dtypes are the same, converted where they are not."""
    if (
        target.dtype == source.dtype
        and target.dtype.itemsize == 1
        and type(target) in _PLAIN
        and type(source) in _PLAIN
    ):
        # torch has no copy of int4 and the like, which take a byte each.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source, non_blocking=non_blocking)
