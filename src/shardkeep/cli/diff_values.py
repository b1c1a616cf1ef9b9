"""
How the values of two stored tensors differ, block by block, in bounded memory. Imports torch.

Without tolerances bits are compared: a NaN equals the same NaN, and -0.0 is not 0.0. With tolerances numbers are, as
`torch.allclose(equal_nan=True)` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.cli.blocks import as_numbers, blocks_of, read_block
from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.region import Box
from shardkeep.opening import StoredTensor

_BLOCK_ELEMENTS = 1 << 20
"""Several tensors are compared at a time, each with a handful of blocks as float64."""


@dataclass
class Change:
    """How two tensors differ. Norms and the greatest distance are of elements that are finite in both."""

    elements: int = 0
    changed: int = 0
    bits_alone: int = 0
    """Of those changed, how many are the same number: -0.0 and 0.0, or one NaN and another."""
    not_finite: int = 0
    """Of those changed, how many are NaN or infinite on one side at least."""
    max_abs: float = 0.0
    squares: float = 0.0
    """Of the distances, summed."""
    base_squares: float = 0.0
    """Of the first tensor's elements, summed."""
    first: tuple[int, ...] | None = None
    """Where the first element that changed is, in the order of storage."""
    before: Any = None
    after: Any = None
    has_numbers: bool = True
    """False where the dtype knows no arithmetic, and only bits were compared."""

    @property
    def norm(self) -> float:
        """The Euclidean norm of the change."""
        return math.sqrt(self.squares)

    @property
    def relative(self) -> float:
        """The norm of the change, as a part of the norm of the first tensor."""
        base = math.sqrt(self.base_squares)
        return self.norm / base if base else math.inf if self.squares else 0.0


def compare(
    one: StoredTensor, other: StoredTensor, *, rtol: float, atol: float, on_block: Callable[[int], None]
) -> Change:
    """Read two tensors of one shape, and say how they differ; `on_block` is told the bytes read of the first."""
    found = Change()
    for box in blocks_of(one, _BLOCK_ELEMENTS):
        a, b = read_block(one, box), read_block(other, box)
        _add(found, a, b, box, rtol, atol)
        on_block(a.nbytes)
    return found


def _add(found: Change, a: torch.Tensor, b: torch.Tensor, box: Box, rtol: float, atol: float) -> None:
    found.elements += a.numel()
    same_type = a.dtype == b.dtype
    bits = _bits_differ(a, b) if same_type else None
    try:
        x, y = _both(as_numbers(a), as_numbers(b))
    except UnsupportedLeaf:
        found.has_numbers = False
        differs = bits if bits is not None else torch.ones(a.shape, dtype=torch.bool)
        _note(found, differs, a.view(torch.uint8), b.view(torch.uint8), box)
        return
    finite = x.isfinite()
    found.base_squares += float(x[finite].abs().to(torch.float64).square_().sum())
    if bits is not None and not bits.any():
        return
    same_number = (x == y) | (x.isnan() & y.isnan())
    if rtol or atol:
        # Distances of infinities are NaN or infinite, and close to nothing.
        differs = ~same_number & ~((x - y).abs() <= atol + rtol * y.abs())
    elif bits is not None:
        differs = bits
        found.bits_alone += int((bits & same_number).sum())
    else:
        differs = ~same_number
    _note(found, differs, x, y, box)
    both = finite & y.isfinite()
    found.not_finite += int((differs & ~both & ~same_number).sum())
    apart = (x - y)[both & ~same_number].abs().to(torch.float64)
    if apart.numel():
        found.max_abs = max(found.max_abs, float(apart.max()))
        found.squares += float(apart.square_().sum())


def _both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as one type; of whole numbers that float64 would round, as whole numbers."""
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Say of each element whether a bit of it differs."""
    width = a.element_size()
    raw = [t.contiguous().reshape(-1).view(torch.uint8).reshape(-1, width) for t in (a, b)]
    if torch.equal(*raw):
        return torch.zeros(a.shape, dtype=torch.bool)
    return (raw[0] != raw[1]).any(dim=1).reshape(a.shape)


def _note(found: Change, differs: torch.Tensor, x: torch.Tensor, y: torch.Tensor, box: Box) -> None:
    many = int(differs.sum())
    found.changed += many
    if many and found.first is None:
        at = tuple(differs.nonzero()[0].tolist())
        found.first = tuple(offset + i for offset, i in zip(box.offsets, at, strict=True))
        found.before, found.after = x[at].item(), y[at].item()
