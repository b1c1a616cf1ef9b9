"""
The plan of a load: which stored bytes go where, and which reads bring them. Nothing is read here.

`plan_load` intersects every destination box with the stored chunks of its tensor. Where the common part is one run of
bytes both in the file and in the destination it is a *run*, which can be read straight into place; otherwise it is a
*scatter*, copied box by box out of a buffer.

`plan_files` turns these into reads. A block is read whole, because its checksum covers all of it: directly into memory
if it lies inside one run, else once into a buffer, from which its parts are copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    distinct,
    strides_of,
    tiled,
)
from shardkeep.format.index import Chunks, Index
from shardkeep.format.record import FileEntry

T = TypeVar("T")

_GAP_NBYTES = 64 << 10
"""Reading this many unneeded bytes costs less than another request."""
_MOST_PAIRS = 1 << 18
"""How many pairs of a request and a chunk are compared at a time, if no request has more."""


@dataclass(frozen=True)
class ReadRequests(Boxes):
    """Destinations, one row each: a box of a tensor, and the memory it goes to."""

    tensor: IntArray
    """Row in the index."""
    address: IntArray
    """Where the box begins in host memory if its memory is contiguous and has the stored dtype; else 0."""


@dataclass(frozen=True)
class Runs(Rows):
    """Byte ranges that are contiguous both in a file and in memory."""

    file: IntArray
    start: IntArray
    nbytes: IntArray
    address: IntArray


@dataclass(frozen=True, slots=True)
class Scatter:
    """A box that is not contiguous in the file or in memory."""

    file: int
    start: int
    """Byte offset of the chunk in its file's data; -1: it is not stored as plain row-major elements, and the layout says how."""
    shape: Ints
    itemsize: int
    source: Box
    """Inside the chunk."""
    want: int
    """Row of the destination."""
    target: Box
    """The same box, inside the destination."""
    chunk: int = field(default=-1, compare=False)
    """Row of the chunk in the index, or the part of it, that was planned from."""


def plan_load(
    index: Index, requests: ReadRequests, data_nbytes: IntArray, *, aligned: bool = True, complete: bool = True
) -> tuple[Runs, list[Scatter]]:
    """Find the stored bytes of every request, which must tile it if it must be `complete`."""
    owner = np.asarray(index.tensors.alias[requests.tensor], np.int64)
    want, rows = _overlapping(index, owner, requests)
    chunks, tensor = index.chunks.take(rows), owner[want]
    start, file = np.asarray(chunks.start, np.int64), np.asarray(chunks.file, np.int64)
    # Columns of an index may be narrow.
    stored = Boxes(np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64))
    wanted = requests.boxes.take(want)
    low = np.maximum(stored.offsets, wanted.offsets)
    size = np.minimum(stored.offsets + stored.sizes, wanted.offsets + wanted.sizes) - low
    source, target = Boxes(low - stored.offsets, size), Boxes(low - wanted.offsets, size)
    itemsize = ITEMSIZES[index.tensors.dtype[tensor]]
    good = _lie_inside(chunks, stored.volumes() * itemsize, itemsize, data_nbytes, aligned=aligned)
    bad = np.concatenate([want[~good], np.flatnonzero(~tiled(requests.sizes, want, target)) if complete else want[:0]])
    _raise_if_any(index, owner[bad])
    from_start, from_run = _contiguous_runs(stored.sizes, source)
    to_start, to_run = _contiguous_runs(wanted.sizes, target)
    address = requests.address[want]
    run = from_run & to_run & (address != 0) & (start >= 0)
    nbytes = target.volumes() * itemsize
    columns = (file, start + from_start * itemsize, nbytes, address + to_start * itemsize)
    loose = np.flatnonzero(~run)
    ndim = index.tensors.ndim[tensor[loose]].tolist()
    sources, targets, shapes = (_tuples(boxes.take(loose), ndim) for boxes in (source, target, stored))
    plain = (column[loose].tolist() for column in (want, rows, file, start, itemsize))
    scatters = [
        Scatter(at_file, at, shape.sizes, element, inside, number, outside, chunk)
        for number, chunk, at_file, at, element, inside, outside, shape in zip(
            *plain, sources, targets, shapes, strict=True
        )
    ]
    return Runs(*(column[run] for column in columns)), scatters


def _overlapping(index: Index, owner: IntArray, requests: ReadRequests) -> tuple[IntArray, IntArray]:
    """Return the pairs of a request and a stored chunk of its tensor that overlap; sorted by request, then by chunk."""
    first, count = chunk_rows(index, owner)
    found: list[tuple[IntArray, IntArray]] = [(first[:0], first[:0])]
    # In batches, because most pairs of a tensor of many chunks do not overlap.
    batch = (np.cumsum(count) - count) // _MOST_PAIRS
    for some in np.split(np.arange(len(count)), np.flatnonzero(np.diff(batch)) + 1):
        want, row = np.repeat(some, count[some]), concat_ranges(first[some], count[some])
        for axis in range(requests.axes):
            low, size = (np.asarray(column[row, axis], np.int64) for column in index.chunks.boxes.columns())
            begin, extent = (column[want, axis] for column in requests.boxes.columns())
            touching = np.maximum(low, begin) < np.minimum(low + size, begin + extent)
            if not touching.all():
                want, row = want[touching], row[touching]
        found.append((want, row))
    wants, rows = zip(*found, strict=True)
    return np.concatenate(wants), np.concatenate(rows)


