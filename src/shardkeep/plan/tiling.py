"""
Do the boxes of a tensor tile it: every element in exactly one box?

The indicator function of a box is a signed sum of step functions at its corners, and step functions at different
points are linearly independent. So boxes tile a tensor exactly if and only if their signed corners, added up, cancel
to the corners of the whole. Each corner is replaced by a random 64-bit fingerprint and the sums are compared: linear
in the number of boxes, no sorting, no pairs. A false "yes" has a chance of about 2**-64.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.region import Box, intersect
from shardkeep.plan import fingerprint

_MOST_EXPLAINED = 4096


def tiled(shapes: IntArray, tensor: IntArray, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """
    For each tensor say whether its boxes tile it.

    `tensor` gives each box's tensor and is sorted; boxes lie inside their tensors and are not empty.
    """
    rng = np.random.default_rng()
    used = [d for d in range(boxes.axes) if np.any(boxes.sizes[:, d] != shapes[tensor, d])]
    # An axis that every box spans whole says nothing, except that an empty tensor is empty.
    weights = fingerprint.multipliers(len(used) + 2, rng)
    sums = np.zeros(len(shapes), np.uint64)
    expected = np.zeros(len(shapes), np.uint64)
    full = np.prod(shapes, axis=1, dtype=np.int64) > 0
    starts = np.flatnonzero(np.diff(tensor, prepend=-1))
    for corner in range(1 << len(used)):
        upper = [(corner >> i) & 1 for i in range(len(used))]
        points = [boxes.offsets[:, d] + (boxes.sizes[:, d] if up else 0) for d, up in zip(used, upper, strict=True)]
        outer = [shapes[:, d] if up else np.zeros(len(shapes), np.int64) for d, up in zip(used, upper, strict=True)]
        at_boxes = fingerprint.of_rows([tensor, *points], weights)
        at_whole = fingerprint.of_rows([np.arange(len(shapes)), *outer], weights)
        at_whole[~full] = 0
        if sum(upper) % 2:
            at_boxes, at_whole = -at_boxes, -at_whole
        if len(tensor):
            sums[tensor[starts]] += np.add.reduceat(at_boxes, starts)
        expected += at_whole
    equal: npt.NDArray[np.bool_] = sums == expected
    return equal


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
