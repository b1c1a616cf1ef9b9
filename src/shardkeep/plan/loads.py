"""
The plan of a load: which stored bytes go where.

Every destination box is intersected with the stored boxes of its tensor. Where the common part is one run of bytes
both in the file and in the destination it is a *run*, which can be read straight into place; otherwise it is a
*scatter*, copied box by box out of a buffer. Pure functions on columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkeep.errors import MalformedFile
from shardkeep.format.columns import ITEMSIZES, Boxes, IntArray, Rows, concat_ranges
from shardkeep.format.index import Chunks, Index
from shardkeep.format.region import Box, Ints, contiguous_run, intersect, relative
from shardkeep.plan.tiling import tiled


@dataclass(frozen=True)
class Wants(Rows):
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


def plan_load(index: Index, wants: Wants, data_nbytes: IntArray) -> tuple[Runs, list[Scatter]]:
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
    wants: Wants,
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


def _overlapping(chunks: Chunks, wants: Wants, want: int) -> list[int]:
    offsets, sizes = np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64)
    low = np.maximum(offsets, wants.offsets[want])
    high = np.minimum(offsets + sizes, wants.offsets[want] + wants.sizes[want])
    rows: list[int] = np.flatnonzero(np.all(high > low, axis=1)).tolist()
    return rows
