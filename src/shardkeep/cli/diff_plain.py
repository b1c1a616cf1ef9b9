"""Whether two plain values are the same, by their stored form first, so that what cannot be rebuilt is compared too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shardkeep.cli.contents import Item, value_of
from shardkeep.opening import Checkpoint


@dataclass(frozen=True)
class ValueChange:
    """A plain value before and after; a text in brackets stands for one that may not be rebuilt."""

    before: Any
    after: Any


def compare_values(
    a: Checkpoint, one: Item, b: Checkpoint, other: Item, *, rtol: float, atol: float
) -> ValueChange | None:
    """Return how two values differ; None where they do not."""
    if a.index.value_data.raw(one.row) == b.index.value_data.raw(other.row):
        return None
    (before, hidden), (after, too) = value_of(a, one.key), value_of(b, other.key)
    if hidden or too:
        return ValueChange(f"({hidden})" if hidden else before, f"({too})" if too else after)
    if type(before) is type(after) and isinstance(before, (int, float, str, bytes)) and before == after:
        return None
    if _both_numbers(before, after) and math.isclose(before, after, rel_tol=0.0, abs_tol=atol + rtol * abs(after)):
        return None
    return ValueChange(before, after)


def _both_numbers(before: Any, after: Any) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after))
