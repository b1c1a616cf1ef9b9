"""
Whether boxes tile a tensor, so that every element is in exactly one box.

The indicator function of a box is a signed sum of step functions at its corners, and step functions at different
points are linearly independent. So boxes tile a tensor exactly if and only if their signed corners, added up, cancel
to the corners of the whole. Each coordinate of each axis is replaced by a random number, and a corner by the product
of its coordinates' numbers; then the signed sum over all corners of a box is a product, of one difference for each
axis. The sums are compared modulo a prime of 61 bits: linear in boxes and in axes, no sorting, no pairs. The chance of a false
"yes" is at most axes / 2**61. The random numbers are drawn anew in each call, so no file can be made to collide on purpose.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng  # imported here: a fork during a lazy import would see half a module

from shardkeep.format.boxes import Box, Boxes, IntArray, intersect

_MOST_EXPLAINED = 4096


def tiled(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """
    Return for each tensor whether its boxes tile it.

    `tensor` gives each box's tensor and is sorted; boxes lie inside their tensors and are not empty.
    """
    rng = default_rng()
    sums = np.ones(len(boxes), np.uint64)
    expected = np.ones(len(shapes), np.uint64)
    for d in range(boxes.axes):
        offsets, sizes, whole = boxes.offsets[:, d], boxes.sizes[:, d], shapes[:, d]
        if np.array_equal(sizes, whole[tensor]):
            continue  # an axis that every box spans whole says nothing, except that an empty tensor is empty
        weights = multipliers(2, rng)
        sums = _times(sums, _span(offsets, offsets + sizes, weights))
        expected = _times(expected, _span(np.zeros_like(whole), whole, weights))
    expected[np.any(shapes == 0, axis=1)] = 0
    equal: npt.NDArray[np.bool_] = _add_up(sums, tensor, len(shapes)) == expected
    return equal


def _span(low: IntArray, high: IntArray, weights: Hashes) -> Hashes:
    """Return the difference of the random numbers of two coordinates of one axis."""
    return _minus(hash_rows([low], weights), hash_rows([high], weights))


def explain(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Say what is wrong with boxes that do not tile a tensor of this shape."""
    some = boxes[:_MOST_EXPLAINED]
    some.sort(key=lambda box: box.offsets)
    for at, box in enumerate(some):
        for other in some[at + 1 :]:
            if box.sizes and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if common := intersect(box, other):
                return f"boxes {box} and {other} overlap in {common}"
    covered = sum(box.volume for box in boxes)
    missing = math.prod(shape) - covered
    if missing > 0:
        return f"the boxes leave a hole: they cover {covered} of {math.prod(shape)} elements"
    return f"the boxes overlap: they cover {covered} elements of {math.prod(shape)}"


Hashes = npt.NDArray[np.uint64]

_PRIME = np.uint64(2**61 - 1)
_61, _32, _29, _3 = np.uint64(61), np.uint64(32), np.uint64(29), np.uint64(3)
_LOW_32, _LOW_29 = np.uint64(2**32 - 1), np.uint64(2**29 - 1)


def multipliers(count: int, rng: np.random.Generator) -> Hashes:
    """Draw odd 64-bit numbers."""
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


def _times(a: Hashes, b: Hashes) -> Hashes:
    """Multiply modulo 2**61 - 1; both are below it."""
    a_high, a_low, b_high, b_low = a >> _32, a & _LOW_32, b >> _32, b & _LOW_32
    low, middle = a_low * b_low, a_high * b_low + a_low * b_high
    # 2**61 is 1 here, so 2**64 is 8, and what stands above bit 29 of the middle counts once.
    return _reduced(
        (a_high * b_high << _3) + (middle >> _29) + ((middle & _LOW_29) << _32) + (low & _PRIME) + (low >> _61)
    )


def _minus(a: Hashes, b: Hashes) -> Hashes:
    """Subtract any 64-bit numbers modulo 2**61 - 1."""
    return _reduced(_reduced(a) + (_PRIME - _reduced(b)))


def _add_up(numbers: Hashes, group: IntArray, groups: int) -> Hashes:
    """Add up the numbers of each group modulo 2**61 - 1; `group` is sorted."""
    sums = np.zeros((2, groups), np.uint64)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    if len(starts):
        # In halves: four billion numbers of 32 bits fit 64.
        for half, part in enumerate((numbers >> _32, numbers & _LOW_32)):
            sums[half, group[starts]] = np.add.reduceat(part, starts)
    two_32 = np.full(groups, 1 << 32, np.uint64)
    return _reduced(_times(_reduced(sums[0]), two_32) + _reduced(sums[1]))


def _reduced(numbers: Hashes) -> Hashes:
    folded: Hashes = (numbers & _PRIME) + (numbers >> _61)
    return np.where(folded >= _PRIME, folded - _PRIME, folded)
