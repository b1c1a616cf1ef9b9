"""
Which file of its rank a chunk goes to: one for each group, but several for a large one, so that they are written at once.

A kernel lets one thread at a time write to a file, so one file is written at half the speed of four or less. Chunks
stay whole. Pure: the same chunks give the same parts.
"""

from __future__ import annotations

import heapq

import numpy as np

from shardkeep.format.columns import IntArray
from shardkeep.plan.balance import SLICE_NBYTES, water_level

PART_NBYTES = 256 << 20
"""A group is cut only into parts of at least this size: smaller files cost more than they save."""
MOST_PARTS = 8
"""Of all groups of a rank together, but that their numbers are rounded."""
ENOUGH_FILES = 64
"""Many ranks cut into fewer parts, or not at all: those of one machine write several files at once without it."""


def share_out(slot: IntArray, rank_of_slot: IntArray, tensor: IntArray, nbytes: IntArray, world_size: int) -> IntArray:
    """
    Divide the chunks of every slot, the data of one rank and group, into parts of about equal size.

    Args:
        slot: of each chunk.
        rank_of_slot: whose each slot is.
        tensor: of each chunk; those of neighbours are read together.
        nbytes: of each chunk.
        world_size: how many ranks there are.

    Returns:
        The part of each chunk, from 0.

    """
    part = np.zeros(len(slot), np.int64)
    most = min(MOST_PARTS, ENOUGH_FILES // world_size)
    # float64 holds byte counts exactly up to 8 PiB, which is what bincount adds in.
    in_slot = np.bincount(slot, weights=nbytes, minlength=len(rank_of_slot))
    of_rank = np.bincount(rank_of_slot, weights=in_slot, minlength=world_size)
    target = np.maximum(PART_NBYTES, of_rank / max(1, most))[rank_of_slot]
    wanted = np.rint(in_slot / target).astype(np.int64)
    for each in np.flatnonzero((wanted > 1) & (most > 1)).tolist():
        rows = np.flatnonzero(slot == each)
        rows = rows[np.argsort(tensor[rows], kind="stable")]
        part[rows] = _cut_well(nbytes[rows], int(wanted[each]))
    return part


def _cut_well(nbytes: IntArray, parts: int) -> IntArray:
    """Cut into at most so many parts, fewer where large chunks leave too little for the others."""
    while parts > 1:
        part = cut(nbytes, parts)
        if np.bincount(part, weights=nbytes, minlength=parts).min() >= PART_NBYTES:
            return part
        parts -= 1
    return np.zeros(len(nbytes), np.int64)


def cut(nbytes: IntArray, parts: int) -> IntArray:
    """
    Divide chunks into parts; return the part of each.

    Large ones go one by one, the largest first, where there is least. Small ones then fill these up to one level,
    neighbours together: they are read in one request.
    """
    part = np.zeros(len(nbytes), np.int64)
    loads = [(0, each) for each in range(parts)]
    large = np.flatnonzero(nbytes >= SLICE_NBYTES)
    for row in large[np.argsort(-nbytes[large], kind="stable")].tolist():
        load, least = loads[0]
        part[row] = least
        heapq.heapreplace(loads, (load + int(nbytes[row]), least))
    small = np.flatnonzero(nbytes < SLICE_NBYTES)
    held, order = np.array(sorted(loads), np.int64).T
    ends = np.cumsum(nbytes[small])
    if len(small):
        room = np.maximum(water_level(held.astype(np.float64), float(ends[-1])) - held, 0.0)
        middle = ends - nbytes[small] / 2
        part[small] = order[np.minimum(np.searchsorted(np.cumsum(room), middle), parts - 1)]
    return part
