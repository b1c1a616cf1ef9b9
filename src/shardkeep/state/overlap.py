"""Tensors whose own elements share memory, so that they cannot be filled."""

from __future__ import annotations

import torch


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Say whether elements of a tensor may share memory: an axis steps no further than the smaller ones reach."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if step <= reach:
                return True
            reach += step * (n - 1)
    return False