def _contiguous_runs(shapes: IntArray, boxes: Boxes) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return for each box where it begins in the row-major order of its shape, and whether it is contiguous there."""
    start = np.zeros(len(boxes), np.int64)
    contiguous, one_index = np.ones(len(boxes), bool), np.ones(len(boxes), bool)
    for axis in range(boxes.axes):
        full, size = shapes[:, axis], boxes.sizes[:, axis]
        start = start * full + boxes.offsets[:, axis]
        contiguous &= one_index | (size == full)
        one_index &= size == 1
    return start, contiguous


def _tuples(boxes: Boxes, ndim: Sequence[int]) -> list[Box]:
    rows = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), ndim, strict=True)
    return [Box(tuple(offsets[:n]), tuple(sizes[:n])) for offsets, sizes, n in rows]


def check_tensors(index: Index, tensors: IntArray, data_nbytes: IntArray, *, aligned: bool = True) -> None:
    """Check that the stored chunks of these tensors tile them, lie inside their files and, if asked, are `aligned`."""
    chunks, local = _chunks_of(index, tensors)
    good = tiled(index.tensors.shape[tensors], local, chunks)
    itemsize = ITEMSIZES[index.tensors.dtype[tensors]][local]
    good[local[~_lie_inside(chunks, chunks.volumes() * itemsize, itemsize, data_nbytes, aligned=aligned)]] = False
    _raise_if_any(index, tensors[~good])


def _lie_inside(
    chunks: Chunks, nbytes: IntArray, itemsize: IntArray, data_nbytes: IntArray, *, aligned: bool
) -> npt.NDArray[np.bool_]:
    """Return for each chunk whether it lies inside its file and, if it must be `aligned`, begins between two elements."""
    file, start = np.asarray(chunks.file, np.int64), np.asarray(chunks.start, np.int64)
    inside: npt.NDArray[np.bool_] = file < len(data_nbytes)
    # Compared by subtraction: start and length of a forged chunk, added up, may overflow.
    inside &= start <= np.append(data_nbytes, -1)[np.minimum(file, len(data_nbytes))] - nbytes
    return inside & (start >= 0) & (start % itemsize == 0) if aligned else inside | (start < 0)


def _raise_if_any(index: Index, bad: IntArray) -> None:
    if len(bad):
        key = index.keys.raw(int(bad.min())).decode()
        raise MalformedFile(
            f"the stored chunks of {key!r} overlap, leave a hole, lie outside their files or begin inside an element",
            key=key,
        )


def is_tiled(index: Index, tensors: IntArray) -> npt.NDArray[np.bool_]:
    """Return for each of these tensors whether its stored chunks tile it."""
    chunks, local = _chunks_of(index, tensors)
    return tiled(index.tensors.shape[tensors], local, chunks)


def _chunks_of(index: Index, tensors: IntArray) -> tuple[Chunks, IntArray]:
    """Return the chunks of these tensors, and the position of the tensor of each."""
    first, counts = chunk_rows(index, tensors)
    return index.chunks.take(concat_ranges(first, counts)), np.repeat(np.arange(len(tensors)), counts)


def tensor_nbytes(index: Index, tensors: IntArray) -> int:
    owners = distinct(index.tensors.alias[tensors])
    elements = np.asarray(index.tensors.shape, np.int64)[owners].prod(axis=1)
    return int((elements * ITEMSIZES[index.tensors.dtype[owners]]).sum())


def chunk_rows(index: Index, tensors: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row of each tensor's first chunk, and how many chunks it has."""
    first = np.asarray(index.chunk_ends[np.maximum(tensors - 1, 0)], np.int64) * (tensors > 0)
    return first, np.asarray(index.chunk_ends[tensors], np.int64) - first


class Read(NamedTuple):
    """Adjacent blocks to read in one request, or a part of a run to copy out of a buffer."""

    start: int
    """Byte offset in the file's data; where blocks are read, at the beginning of one."""
    nbytes: int
    address: int
    """Where the bytes go in memory; 0: into a buffer."""


class Intervals(Generic[T]):
    """Items that each cover a range of a file's data, found by a range that they may touch."""

    def __init__(self, low: Sequence[int], high: Sequence[int], items: Sequence[T]) -> None:
        order = sorted(range(len(items)), key=low.__getitem__)
        self._first = [low[i] for i in order]
        # The furthest end of each item and all before it, because the ends alone are not sorted.
        self._reach = list(accumulate((high[i] for i in order), max))
        self._items = [items[i] for i in order]

    def touching(self, start: int, stop: int) -> list[T]:
        """Return all items that touch a range, and possibly some that do not."""
        return self._items[bisect_right(self._reach, start) : bisect_left(self._first, stop)]


