"""
Who writes what is held by several ranks: by real bytes, largest first, to the least loaded; large boxes are poured.

Pouring splits a box along its first axis over the ranks that hold it, so that one large replicated tensor is written
by all of them at once. Pure: the same loads and boxes give the same shares.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from shardkeep.format.boxes import IntArray

SLICE_NBYTES = 4 << 20
"""A box is split only into slices of at least this size: smaller ones cost more requests than they save."""


def assign(
    load: IntArray, nbytes: IntArray, first: IntArray, count: IntArray, holder: IntArray, rows: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """
    Give each group of replicas to one holder, or split it over several.

    Args:
        load: bytes each rank has to write already; updated in place.
        nbytes: size of each group's box.
        first: where in `holder` each group's ranks begin.
        count: how many they are.
        holder: ranks, group after group, ascending in each.
        rows: extent of each group's box along the axis it can be split on; 1 where it cannot.

    Returns:
        Columns, one row a written slice: the group, the position in `holder` of who writes it, first row, end row.

    """
    slices: list[tuple[int, int, int, int]] = []
    order = np.argsort(-nbytes, kind="stable")
    sizes, starts, counts, extents = nbytes.tolist(), first.tolist(), count.tolist(), rows.tolist()
    ranks = holder.tolist()
    loads = load.tolist()
    for group in order.tolist():
        size, start, stop = sizes[group], starts[group], starts[group] + counts[group]
        if size >= 2 * SLICE_NBYTES and extents[group] > 1:
            for at, begin, end in _pour(loads, ranks[start:stop], size, extents[group]):
                slices.append((group, start + at, begin, end))
                loads[ranks[start + at]] += size * (end - begin) // extents[group]
            continue
        present = [loads[rank] for rank in ranks[start:stop]]
        at = start + present.index(min(present))
        loads[ranks[at]] += size
        slices.append((group, at, 0, extents[group]))
    load[:] = loads
    columns = np.array(slices, np.int64).reshape(-1, 4).T
    return columns[0], columns[1], columns[2], columns[3]


def _pour(loads: list[int], ranks: list[int], nbytes: int, rows: int) -> list[tuple[int, int, int]]:
    """Fill the least loaded ranks up to one level; return (position in ranks, first row, end row)."""
    present = np.array([loads[rank] for rank in ranks], np.float64)
    most = max(1, min(len(ranks), nbytes // SLICE_NBYTES, rows))
    chosen = np.argsort(present, kind="stable")[:most]
    level = water_level(present[chosen], nbytes)
    shares = np.maximum(level - present[chosen], 0.0)
    keep = shares >= min(SLICE_NBYTES / 2, nbytes / (2 * most))
    chosen, shares = chosen[keep], shares[keep]
    order = np.argsort(chosen)
    chosen, shares = chosen[order], shares[order]
    cuts = np.rint(np.cumsum(shares) / shares.sum() * rows).astype(np.int64).tolist()
    parts = zip(chosen.tolist(), [0, *cuts], cuts, strict=False)
    return [(at, begin, end) for at, begin, end in parts if end > begin]


def water_level(loads: npt.NDArray[np.float64], volume: float) -> float:
    """Return the level that `volume` reaches over a floor of ascending heights."""
    counts = np.arange(1, len(loads) + 1)
    levels = (volume + np.cumsum(loads)) / counts
    wet = int(np.flatnonzero(levels >= loads)[-1])
    return float(levels[wet])


# Which file of its rank a chunk goes to: one for each group, but several for a large one, so that they are written at
# once.
#
# A kernel lets one thread at a time write to a file, so one file is written at half the speed of four or less. Chunks
# stay whole. Pure: the same chunks give the same parts.

PART_NBYTES = 256 << 20
"""A group is cut only into parts of at least this size: smaller files cost more than they save."""
MOST_PARTS = 8
"""Of all groups of a rank together, but that their numbers are rounded."""
ENOUGH_FILES = 64
"""Many ranks cut into fewer parts, or not at all: those of one machine write several files at once without it."""


def divide_into_parts(
    slot: IntArray, rank_of_slot: IntArray, tensor: IntArray, nbytes: IntArray, world_size: int
) -> IntArray:
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
        part[rows] = _divide_evenly(nbytes[rows], int(wanted[each]))
    return part


def _divide_evenly(nbytes: IntArray, parts: int) -> IntArray:
    """Cut into at most so many parts, fewer where large chunks leave too little for the others."""
    while parts > 1:
        part = divide_chunks(nbytes, parts)
        if np.bincount(part, weights=nbytes, minlength=parts).min() >= PART_NBYTES:
            return part
        parts -= 1
    return np.zeros(len(nbytes), np.int64)


def divide_chunks(nbytes: IntArray, parts: int) -> IntArray:
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
