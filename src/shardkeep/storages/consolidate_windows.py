"""
Whole tensors from their shards: each output file in windows, filled from the shards that meet them, on several threads.

A window is a run of elements in the order of the output file. What a shard has of it is a run of the shard as well, so
every read is in one piece, whatever axis the tensor was cut along. Memory is two windows a thread, however large the
tensors; several threads work on one file. Files are durable on return; if anything fails, all of them are removed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardkeep.format.columns import IntArray
from shardkeep.format.region import Box, Ints, contiguous_run, flat_range_to_boxes, intersect, relative, slices
from shardkeep.layout.safetensors_files import alignment_of, build_header
from shardkeep.layout.safetensors_names import FORMAT_KEY, FORMAT_VALUE
from shardkeep.layout.safetensors_publish import Names
from shardkeep.run.safetensors_catalog import Chunk, Stored
from shardkeep.run.workers import run_workers, window_for
from shardkeep.storages.safetensors_output import NewFile
from shardkeep.store.protocol import BlobReader, Opens, Store

_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Bytes are moved as these, whatever they mean."""
_MOST_OPEN = 128
"""Files open at a time; a checkpoint may have more than a process may open."""


@dataclass(frozen=True)
class OutputFile:
    """A file to make, with its tensors in order."""

    name: str
    header: bytes
    tensors: Sequence[Stored]

    @property
    def data_nbytes(self) -> int:
        """Bytes after the header."""
        return sum(tensor.nbytes for tensor in self.tensors)


def output_file(name: str, tensors: Mapping[str, Stored]) -> OutputFile:
    """Describe a file that holds these tensors, whole."""
    inorder = dict(sorted(tensors.items(), key=lambda entry: -alignment_of(entry[1].nbytes)))
    parts = {key: (tensor.dtype, tensor.shape) for key, tensor in inorder.items()}
    return OutputFile(name, build_header(parts, {FORMAT_KEY: FORMAT_VALUE}, where=name), list(inorder.values()))


class _Shards:
    """The chunks of a tensor, found by the box they meet."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        table = len(stored.chunks), len(stored.shape)
        self._low: IntArray = np.array([c.box.offsets for c in stored.chunks], np.int64).reshape(table)
        self._high = self._low + np.array([c.box.sizes for c in stored.chunks], np.int64).reshape(table)

    def meeting(self, box: Box) -> list[Chunk]:
        if len(self.stored.chunks) == 1:
            return self.stored.chunks
        low = np.array(box.offsets, np.int64)
        hit = np.all((self._low < low + np.array(box.sizes, np.int64)) & (self._high > low), axis=1)
        return [self.stored.chunks[row] for row in np.flatnonzero(hit).tolist()]


class _Inputs:
    """Files, opened when first read and kept open as long as there is room. Close it when done."""

    def __init__(self, store: Opens) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: OrderedDict[str, BlobReader] = OrderedDict()
        self._users: dict[str, int] = {}

    @contextmanager
    def reader(self, path: str) -> Iterator[BlobReader]:
        """Lend a reader of a file."""
        with self._lock:
            reader = self._open.get(path)
            if reader is None:
                self._make_room()
                reader = self._open[path] = self._store.open(path)
            self._open.move_to_end(path)
            self._users[path] = self._users.get(path, 0) + 1
        try:
            yield reader
        finally:
            with self._lock:
                self._users[path] -= 1

    def _make_room(self) -> None:
        idle = [path for path in self._open if not self._users.get(path)]
        for path in idle[: max(0, len(self._open) - _MOST_OPEN + 1)]:
            self._open.pop(path).close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()


class _Span(NamedTuple):
    """Some elements of a tensor in a window."""

    shards: _Shards
    first: int
    last: int


class _Window(NamedTuple):
    file: NewFile
    start: int
    """Where it begins in the data."""
    spans: list[_Span]


def write_whole(
    store: Store, files: Sequence[OutputFile], shards: Opens, *, names: Names, threads: int, budget_nbytes: int
) -> None:
    """Write files of whole tensors, from shards that `shards` opens; durable on return."""
    if not files:
        return
    threads, both = window_for(threads, budget_nbytes)
    window = both // 2
    with closing(_Inputs(shards)) as inputs, ExitStack() as undo:

        def work(task: _Window, buffer: memoryview) -> bool:
            at = 0
            for span in task.spans:
                at += _fill(span, buffer[at:window], buffer[window:], inputs)
            task.file.write(task.start, buffer[:at])
            return True

        run_workers(_windows(store, files, names, window, undo), work, threads=threads, buffer_nbytes=both)
        undo.pop_all()


def _windows(
    store: Store, files: Sequence[OutputFile], names: Names, window: int, undo: ExitStack
) -> Iterator[_Window]:
    """Open the files, one after the other, and cut their data into windows of whole elements."""
    for file in files:
        output = NewFile(store, names.written(file.name), file.header, file.data_nbytes, undo)
        if not file.data_nbytes:
            yield _Window(output, 0, [])
        start = nbytes = 0
        spans: list[_Span] = []
        for stored in file.tensors:
            size = stored.dtype.itemsize
            first, count = 0, stored.nbytes // size
            shards = _Shards(stored)
            while first < count:
                last = min(count, first + (window - nbytes) // size)
                if last > first:
                    spans.append(_Span(shards, first, last))
                    nbytes += (last - first) * size
                first = last
                if first < count or nbytes == window:
                    yield _Window(output, start, spans)
                    start, nbytes, spans = start + nbytes, 0, []
        if spans:
            yield _Window(output, start, spans)


def _fill(span: _Span, window: memoryview, scratch: memoryview, inputs: _Inputs) -> int:
    """Read the elements of a span into the beginning of a window; return their bytes."""
    stored = span.shards.stored
    size = stored.dtype.itemsize
    at = 0
    for box in flat_range_to_boxes(stored.shape, span.first, span.last):
        nbytes = box.volume * size
        for chunk in span.shards.meeting(box):
            common = intersect(box, chunk.box)
            if common is not None:
                _copy(chunk, common, box, size, window[at : at + nbytes], scratch, inputs)
        at += nbytes
    return at


def _copy(
    chunk: Chunk, common: Box, box: Box, size: int, window: memoryview, scratch: memoryview, inputs: _Inputs
) -> None:
    """Read the common part of a chunk and of the window's box to where it belongs in the window."""
    source = chunk.start + _run_of(chunk.box.sizes, relative(common, chunk.box)) * size
    goal = relative(common, box)
    run = contiguous_run(box.sizes, goal)
    into = scratch[: common.volume * size] if run is None else window[run[0] * size :][: run[1] * size]
    with inputs.reader(chunk.path) as reader:
        reader.read_into(source, into)
    if run is None:
        whole = np.frombuffer(window, _RAW[size]).reshape(box.sizes)
        whole[slices(goal)] = np.frombuffer(into, _RAW[size]).reshape(goal.sizes)


def _run_of(shape: Ints, box: Box) -> int:
    """Return where a box begins in a chunk, of which it is one run: it spans all axes after the one that cuts it."""
    start = 0
    for offset, full in zip(box.offsets, shape, strict=True):
        start = start * full + offset
    return start
