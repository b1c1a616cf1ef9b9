"""
Out of a window of a file, to where its bytes belong: runs, rows and boxes.

Windows are cut at multiples of every element size, but files of other makers may begin a tensor anywhere, so that an
element lies in two windows. Its bytes are then kept until all of them are there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from shardkeep.format.region import Box, contiguous_run, flat_range_to_boxes, intersect, relative, whole
from shardkeep.plan.loads import Scatter
from shardkeep.plan.ranges import Edge, FileReads, Read
from shardkeep.stage.memory import Scattered, copy_memory
from shardkeep.store.aligned import address_of


class Copies:
    """What all threads of a read copy; `scattered` gives the memory of scatters by want."""

    def __init__(self, scattered: Mapping[int, Scattered]) -> None:
        self._scattered = scattered
        self._lock = threading.Lock()
        self._cut: dict[tuple[Scatter, int], dict[int, bytes]] = {}
        """Parts of elements that lie in more than one window, by where in the element they begin."""

    def copy(self, reads: FileReads, read: Read, window: memoryview) -> None:
        """Copy all that is wanted of a window, which may then be used again."""
        stop = read.start + read.nbytes
        _copy_edges(reads.edges.touching(read.start, stop), read, window)
        on_accelerators: dict[int, Scattered] = {}
        try:
            for scatter in reads.scatters.touching(read.start, stop):
                target = self._scattered[scatter.want]
                if target.accelerator is not None:
                    on_accelerators[target.accelerator] = target
                self._copy_scatter(scatter, read, window, target)
        finally:
            for target in on_accelerators.values():
                target.wait()  # the window is needed again

    def _copy_scatter(self, scatter: Scatter, read: Read, window: memoryview, target: Scattered) -> None:
        """Copy what this window holds of a scatter: as rows or one run if it is that on both sides, else by boxes."""
        if target.write_chunk(scatter.shape, scatter.source, scatter.target, window, read.start - scatter.start):
            return
        run = contiguous_run(scatter.shape, scatter.source)
        to = target.run_of(scatter.target) if run else None
        if run is None or to is None:
            self.copy_boxes(scatter, read, window, target)
            return
        first = scatter.start + run[0] * scatter.itemsize
        low = max(read.start, first)
        high = min(read.start + read.nbytes, first + run[1] * scatter.itemsize)
        if high > low:
            target.write_run(to + low - first, window[low - read.start : high - read.start])

    def copy_boxes(self, scatter: Scatter, read: Read, window: memoryview, target: Scattered) -> None:
        """Copy the window's part of the chunk, as boxes, met with what is wanted."""
        size = scatter.itemsize
        before = read.start - scatter.start
        low = max(before, 0)
        high = min(before + read.nbytes, whole(scatter.shape).volume * size)
        first, last = -(-low // size), high // size
        if first < last:
            _copy_elements(scatter, first, last, window[first * size - before : last * size - before], target)
        for element in {low // size, high // size}:
            begin, end = max(low, element * size), min(high, (element + 1) * size)
            if 0 < end - begin < size:
                part = bytes(window[begin - before : end - before])
                self._copy_cut(scatter, element, begin - element * size, part, target)

    def _copy_cut(self, scatter: Scatter, element: int, at: int, part: bytes, target: Scattered) -> None:
        """Keep a part of an element, or copy the element if this was the last part of it."""
        (box,) = flat_range_to_boxes(scatter.shape, element, element + 1)
        if intersect(box, scatter.source) is None:
            return  # and its other parts may never be read
        with self._lock:
            parts = self._cut.setdefault((scatter, element), {})
            parts[at] = part
            if sum(map(len, parts.values())) < scatter.itemsize:
                return
            del self._cut[scatter, element]
        joined = bytearray().join(parts[begin] for begin in sorted(parts))
        _copy_elements(scatter, element, element + 1, memoryview(joined), target)


def _copy_elements(scatter: Scatter, first: int, last: int, data: memoryview, target: Scattered) -> None:
    """Copy those of these elements of a chunk that are wanted."""
    at = 0
    for box in flat_range_to_boxes(scatter.shape, first, last):
        nbytes = box.volume * scatter.itemsize
        if common := intersect(box, scatter.source):
            inside = relative(common, scatter.source)
            offsets = tuple(t + i for t, i in zip(scatter.target.offsets, inside.offsets, strict=True))
            target.write(Box(offsets, common.sizes), data[at : at + nbytes], box.sizes, relative(common, box))
        at += nbytes


def _copy_edges(edges: Iterable[Edge], read: Read, window: memoryview) -> None:
    source = address_of(window) - read.start
    stop = read.start + read.nbytes
    for start, nbytes, address in edges:
        low = max(start, read.start)
        high = min(start + nbytes, stop)
        if high > low:
            copy_memory(address + low - start, source + low, high - low)
