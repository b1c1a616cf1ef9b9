"""Boxes: axis-aligned regions of an n-dimensional tensor, and their arithmetic. Without axes: one element."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng  # imported here: a fork during a lazy import would see half a module

from shardkeep.format import dtypes

if TYPE_CHECKING:
    from typing_extensions import Self


Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements at `offsets[d] <= index[d] < offsets[d] + sizes[d]` for every axis d."""

    offsets: Ints
    sizes: Ints

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def whole(shape: Ints) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None where they share no element."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    axes = zip(a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True)
    sizes = tuple(min(ao + an, bo + bn) - lo for ao, an, bo, bn, lo in axes)
    return None if any(n <= 0 for n in sizes) else Box(offsets, sizes)


def relative(inner: Box, outer: Box) -> Box:
    """Return `inner` in the coordinates of `outer`, which contains it."""
    return Box(tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def flat_range_to_boxes(shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """Cut elements `start..stop` of a row-major tensor into at most `2 * ndim - 1` contiguous boxes, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    for first, last, head, tail in cut_stripes(Stripes(shape[0], row, (row, row)), start, stop):
        if tail - head == row:  # whole rows
            yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
        else:
            for box in flat_range_to_boxes(shape[1:], head, tail):
                yield Box((first, *box.offsets), (1, *box.sizes))


def contiguous_run(shape: Ints, box: Box) -> tuple[int, int] | None:
    """Return `(start, count)` of a box's elements in the row-major order of `shape` if they are contiguous, else None."""
    start = 0
    open_axes = True  # until an axis with more than one index was seen
    for o, n, full in zip(box.offsets, box.sizes, shape, strict=True):
        start = start * full + o
        if not open_axes and n != full:
            return None
        if n != 1:
            open_axes = False
    return start, box.volume


class Stripes(NamedTuple):
    """A box as equal runs of elements, evenly spaced in each of two memories that hold it."""

    number: int
    width: int
    steps: tuple[int, int]
    """Elements from the beginning of a run to the beginning of the next, in each of the two memories."""


def stripes(sizes: Ints, one: Ints, other: Ints) -> Stripes | None:
    """Describe a box as stripes of two memories with these strides; None if that takes more than two axes."""
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
    """Yield `(first stripe, last, first element, last)`, lasts excluded, of what lies in a range of the first memory."""
    number, width, (step, _) = all_of
    low, high = max(low, 0), min(high, (number - 1) * step + width)
    if low >= high:
        return
    first, head = divmod(low, step)
    last, tail = divmod(high, step)
    tail = min(tail, width)
    begin, end = first + (head > 0), last + (tail == width)  # of the stripes that lie inside as a whole
    pieces = [(first, begin, head, width), (begin, end, 0, width), (end, last + 1, 0, tail)]
    if first == last:
        pieces = [(first, first + 1, head, tail)]
    yield from (piece for piece in pieces if piece[0] < piece[1] and piece[2] < piece[3])


@lru_cache(maxsize=1024)
def strides_of(shape: Ints) -> Ints:
    """Return the strides of a row-major tensor of this shape, in elements; as in torch, an axis of size 0 counts as 1."""
    return tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))


def grid(cuts: list[list[tuple[int, int]]]) -> Iterator[Box]:
    """Return the product of runs `(offset, size)` given for each axis, as boxes in row-major order."""
    for combo in itertools.product(*cuts):
        yield Box(tuple(o for o, _ in combo), tuple(n for _, n in combo))


class BoxLike(Protocol):
    """Anything with `offsets` and `sizes`: a chunk or a shard, ours or torch's."""

    @property
    def offsets(self) -> Sequence[int]: ...

    @property
    def sizes(self) -> Sequence[int]: ...


B = TypeVar("B", bound=BoxLike)


def boxes_overlap(shard1: BoxLike, shard2: BoxLike) -> bool:
    axes = zip(shard1.offsets, shard1.sizes, shard2.offsets, shard2.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in axes)


def overlap_region(saved_shard: BoxLike, current_shard: BoxLike) -> list[tuple[int, int, int, int]]:
    """Return for each axis its number, where the common part begins in the saved and in the current box, and its length."""
    axes = zip(saved_shard.offsets, saved_shard.sizes, current_shard.offsets, current_shard.sizes, strict=True)
    region = []
    for axis, (saved, saved_size, current, current_size) in enumerate(axes):
        low, high = max(saved, current), min(saved + saved_size, current + current_size)
        region.append((axis, low - saved, low - current, high - low))
    return region


