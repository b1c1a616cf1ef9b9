"""
Who writes what is held by several ranks: by real bytes, largest first, to the least loaded; large boxes are poured.

Pouring splits a box along its first axis over the ranks that hold it, so that one large replicated tensor is written
by all of them at once. Pure: the same loads and boxes give the same shares.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkeep.format.columns import IntArray

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
