"""
Do the boxes of a tensor tile it: every element in exactly one box?

The indicator function of a box is a signed sum of step functions at its corners, and step functions at different
points are linearly independent. So boxes tile a tensor exactly if and only if their signed corners, added up, cancel
to the corners of the whole. Each coordinate of each axis is replaced by a random number, and a corner by the product
of its coordinates' numbers; then the signed sum over all corners of a box is a product, of one difference for each
axis. The sums are compared modulo a prime of 61 bits: linear in boxes and in axes, no sorting, no pairs. A false "yes"
has a chance of at most axes / 2**61.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng  # not when first used: see plan/save_plan.py

from shardkeep.format.boxes import Box, Boxes, IntArray, intersect
from shardkeep.plan import fingerprint

_MOST_EXPLAINED = 4096


def tiled(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """
    For each tensor say whether its boxes tile it.

    `tensor` gives each box's tensor and is sorted; boxes lie inside their tensors and are not empty.
    """
    rng = default_rng()
    sums = np.ones(len(boxes), np.uint64)
    expected = np.ones(len(shapes), np.uint64)
    for d in range(boxes.axes):
        offsets, sizes, whole = boxes.offsets[:, d], boxes.sizes[:, d], shapes[:, d]
        if np.array_equal(sizes, whole[tensor]):
            continue  # an axis that every box spans whole says nothing, except that an empty tensor is empty
        weights = fingerprint.multipliers(2, rng)
        sums = fingerprint.times(sums, _span(offsets, offsets + sizes, weights))
        expected = fingerprint.times(expected, _span(np.zeros_like(whole), whole, weights))
    expected[np.any(shapes == 0, axis=1)] = 0
    equal: npt.NDArray[np.bool_] = fingerprint.add_up(sums, tensor, len(shapes)) == expected
    return equal


def _span(low: IntArray, high: IntArray, weights: fingerprint.Hashes) -> fingerprint.Hashes:
    """Return the difference of the random numbers of two coordinates of one axis."""
    return fingerprint.minus(fingerprint.of_rows([low], weights), fingerprint.of_rows([high], weights))


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