def overlaps(wanted: Sequence[BoxLike], stored: Sequence[BoxLike]) -> list[tuple[int, int]]:
    """Return the pairs (of `wanted`, of `stored`) that overlap, in order, by a search along the axis that divides most."""
    if not wanted or not stored:
        return []
    axes = range(len(wanted[0].offsets))
    if not axes:
        return list(itertools.product(range(len(wanted)), range(len(stored))))
    axis = max(axes, key=lambda each: len({box.offsets[each] for box in stored}))
    order = sorted(range(len(stored)), key=lambda index: stored[index].offsets[axis])
    starts = [stored[index].offsets[axis] for index in order]
    longest = max(box.sizes[axis] for box in stored)
    pairs = []
    for number, box in enumerate(wanted):
        low = bisect_left(starts, box.offsets[axis] - longest)
        high = bisect_left(starts, box.offsets[axis] + box.sizes[axis])
        pairs += [(number, index) for index in sorted(order[low:high]) if boxes_overlap(box, stored[index])]
    return pairs


def clashes(boxes: Sequence[B]) -> list[tuple[B, B]]:
    """Return pairs of boxes that overlap; they are divided wherever no box crosses a cut, and only the rest is compared."""
    found: list[tuple[B, B]] = []
    pending = [[box for box in boxes if all(box.sizes)]]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        axes = range(len(group[0].sizes))
        parts = next((parts for axis in axes if len(parts := _divided(group, axis)) > 1), None)
        if parts is not None:
            pending += parts
        elif axes:
            found += [(group[one], group[other]) for one, other in overlaps(group, group) if one < other]
        else:
            found += itertools.pairwise(group)
    return found


def _divided(group: list[B], axis: int) -> list[list[B]]:
    parts: list[list[B]] = []
    reach = -1
    for box in sorted(group, key=lambda each: each.offsets[axis]):
        if not parts or box.offsets[axis] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box.offsets[axis] + box.sizes[axis])
    return parts


def within(outer_box_size: Sequence[int], inner_box: BoxLike) -> bool:
    return len(outer_box_size) == len(inner_box.offsets) == len(inner_box.sizes) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(inner_box.offsets, inner_box.sizes, outer_box_size, strict=True)
    )


# -- columns of boxes --------------------------------------------------------------------------------------------------

# Plans and the index are made of columns: numpy arrays of one length. Boxes of tensors with different numbers of axes share
# one matrix: rows are padded on the right with offset 0 and size 1, which changes no volume, intersection or tiling.

IntArray = npt.NDArray[np.int64]

ITEMSIZES = np.zeros(256, np.int64)
"""Bytes of an element by dtype code; 0 for codes that no dtype has."""
ITEMSIZES[[row.code for row in dtypes.DTYPES]] = [row.itemsize for row in dtypes.DTYPES]


def distinct(numbers: IntArray) -> IntArray:
    """Return the different numbers, in order. `np.unique` would import numpy.ma, which takes longer than a small load."""
    ordered = np.sort(numbers)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


class Rows:
    """A dataclass whose fields are arrays of one length: the columns of a table."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]  # every subclass is a dataclass

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]

    def take(self, rows: Any) -> Self:
        """Return the table of these rows, in this order (an index array, a mask or a slice)."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})  # type: ignore[type-var,arg-type]


