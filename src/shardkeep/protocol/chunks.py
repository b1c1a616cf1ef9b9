"""
Boxes of tensors: which of them overlap, and where.

A box is anything with `offsets` and `sizes`. One without elements overlaps nothing; that of a 0-dim tensor has one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol


class Box(Protocol):
    """A chunk or a shard, ours or torch's."""

    @property
    def offsets(self) -> Sequence[int]:
        """Where it begins in the whole tensor."""

    @property
    def sizes(self) -> Sequence[int]:
        """How far it goes."""


def boxes_overlap(shard1: Box, shard2: Box) -> bool:
    """Say whether two boxes of a tensor have an element in common."""
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(shard1.offsets, shard1.sizes, shard2.offsets, shard2.sizes, strict=True)
    )


def overlap_region(saved_shard: Box, current_shard: Box) -> list[tuple[int, int, int, int]]:
    """
    Return where two boxes that overlap have their common part.

    For each axis: its number, where the part begins in the saved box and in the current one, and its length.
    """
    axes = zip(saved_shard.offsets, saved_shard.sizes, current_shard.offsets, current_shard.sizes, strict=True)
    region = []
    for axis, (saved, saved_size, current, current_size) in enumerate(axes):
        low = max(saved, current)
        high = min(saved + saved_size, current + current_size)
        region.append((axis, low - saved, low - current, high - low))
    return region


def overlaps(wanted: Sequence[Box], stored: Sequence[Box]) -> list[tuple[int, int]]:
    """
    Return the pairs (of `wanted`, of `stored`) that overlap, in order.

    The stored boxes are sorted along the axis that cuts them most, so that a wanted one is compared with few.
    """
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


def clashes(boxes: Sequence[Box]) -> list[tuple[Box, Box]]:
    """
    Return pairs of boxes that overlap: none if and only if no two do.

    Boxes are divided along an axis wherever no box crosses, then along the others, so that those of any grid are soon
    alone; only those that cannot be divided so are compared in pairs.
    """
    found: list[tuple[Box, Box]] = []
    pending = [[box for box in boxes if all(box.sizes)]]
    while pending:
        group = pending.pop()
        if len(group) < 2:
            continue
        parts = next((parts for axis in range(len(group[0].sizes)) if len(parts := _divided(group, axis)) > 1), None)
        if parts is None:
            found += _compared(group)
        else:
            pending += parts
    return found


def _divided(group: list[Box], axis: int) -> list[list[Box]]:
    """Cut a group along an axis wherever no box crosses the cut."""
    parts: list[list[Box]] = []
    reach = -1
    for box in sorted(group, key=lambda each: each.offsets[axis]):
        if not parts or box.offsets[axis] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box.offsets[axis] + box.sizes[axis])
    return parts


def _compared(group: list[Box]) -> list[tuple[Box, Box]]:
    """Compare boxes in pairs, but each only with those that begin before it ends, along the axis that cuts most."""
    axes = range(len(group[0].sizes))
    if not axes:
        return list(itertools.pairwise(group))
    axis = max(axes, key=lambda each: len({box.offsets[each] for box in group}))
    inorder = sorted(group, key=lambda each: each.offsets[axis])
    found: list[tuple[Box, Box]] = []
    starts = [box.offsets[axis] for box in inorder]
    for number, box in enumerate(inorder):
        last = bisect_left(starts, box.offsets[axis] + box.sizes[axis])
        rivals = inorder[number + 1 : last]
        found += [(box, other) for other in rivals if boxes_overlap(box, other)]
    return found


def within(outer_box_size: Sequence[int], inner_box: Box) -> bool:
    """Say whether a box lies inside a tensor of this size."""
    return len(outer_box_size) == len(inner_box.offsets) == len(inner_box.sizes) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(inner_box.offsets, inner_box.sizes, outer_box_size, strict=True)
    )
