"""
How the values of two stored tensors differ, block by block, in bounded memory. Imports torch.

Without tolerances bits are compared: a NaN equals the same NaN, and -0.0 is not 0.0. With tolerances numbers are, as
`torch.allclose(equal_nan=True)` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkeep.cli.blocks import PIECE_ELEMENTS, as_numbers, blocks_of, read_block
from shardkeep.cli.contents import Item
from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.region import Box, whole
from shardkeep.opening import Checkpoint, StoredTensor
from shardkeep.options import Options
from shardkeep.run.slicing import read_whole


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


class Tolerance(NamedTuple):
    """How far apart numbers may be that count as equal; with 0 and 0, bits are compared."""

    relative: float
    absolute: float


def compare(one: StoredTensor, other: StoredTensor, tolerance: Tolerance, *, on_block: Callable[[int], None]) -> Change:
    """Read two tensors of one shape, and say how they differ; `on_block` is told the bytes read of the first."""
    found = Change()
    for box in blocks_of(one):
        a, b = read_block(one, box), read_block(other, box)
        _add_block(found, a, b, box, tolerance)
        on_block(a.nbytes)
    return found


def compare_batch(
    one: Checkpoint, other: Checkpoint, pairs: Sequence[tuple[Item, Item]], tolerance: Tolerance
) -> list[Change]:
    """Read many small tensors of two checkpoints at once, and say how each pair differs."""
    ours = _read(one, [item for item, _ in pairs])
    theirs = _read(other, [item for _, item in pairs])
    changes = []
    for a, b in zip(ours, theirs, strict=True):
        found = Change()
        if a.dtype == b.dtype and torch.equal(_raw(a.reshape(-1)), _raw(b.reshape(-1))):
            found.elements = a.numel()
        else:
            _add_block(found, a, b, whole(tuple(a.shape)), tolerance)
        changes.append(found)
    return changes


def _read(checkpoint: Checkpoint, items: Sequence[Item]) -> list[torch.Tensor]:
    """Read tensors whole, those that are tied once."""
    owners = checkpoint.index.tensors.alias[[item.row for item in items]].astype(np.int64)
    rows, where = np.unique(owners, return_inverse=True)
    tensors = read_whole(checkpoint.source, rows, Options())
    return [tensors[at] for at in where.tolist()]


def _add_block(found: Change, a: torch.Tensor, b: torch.Tensor, box: Box, tolerance: Tolerance) -> None:
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, len(a), PIECE_ELEMENTS):
        many = min(PIECE_ELEMENTS, len(a) - start)
        _add(found, _Piece(a.narrow(0, start, many), b.narrow(0, start, many), box, start), tolerance)


class _Piece(NamedTuple):
    """Some elements of a block of both tensors, in a row."""

    a: torch.Tensor
    b: torch.Tensor
    box: Box
    start: int
    """How many elements of the block come before."""

    def place_of(self, at: int) -> tuple[int, ...]:
        """Return where an element of the piece is in the whole tensor."""
        inside = np.unravel_index(self.start + at, self.box.sizes)
        return tuple(offset + int(i) for offset, i in zip(self.box.offsets, inside, strict=True))


def _add(found: Change, piece: _Piece, tolerance: Tolerance) -> None:
    a, b = piece.a, piece.b
    found.elements += a.numel()
    same_type = a.dtype == b.dtype
    bits = _bits_differ(a, b) if same_type else None
    try:
        x, y = _both(as_numbers(a), as_numbers(b))
    except UnsupportedLeaf:
        found.has_numbers = False
        differs = bits if bits is not None else torch.ones(a.shape, dtype=torch.bool)
        _note(found, differs, _raw(a), _raw(b), piece)
        return
    finite = x.isfinite()
    all_finite = bool(finite.all())
    found.base_squares += float((x if all_finite else x[finite]).abs().to(torch.float64).square_().sum())
    if bits is not None and not bits.any():
        return
    is_whole = not a.dtype.is_floating_point and not a.dtype.is_complex
    # Of whole numbers bits tell, and need no rounding.
    same_number = ~bits if bits is not None and is_whole else (x == y) | (x.isnan() & y.isnan())
    distance = _distance_unsigned(a, b) if same_type and a.dtype == torch.uint64 else _distance(x, y)
    if any(tolerance):
        # Infinite distances are close to nothing, not even to an infinite tolerance.
        differs = ~same_number & ~(
            distance.isfinite() & (distance <= tolerance.absolute + tolerance.relative * y.abs().to(torch.float64))
        )
    elif bits is not None:
        differs = bits
        found.bits_alone += int((bits & same_number).sum())
    else:
        differs = ~same_number
    _note(found, differs, x, y, piece)
    both = finite & y.isfinite()
    found.not_finite += int((differs & ~both & ~same_number).sum())
    apart = distance[both & ~same_number]
    if apart.numel():
        found.max_abs = max(found.max_abs, float(apart.max()))
        found.squares += float(apart.square_().sum())


def _both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as one type; of whole numbers that float64 would round, as whole numbers."""
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def _distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return |x - y| as float64; of int64 without a wrap."""
    apart = x - y
    if x.dtype != torch.int64:
        return apart.abs().to(torch.float64)
    wrapped = ((x ^ y) & (x ^ apart)) < 0
    return torch.where(wrapped, x.to(torch.float64) - y.to(torch.float64), apart.to(torch.float64)).abs()


def _distance_unsigned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |a - b| of uint64, which float64 rounds, and int64 does not hold."""
    one, other = a.numpy(), b.numpy()
    return torch.from_numpy(np.where(one > other, one - other, other - one).astype(np.float64))


def _raw(elements: torch.Tensor) -> torch.Tensor:
    """Return the bytes of elements, a row each."""
    return elements.contiguous().view(torch.uint8).reshape(len(elements), elements.element_size())


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Say of each element whether a bit of it differs."""
    one, other = _raw(a), _raw(b)
    if torch.equal(one, other):
        return torch.zeros(len(a), dtype=torch.bool)
    return (one != other).any(dim=1)


def _note(found: Change, differs: torch.Tensor, x: torch.Tensor, y: torch.Tensor, piece: _Piece) -> None:
    many = int(differs.sum())
    found.changed += many
    if many and found.first is None:
        at = int(differs.nonzero()[0])
        found.first = piece.place_of(at)
        found.before, found.after = (
            # Numbers of this type may be rounded.
            int(own.numpy()[at]) if own.dtype == torch.uint64 else number[at].tolist()
            for own, number in ((piece.a, x), (piece.b, y))
        )