@dataclass(frozen=True)
class Boxes(Rows):
    offsets: IntArray
    sizes: IntArray

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Self:
        axes = max((len(box.sizes) for box in boxes), default=0)
        return cls(matrix_of([box.offsets for box in boxes], axes, 0), matrix_of([box.sizes for box in boxes], axes, 1))

    @property
    def boxes(self) -> Boxes:
        return Boxes(self.offsets, self.sizes)

    @property
    def axes(self) -> int:
        return int(self.offsets.shape[1])

    def volumes(self) -> IntArray:
        volumes: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volumes

    def box(self, row: int, ndim: int) -> Box:
        """Return one row without padding."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.sizes[row, :ndim].tolist()))


def widen(matrix: IntArray, axes: int, fill: int) -> IntArray:
    if matrix.shape[1] == axes:
        return matrix
    wide = np.full((len(matrix), axes), fill, np.int64)
    wide[:, : matrix.shape[1]] = matrix
    return wide


def matrix_of(rows: Sequence[tuple[int, ...]], axes: int, fill: int) -> IntArray:
    """Build a padded matrix from tuples of at most `axes` numbers, most of which are alike."""
    seen: dict[tuple[int, ...], int] = {}
    which = [seen.setdefault(row, len(seen)) for row in rows]
    padded = [row + (fill,) * (axes - len(row)) for row in seen]
    return np.array(padded, dtype=np.int64).reshape(len(seen), axes)[which]


_WIDTHS = {1: "<i1", 2: "<i2", 4: "<i4", 8: "<i8"}


def pack(numbers: IntArray) -> bytes:
    """Return whole numbers in row-major order, in the narrowest type that holds all of them."""
    most = max(int(numbers.max()), -1 - int(numbers.min())) if numbers.size else 0
    width = next(width for width in _WIDTHS if most < 1 << (8 * width - 1))
    return bytes((width,)) + numbers.astype(_WIDTHS[width]).tobytes()


def ints(packed: bytes) -> IntArray:
    return np.frombuffer(packed, _WIDTHS[packed[0]], offset=1).astype(np.int64) if packed else np.zeros(0, np.int64)


def segment_starts(ends: npt.NDArray[Any]) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), ends])[:-1].astype(np.int64, copy=False)


def concat_ranges(starts: npt.NDArray[Any], counts: npt.NDArray[Any]) -> IntArray:
    """Return `start, start+1, … start+count-1` of every range, end to end."""
    counts = np.asarray(counts, np.int64)
    ends = np.cumsum(counts)
    ranges: IntArray = np.repeat(np.asarray(starts, np.int64) - (ends - counts), counts)
    return ranges + np.arange(len(ranges))


# -- tilings -----------------------------------------------------------------------------------------------------------

# Do the boxes of a tensor tile it: every element in exactly one box?
#
# The indicator function of a box is a signed sum of step functions at its corners, and step functions at different
# points are linearly independent. So boxes tile a tensor exactly if and only if their signed corners, added up, cancel
# to the corners of the whole. Each coordinate of each axis is replaced by a random number, and a corner by the product
# of its coordinates' numbers; then the signed sum over all corners of a box is a product, of one difference for each
# axis. That is done twice, with two numbers for each coordinate, modulo a prime of 31 bits: linear in boxes and in axes, no
# sorting, no pairs. The chance of a false "yes" is at most (axes / 2**31)**2. The random numbers are drawn anew in each
# call, so no file can be made to collide on purpose.

_MOST_EXPLAINED = 4096


def tiled(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """Return for each tensor whether its boxes, inside it and not empty, tile it; `tensor`, of each box, is sorted."""
    # An axis that every box spans whole says nothing, except that an empty tensor is empty.
    cut = [d for d in range(boxes.axes) if not np.array_equal(boxes.sizes[:, d], shapes[:, d][tensor])]
    empty: npt.NDArray[np.bool_] = np.any(shapes == 0, axis=1)
    starts = np.flatnonzero(np.diff(tensor, prepend=-1))
    if len(cut) == 1:
        # Most often each box begins where the one before it ends, which is found out in a tenth of the time.
        low, extents = boxes.offsets[:, cut[0]], shapes[tensor[starts], cut[0]]
        begins = np.roll(np.add(low, boxes.sizes[:, cut[0]], dtype=np.int64), 1)
        last, begins[starts] = begins[starts], 0
        if np.array_equal(low, begins) and np.array_equal(last, np.roll(extents, 1)):
            empty[tensor[starts]] = True
            return empty
    rng = default_rng()
    products = np.ones((2, len(boxes)), np.uint64)
    expected = np.ones((2, len(shapes)), np.uint64)
    for d in cut:
        low, extents, weights = boxes.offsets[:, d], shapes[:, d], multipliers(2, rng)
        high = np.add(low, boxes.sizes[:, d], dtype=np.int64)
        products = _folded(products * _span(low, high, weights))
        expected = _folded(expected * _span(np.zeros_like(extents), extents, weights))
    expected[:, empty] = 0
    sums = np.zeros_like(expected)
    if len(starts):
        sums[:, tensor[starts]] = np.add.reduceat(products, starts, axis=1)
    equal: npt.NDArray[np.bool_] = np.all(sums % _PRIME == expected % _PRIME, axis=0)
    return equal


def _span(low: IntArray, high: IntArray, weights: Hashes) -> Hashes:
    """Return the differences of the random numbers of two coordinates of one axis, modulo the prime."""
    return _folded(_numbers(low, weights) + (2 * _PRIME - _numbers(high, weights)))


def _numbers(coordinates: IntArray, weights: Hashes) -> Hashes:
    """Return two random numbers for each coordinate: both halves of a hash."""
    hashes = hash_rows([coordinates], weights)
    return np.stack([hashes >> _33, hashes & _PRIME])


def _folded(numbers: Hashes) -> Hashes:
    """Return equal numbers modulo the prime, just above it at most: 2**31 is 1 here."""
    for _ in range(2):
        numbers = (numbers & _PRIME) + (numbers >> _31)
    return numbers


def explain_tiling(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Say what is wrong with boxes that do not tile a tensor of this shape."""
    some = sorted(boxes[:_MOST_EXPLAINED], key=lambda box: box.offsets)
    for one, other in clashes(some)[:1]:
        return f"boxes {one} and {other} overlap in {intersect(one, other)}"
    covered, total = sum(box.volume for box in boxes), math.prod(shape)
    if covered < total:
        return f"the boxes leave a hole: they cover {covered} of {total} elements"
    return f"the boxes overlap: they cover {covered} elements of {total}"


