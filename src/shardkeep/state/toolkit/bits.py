"""Tensors as the bytes they are, for dtypes that torch can store and neither send nor copy."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a row of bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy plain tensors of one shape: bit for bit where the dtypes are the same, converted where they are not."""
    if target.dtype == source.dtype and target.dtype.itemsize == 1:
        # torch has no copy of int4 and the like, which take a byte each.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
