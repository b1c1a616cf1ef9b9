"""What an index expression such as `[3:7, ::2]` picks of a tensor, axis by axis."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import EllipsisType

from shardkeep.format.region import Ints

Item = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class Pick:
    """Indices `start, start + step, …`, `count` of them, along one axis."""

    start: int
    step: int
    count: int
    drop: bool
    """The axis goes away: a single index was given."""

    @property
    def extent(self) -> int:
        """How many indices from the first to the last, both included."""
        return (self.count - 1) * self.step + 1 if self.count else 0


def parse_index(key: str, shape: Ints, item: Item | tuple[Item, ...]) -> tuple[Pick, ...]:
    """Read an index expression the way torch does: integers, slices with positive steps, one Ellipsis."""
    items = item if isinstance(item, tuple) else (item,)
    if sum(part is Ellipsis for part in items) > 1:
        raise IndexError(f"{key!r}: an index can only have one ellipsis")
    given = len(items) - sum(part is Ellipsis for part in items)
    if given > len(shape):
        raise IndexError(f"{key!r}: {given} indices for a tensor of {len(shape)} axes")
    at = next((i for i, part in enumerate(items) if part is Ellipsis), len(items))
    full = (slice(None),) * (len(shape) - given)
    spread = (*items[:at], *full, *items[at + 1 :])
    return tuple(_pick(key, axis, n, part) for axis, (n, part) in enumerate(zip(shape, spread, strict=True)))


def _pick(key: str, axis: int, n: int, part: object) -> Pick:
    if isinstance(part, slice):
        if part.step is not None and int(part.step) <= 0:
            raise ValueError(f"{key!r}: the step of axis {axis} must be positive")
        indices = range(*part.indices(n))
        return Pick(indices.start, indices.step, len(indices), drop=False)
    # True is a mask to numpy and torch, not the index 1.
    is_mask = str(getattr(part, "dtype", type(part).__name__)).endswith("bool")
    try:
        index = None if is_mask else operator.index(part)  # type: ignore[arg-type]  # what is no number raises
    except TypeError:
        index = None
    if index is None:
        raise IndexError(f"{key!r}: cannot index a stored tensor with {type(part).__name__}")
    if not -n <= index < n:
        raise IndexError(f"{key!r}: index {index} is out of range for axis {axis} of size {n}")
    return Pick(index % n, 1, 1, drop=True)