Hashes = npt.NDArray[np.uint64]

_PRIME = np.uint64(2**31 - 1)
_31, _33 = np.uint64(31), np.uint64(33)


def multipliers(count: int, rng: np.random.Generator) -> Hashes:
    odd: Hashes = rng.integers(0, 2**64, count, dtype=np.uint64) | np.uint64(1)
    return odd


def _mix(hashes: Hashes) -> Hashes:
    """Scramble 64-bit numbers so that sums of them behave as sums of random numbers (the splitmix64 finaliser)."""
    h: Hashes = hashes ^ (hashes >> np.uint64(30))
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def hash_rows(columns: list[IntArray], weights: Hashes) -> Hashes:
    """Fingerprint each row of a table, with one weight a column and one more that keeps a row of zeros from being 0."""
    total = np.full(len(columns[0]), weights[-1])
    for column, weight in zip(columns, weights[:-1], strict=True):
        total += column.astype(np.uint64) * weight
    return _mix(total)


def distinct_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct rows of a matrix, and which of them each row is."""
    rng = default_rng()
    while True:  # until no two different rows have one hash: once
        hashes = hash_rows([*table.T], multipliers(table.shape[1] + 1, rng))
        _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        if np.array_equal(table[first][which], table):
            return table[first], which


IndexItem = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class AxisSlice:
    """Indices `start, start + step, …`, `count` of them, along one axis."""

    start: int
    step: int
    count: int
    drop: bool
    """Whether the axis is dropped: a single index was given."""

    @property
    def extent(self) -> int:
        """Number of indices from the first to the last, both included."""
        return (self.count - 1) * self.step + 1 if self.count else 0


def parse_index(key: str, shape: Ints, item: IndexItem | tuple[IndexItem, ...]) -> tuple[AxisSlice, ...]:
    """Parse an index expression as torch does: integers, slices with positive steps, one Ellipsis."""
    items = item if isinstance(item, tuple) else (item,)
    if sum(part is Ellipsis for part in items) > 1:
        raise IndexError(f"{key!r}: an index can only have one ellipsis")
    given = len(items) - sum(part is Ellipsis for part in items)
    if given > len(shape):
        hint = "" if shape else "; [...] reads it"
        raise IndexError(f"{key!r}: {given} indices for a tensor of {len(shape)} axes{hint}")
    at = next((i for i, part in enumerate(items) if part is Ellipsis), len(items))
    full = (slice(None),) * (len(shape) - given)
    spread = (*items[:at], *full, *items[at + 1 :])
    return tuple(_pick(key, axis, n, part) for axis, (n, part) in enumerate(zip(shape, spread, strict=True)))


def _pick(key: str, axis: int, n: int, part: object) -> AxisSlice:
    if isinstance(part, slice):
        if part.step is not None and int(part.step) <= 0:
            raise ValueError(f"{key!r}: the step of axis {axis} must be positive")
        indices = range(*part.indices(n))
        return AxisSlice(indices.start, indices.step, len(indices), drop=False)
    # True is a mask to numpy and torch, not the index 1.
    is_mask = str(getattr(part, "dtype", type(part).__name__)).endswith("bool")
    try:
        index = None if is_mask else operator.index(part)  # type: ignore[arg-type]  # what is not a number raises
    except TypeError:
        index = None
    if index is None:
        raise IndexError(f"{key!r}: cannot index a stored tensor with {type(part).__name__}")
    if not -n <= index < n:
        raise IndexError(f"{key!r}: index {index} is out of range for axis {axis} of size {n}")
    return AxisSlice(index % n, 1, 1, drop=True)
