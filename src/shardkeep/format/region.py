"""
Boxes: axis-aligned regions of an n-dimensional tensor, and the arithmetic everything else rests on.

Pure functions of plain tuples; no tensor, no file. A box of a 0-dim tensor has no axes and one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements at `offsets[d] <= index[d] < offsets[d] + sizes[d]` for every axis d."""

    offsets: Ints
    sizes: Ints

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Ints) -> Box:
    """Return the box that is all of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None where they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(
        min(ao + an, bo + bn) - lo
        for ao, an, bo, bn, lo in zip(a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True)
    )
    return None if any(n <= 0 for n in sizes) else Box(offsets, sizes)


def relative(inner: Box, outer: Box) -> Box:
    """Return `inner` in the coordinates of `outer`, which contains it."""
    return Box(tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index that selects a box from a tensor or array."""
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def flat_range_to_boxes(shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """
    Cut elements `start..stop` of a row-major tensor into boxes, in order, each contiguous in that order.

    At most `2 * ndim - 1` of them: a ragged head, whole rows, a ragged tail, for each axis.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # inside one row
        yield from _under(first, flat_range_to_boxes(shape[1:], head, tail))
        return
    if head:
        yield from _under(first, flat_range_to_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from _under(last, flat_range_to_boxes(shape[1:], 0, tail))


def _under(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((index, *box.offsets), (1, *box.sizes))


def contiguous_run(shape: Ints, box: Box) -> tuple[int, int] | None:
    """
    Return `(start, count)` of a box's elements in the row-major order of `shape`, if they are one run.

    None where the box is scattered over that order.
    """
    start = count = 0
    open_axes = True  # true until an axis with more than one index was met
    for o, n, full in zip(box.offsets, box.sizes, shape, strict=True):
        start = start * full + o
        if not open_axes and n != full:
            return None
        if n != 1:
            open_axes = False
    count = box.volume
    return start, count


class Stripes(NamedTuple):
    """A box as equal runs of elements, evenly apart in each of two memories that hold it."""

    number: int
    width: int
    """Of a run, in elements."""
    steps: tuple[int, int]
    """From the beginning of a run to that of the next, in elements, in one memory and in the other."""


def stripes(sizes: Ints, one: Ints, other: Ints) -> Stripes | None:
    """
    See a box of these sizes as stripes of two memories, which hold its elements at these strides.

    None where that takes more than two axes, after those that follow each other evenly in both were joined.
    """
    axes: list[tuple[int, int, int]] = []  # from the innermost: size and strides
    for n, a, b in zip(reversed(sizes), reversed(one), reversed(other), strict=True):
        if n == 1:
            continue
        if axes and (a, b) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * n, *axes[-1][1:])
        else:
            axes.append((n, a, b))
    if not axes or axes[0][1:] != (1, 1):
        axes.insert(0, (1, 1, 1))
    if len(axes) > 2:
        return None
    width = axes[0][0]
    number, *steps = axes[1] if len(axes) == 2 else (1, width, width)
    return Stripes(number, width, (steps[0], steps[1]))


def cut_stripes(all_of: Stripes, low: int, high: int) -> Iterator[tuple[int, int, int, int]]:
    """
    Return which stripes, and which elements of each, lie in a range of the first memory, counted from the first stripe.

    As `(first stripe, last, first element, last)`, in order, lasts not included: at most a stripe whose beginning is
    outside, all that are whole, and one whose end is outside.
    """
    number, width, (step, _) = all_of
    low, high = max(low, 0), min(high, (number - 1) * step + width)
    if low >= high:
        return
    first, head = divmod(low, step)
    last, tail = divmod(high, step)
    tail = min(tail, width)
    if first == last:
        if head < tail:
            yield first, first + 1, head, tail
        return
    if head:
        if head < width:
            yield first, first + 1, head, width
        first += 1
    if tail == width:
        last, tail = last + 1, 0
    if first < last:
        yield first, last, 0, width
    if tail:
        yield last, last + 1, 0, tail


def strides_of(shape: Ints) -> Ints:
    """Return how many elements apart neighbours along each axis of a row-major tensor are."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def grid(cuts: list[list[tuple[int, int]]]) -> Iterator[Box]:
    """Return the boxes of the product of runs `(offset, size)` given for each axis, in row-major order."""
    for combo in itertools.product(*cuts):
        yield Box(tuple(o for o, _ in combo), tuple(n for _, n in combo))
