"""
From runs and scatters of one file to reads: whole checksummed blocks, coalesced, straight into place where possible.

A block is read whole, because its checksum covers all of it. Blocks that lie inside one run are read directly into
the run's memory; every other needed block is read once into a buffer, from which its parts are copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.format.columns import IntArray
from shardkeep.format.region import Box, Ints
from shardkeep.plan.loads import Runs, Scatter

T = TypeVar("T")

_GAP_NBYTES = 64 << 10
"""Reading this much in vain costs less than asking once more."""


@dataclass(frozen=True, slots=True)
class Read:
    """Adjacent blocks to read in one request."""

    start: int
    """Byte offset in the file's data; the beginning of a block."""
    nbytes: int
    address: int
    """Where they go; 0: into a buffer."""


class Edge(NamedTuple):
    """Part of a run to copy out of a buffer."""

    start: int
    nbytes: int
    address: int


class Intervals(Generic[T]):
    """Things that each take up a range of a file's data, found by a range that they may touch."""

    def __init__(self, low: Sequence[int], high: Sequence[int], items: Sequence[T]) -> None:
        order = sorted(range(len(items)), key=low.__getitem__)
        self._first = [low[i] for i in order]
        # The furthest end of each and all before it: ends alone are not in order.
        self._reach = list(accumulate((high[i] for i in order), max))
        self._items = [items[i] for i in order]

    def touching(self, start: int, stop: int) -> list[T]:
        """Return all that touch a range, and perhaps some that do not."""
        return self._items[bisect_right(self._reach, start) : bisect_left(self._first, stop)]


@dataclass(frozen=True)
class FileReads:
    """Everything to do with one file."""

    file: int
    reads: list[Read]
    edges: Intervals[Edge]
    scatters: Intervals[Scatter]
    """By the range from the first of their wanted bytes to the last."""


def plan_reads(
    file: int, runs: Runs, scatters: Sequence[Scatter], *, data_nbytes: int, block_nbytes: int, window_nbytes: int
) -> FileReads:
    """
    Turn what is wanted of one file into reads of at most `window_nbytes`.

    With `block_nbytes` 0 there are no checksums, and nothing is read that is not wanted but for small gaps.
    """
    gap_nbytes = block_nbytes or _GAP_NBYTES
    block_nbytes = block_nbytes or 1
    stop = runs.start + runs.nbytes
    inner = -(-runs.start // block_nbytes) * block_nbytes
    # The last block may be short; a run that reaches the end of the data has all of it.
    outer = np.where(stop == data_nbytes, stop, stop // block_nbytes * block_nbytes)
    direct = outer > inner
    reads = [
        Read(at, min(window_nbytes, end - at), address + at - start)
        for start, low, end, address in zip(
            *(c[direct].tolist() for c in (runs.start, inner, outer, runs.address)), strict=True
        )
        for at in range(low, end, window_nbytes)
    ]
    edge_low, edge_high, edge_address = _edges(runs, stop, inner, outer, direct)
    spans = [span for scatter in scatters for span in _spans(scatter, gap_nbytes)]
    span_columns = np.array(spans, np.int64).reshape(-1, 2)
    low = np.concatenate([edge_low, span_columns[:, 0]]) // block_nbytes
    high = -(-np.concatenate([edge_high, span_columns[:, 1]]) // block_nbytes)
    for first, last in _union(low, high):
        begin, end = first * block_nbytes, min(last * block_nbytes, data_nbytes)
        reads.extend(Read(at, min(window_nbytes, end - at), 0) for at in range(begin, end, window_nbytes))
    reads.sort(key=lambda read: read.start)
    lows, highs = edge_low.tolist(), edge_high.tolist()
    edges = [Edge(at, end - at, address) for at, end, address in zip(lows, highs, edge_address.tolist(), strict=True)]
    wanted = [wanted_bytes(scatter) for scatter in scatters]
    return FileReads(
        file=file,
        reads=reads,
        edges=Intervals(lows, highs, edges),
        scatters=Intervals([first for first, _ in wanted], [last for _, last in wanted], scatters),
    )


def every_block(file: int, data_nbytes: int, *, window_nbytes: int) -> FileReads:
    """Plan to read all of a file and keep nothing: to check it."""
    reads = [Read(at, min(window_nbytes, data_nbytes - at), 0) for at in range(0, data_nbytes, window_nbytes)]
    return FileReads(file, reads, Intervals([], [], []), Intervals([], [], []))


def _edges(
    runs: Runs, stop: IntArray, inner: IntArray, outer: IntArray, direct: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray, IntArray]:
    """
    Find the parts of runs that share their block with something else: heads, tails, and whole small runs.

    Returns where they begin and end, and their addresses.
    """
    low = np.concatenate([runs.start, outer[direct]])
    high = np.concatenate([np.where(direct, inner, stop), stop[direct]])
    address = np.concatenate([runs.address, (runs.address + outer - runs.start)[direct]])
    keep = np.flatnonzero(high > low)
    return low[keep], high[keep], address[keep]


def _union(low: IntArray, high: IntArray) -> list[tuple[int, int]]:
    """Merge intervals that touch or overlap."""
    if len(low) == 0:
        return []
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.flatnonzero(np.concatenate([[True], low[1:] > high[:-1]]))
    ends = high[np.append(new[1:], len(low)) - 1]
    return list(zip(low[new].tolist(), ends.tolist(), strict=True))


def wanted_bytes(scatter: Scatter) -> tuple[int, int]:
    """Return where the wanted bytes of a scatter begin and end in the file's data."""
    first, last = _flat_extent(scatter.shape, scatter.source)
    return scatter.start + first * scatter.itemsize, scatter.start + last * scatter.itemsize


def _spans(scatter: Scatter, gap_nbytes: int) -> list[tuple[int, int]]:
    """Return byte ranges that hold a scatter's wanted bytes, skipping gaps of more than a block."""
    shape, box, size = scatter.shape, scatter.source, scatter.itemsize
    strides = [size] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    # Along the leading axes, neighbours further apart than a block are ranges of their own.
    split = 0
    inner = [_extent_nbytes(strides, box, axis) for axis in range(len(shape) + 1)]
    while split < len(shape) and (box.sizes[split] == 1 or strides[split] - inner[split + 1] > gap_nbytes):
        split += 1
    bases = np.zeros(1, np.int64)
    for axis in range(split):
        steps = np.arange(box.offsets[axis], box.offsets[axis] + box.sizes[axis]) * strides[axis]
        bases = (bases[:, None] + steps[None, :]).reshape(-1)
    base = scatter.start + sum(o * s for o, s in zip(box.offsets[split:], strides[split:], strict=True))
    length = inner[split] if split < len(shape) else size
    return [(base + at, base + at + length) for at in bases.tolist()]


def _extent_nbytes(strides: list[int], box: Box, axis: int) -> int:
    """Return the bytes from the first to the last wanted element of the sub-box below `axis`."""
    return sum((n - 1) * s for n, s in zip(box.sizes[axis:], strides[axis:], strict=True)) + (
        strides[-1] if strides else 0
    )


def _flat_extent(shape: Ints, box: Box) -> tuple[int, int]:
    first = last = 0
    for offset, count, full in zip(box.offsets, box.sizes, shape, strict=True):
        first = first * full + offset
        last = last * full + offset + count - 1
    return first, last + 1
