"""
The plan of a load: which stored bytes go where.

Every destination box is intersected with the stored boxes of its tensor. Where the common part is one run of bytes
both in the file and in the destination it is a *run*, which can be read straight into place; otherwise it is a
*scatter*, copied box by box out of a buffer. Pure functions on columns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import (
    ITEMSIZES,
    Box,
    Boxes,
    IntArray,
    Ints,
    Rows,
    concat_ranges,
    contiguous_run,
    intersect,
    relative,
)
from shardkeep.format.index import Chunks, Index
from shardkeep.plan.tiling import tiled


@dataclass(frozen=True)
class ReadRequests(Rows):
    """Destinations, one row each: a box of a tensor, and the memory it goes to."""

    tensor: IntArray
    """Row in the index."""
    offsets: IntArray
    sizes: IntArray
    address: IntArray
    """Where the box begins in host memory if it lies there in order, in the stored dtype; else 0."""

    @property
    def boxes(self) -> Boxes:
        """The boxes alone."""
        return Boxes(self.offsets, self.sizes)


@dataclass(frozen=True)
class Runs(Rows):
    """Bytes that are in order both in a file and in memory."""

    file: IntArray
    start: IntArray
    nbytes: IntArray
    address: IntArray


@dataclass(frozen=True, slots=True)
class Scatter:
    """A box that is not in order on one of the two sides."""

    file: int
    start: int
    """Byte offset of the chunk in its file's data."""
    shape: Ints
    """Of the chunk."""
    itemsize: int
    source: Box
    """What is wanted, inside the chunk."""
    want: int
    """Row of the destination."""
    target: Box
    """Where it goes, inside the destination."""


def plan_load(index: Index, wants: ReadRequests, data_nbytes: IntArray) -> tuple[Runs, list[Scatter]]:
    """
    Find the stored bytes of every want.

    Raises:
        MalformedFile: the stored boxes of a wanted tensor do not tile it, or lie outside their files.

    """
    owner = np.asarray(index.tensors.alias[wants.tensor], np.int64)
    check_tensors(index, np.unique(owner), data_nbytes)
    itemsize = ITEMSIZES[index.tensors.dtype[owner]]
    first, count = chunk_rows(index, owner)
    single = (count == 1) & (wants.address != 0)
    at = np.minimum(first, max(0, len(index.chunks) - 1))
    if len(index.chunks):
        chunk = index.chunks.take(at)
        single &= np.all(chunk.offsets == wants.offsets, axis=1) & np.all(chunk.sizes == wants.sizes, axis=1)
    else:
        single[:] = False
    exact = np.flatnonzero(single)
    runs = [
        Runs(
            np.asarray(index.chunks.file[at[exact]], np.int64),
            np.asarray(index.chunks.start[at[exact]], np.int64),
            wants.boxes.volumes()[exact] * itemsize[exact],
            wants.address[exact],
        )
    ]
    scatters: list[Scatter] = []
    loose: list[tuple[int, int, int, int]] = []
    for want in np.flatnonzero(~single).tolist():
        rows = slice(int(first[want]), int(first[want] + count[want]))
        _intersect_chunks(index, wants, want, rows, int(itemsize[want]), loose, scatters)
    columns = np.array(loose, np.int64).reshape(-1, 4).T
    runs.append(Runs(*columns))
    joined = zip(*((r.file, r.start, r.nbytes, r.address) for r in runs), strict=True)
    return Runs(*(np.concatenate(column) for column in joined)), scatters


def check_tensors(index: Index, tensors: IntArray, data_nbytes: IntArray) -> None:
    """Insist that the stored boxes of these tensors tile them, lie inside their files and begin at whole elements."""
    first, counts = chunk_rows(index, tensors)
    rows = concat_ranges(first, counts)
    local = np.repeat(np.arange(len(tensors)), counts)
    chunks = index.chunks.take(rows)
    boxes = Boxes(np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64))
    good = tiled(np.asarray(index.tensors.shape[tensors], np.int64), local, boxes)
    itemsize = ITEMSIZES[index.tensors.dtype[tensors]][local]
    nbytes = boxes.volumes() * itemsize
    file = np.asarray(chunks.file, np.int64)
    inside = file < len(data_nbytes)
    start = np.asarray(chunks.start, np.int64)
    # Start and length of a forged chunk, added up, may wrap.
    inside &= (start >= 0) & (start <= np.append(data_nbytes, -1)[np.minimum(file, len(data_nbytes))] - nbytes)
    # A window of a file is cut at multiples of every element size, so it holds whole elements of such chunks.
    inside &= start % itemsize == 0
    good[local[~inside]] = False
    if not np.all(good):
        key = index.keys.raw(int(tensors[np.flatnonzero(~good)[0]])).decode()
        raise MalformedFile(
            f"the stored boxes of {key!r} overlap, leave a hole, lie outside their files or begin inside an element",
            key=key,
        )


def chunk_rows(index: Index, tensors: IntArray) -> tuple[IntArray, IntArray]:
    """Return where the chunks of each tensor begin, and how many it has."""
    first = np.asarray(index.chunk_ends[np.maximum(tensors - 1, 0)], np.int64) * (tensors > 0)
    return first, np.asarray(index.chunk_ends[tensors], np.int64) - first


def _intersect_chunks(
    index: Index,
    wants: ReadRequests,
    want: int,
    rows: slice,
    itemsize: int,
    runs: list[tuple[int, int, int, int]],
    scatters: list[Scatter],
) -> None:
    tensor = int(wants.tensor[want])
    ndim = int(index.tensors.ndim[tensor])
    box = wants.boxes.box(want, ndim)
    chunks: Chunks = index.chunks.take(rows)
    for row in _overlapping(chunks, wants, want):
        stored = chunks.boxes.box(row, ndim)
        common = intersect(stored, box)
        if common is None:
            continue
        source, target = relative(common, stored), relative(common, box)
        file, start = int(chunks.file[row]), int(chunks.start[row])
        address = int(wants.address[want])
        from_run = contiguous_run(stored.sizes, source) if address else None
        to_run = contiguous_run(box.sizes, target) if from_run else None
        if from_run and to_run:
            runs.append(
                (file, start + from_run[0] * itemsize, common.volume * itemsize, address + to_run[0] * itemsize)
            )
        else:
            scatters.append(Scatter(file, start, stored.sizes, itemsize, source, want, target))


def _overlapping(chunks: Chunks, wants: ReadRequests, want: int) -> list[int]:
    offsets, sizes = np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64)
    low = np.maximum(offsets, wants.offsets[want])
    high = np.minimum(offsets + sizes, wants.offsets[want] + wants.sizes[want])
    rows: list[int] = np.flatnonzero(np.all(high > low, axis=1)).tolist()
    return rows


# From runs and scatters of one file to reads: whole checksummed blocks, coalesced, straight into place where
# possible.
#
# A block is read whole, because its checksum covers all of it. Blocks that lie inside one run are read directly into
# the run's memory; every other needed block is read once into a buffer, from which its parts are copied.

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