@dataclass(frozen=True)
class FileReads:
    file: int
    reads: list[Read]
    edges: Intervals[Read]
    scatters: Intervals[Scatter]
    """By the range from the first of their wanted bytes to the last."""


def plan_files(
    runs: Runs, scatters: Sequence[Scatter], files: Sequence[FileEntry], *, window_nbytes: int
) -> list[FileReads]:
    runs = runs.take(np.argsort(runs.file, kind="stable"))
    by_file: dict[int, list[Scatter]] = {}
    for scatter in scatters:
        by_file.setdefault(scatter.file, []).append(scatter)
    wanted = sorted({*distinct(runs.file).tolist(), *by_file})
    low = np.searchsorted(runs.file, wanted, "left").tolist()
    high = np.searchsorted(runs.file, wanted, "right").tolist()
    return [
        plan_reads(
            file,
            runs.take(slice(a, b)),
            by_file.get(file, []),
            data_nbytes=files[file].data_nbytes,
            block_nbytes=files[file].block_nbytes,
            window_nbytes=window_nbytes,
        )
        for file, a, b in zip(wanted, low, high, strict=True)
    ]


def plan_reads(
    file: int, runs: Runs, scatters: Sequence[Scatter], *, data_nbytes: int, block_nbytes: int, window_nbytes: int
) -> FileReads:
    """Turn what is wanted of one file into reads; with `block_nbytes` 0, nothing unwanted but small gaps."""
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
    # Edges are the parts of runs that share their block with something else: heads, tails, and whole small runs.
    edge_low = np.concatenate([runs.start, outer[direct]])
    edge_high = np.concatenate([np.where(direct, inner, stop), stop[direct]])
    edge_address = np.concatenate([runs.address, (runs.address + outer - runs.start)[direct]])
    keep = edge_high > edge_low
    edge_low, edge_high, edge_address = edge_low[keep], edge_high[keep], edge_address[keep]
    spans = [_spans(scatter, gap_nbytes) for scatter in scatters]
    span_columns = np.concatenate([np.empty((0, 2), np.int64), *spans])
    low = np.concatenate([edge_low, span_columns[:, 0]]) // block_nbytes
    high = -(-np.concatenate([edge_high, span_columns[:, 1]]) // block_nbytes)
    for first, last in _union(low, high):
        begin, end = first * block_nbytes, min(last * block_nbytes, data_nbytes)
        reads.extend(Read(at, min(window_nbytes, end - at), 0) for at in range(begin, end, window_nbytes))
    reads.sort(key=lambda read: read.start)
    lows, highs = edge_low.tolist(), edge_high.tolist()
    edges = [Read(at, end - at, address) for at, end, address in zip(lows, highs, edge_address.tolist(), strict=True)]
    return FileReads(
        file=file,
        reads=reads,
        edges=Intervals(lows, highs, edges),
        scatters=Intervals([int(span[0, 0]) for span in spans], [int(span[-1, 1]) for span in spans], scatters),
    )


def every_block(file: int, data_nbytes: int, *, window_nbytes: int) -> FileReads:
    """Plan to read all of a file and keep nothing: to verify it."""
    reads = [Read(at, min(window_nbytes, data_nbytes - at), 0) for at in range(0, data_nbytes, window_nbytes)]
    return FileReads(file, reads, Intervals([], [], []), Intervals([], [], []))


def _union(low: IntArray, high: IntArray) -> list[tuple[int, int]]:
    if len(low) == 0:
        return []
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.flatnonzero(np.concatenate([[True], low[1:] > high[:-1]]))
    ends = high[np.append(new[1:], len(low)) - 1]
    return list(zip(low[new].tolist(), ends.tolist(), strict=True))


def _spans(scatter: Scatter, gap_nbytes: int) -> IntArray:
    """Return byte ranges, in order, that hold a scatter's wanted bytes without gaps of more than a block."""
    box, size, axes = scatter.source, scatter.itemsize, range(len(scatter.shape))
    strides = [stride * size for stride in strides_of(scatter.shape)]
    # From the first to the last wanted byte of the sub-box from each axis on.
    inner = [size + sum((box.sizes[axis] - 1) * strides[axis] for axis in axes[first:]) for first in (*axes, len(axes))]
    # Along the leading axes, neighbours further apart than a block become ranges of their own.
    split = 0
    while split < len(axes) and (box.sizes[split] == 1 or strides[split] - inner[split + 1] > gap_nbytes):
        split += 1
    starts = np.array([scatter.start + sum(box.offsets[axis] * strides[axis] for axis in axes[split:])], np.int64)
    for axis in axes[:split]:
        steps = np.arange(box.offsets[axis], box.offsets[axis] + box.sizes[axis]) * strides[axis]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return np.stack([starts, starts + inner[split]], axis=1)
