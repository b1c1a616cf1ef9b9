"""
Files whose bytes come from an opened checkpoint as they are written: never more than a window a thread is in memory.

A file is a row of parts: bytes at hand, or a box of a stored tensor, converted to another dtype if need be. Files are
written by the pipeline of all saves, durable on return or removed, and their digests are taken before the bytes leave
memory: `check_written` reads them back and compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardkeep.engine.fill import fill
from shardkeep.engine.reader import DigestCache, ReadableStore, Source, read_files
from shardkeep.engine.workers import window_for
from shardkeep.engine.writer import (
    FileJob,
    Window,
    WritableStore,
    file_entry,
    hash_and_write,
    write_files,
)
from shardkeep.format.boxes import Box, Boxes, flat_range_to_boxes, matrix_of
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.pickles import collector_paused
from shardkeep.format.record import FileEntry
from shardkeep.options import Options
from shardkeep.plan.load_plan import every_block
from shardkeep.storage.base import BlobWriter, Creates, preferred_requests

_LOOKED_AT = 1 << 18
"""Elements that are read once more at a time, to see what they were before they were infinite."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a stored tensor, its elements in row-major order, as elements of some dtype."""

    key: str
    row: int
    """Of the tensor in the index."""
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.box.volume * self.dtype.itemsize


Part = memoryview | TensorPart
Progress = Callable[[int, int], None]
"""Told, now and then and from any thread, how many bytes are done and how many there are."""


@dataclass(frozen=True)
class FileParts:
    """A file to write, and what it is made of."""

    job: FileJob
    parts: Sequence[Part]
    """Those that have bytes; one for each source of the job."""


def file_parts(
    name: str,
    parts: Sequence[Part],
    *,
    header: bytearray | None = None,
    block_nbytes: int | None = None,
    apart: bool = False,
) -> FileParts:
    """
    Lay parts end to end in a file.

    Args:
        name: of the file.
        parts: each stored one at a multiple of its elements' size.
        header: of the native layout, with room for the digests; else there are none in the file.
        block_nbytes: what digests are taken of; by default as many bytes as fit the file.
        apart: of the native layout, too: the header has no room for digests, and they go into a file beside this one.

    """
    filled = [part for part in parts if part.nbytes]
    ends = np.cumsum([part.nbytes for part in filled], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    start = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
    job = FileJob(
        name=name,
        header=bytearray() if header is None else header,
        data_nbytes=total,
        block_nbytes=block_nbytes or block_nbytes_for(total),
        start=start,
        address=np.zeros(len(start), np.int64),
        scattered={},
        apart=apart,
    )
    return FileParts(job, filled)


class PartReader:
    """Fills memory with parts of an opened checkpoint. Used by several threads."""

    def __init__(self, source: Source, *, threads: int, budget_nbytes: int) -> None:
        self._source = source
        self._threads = threads
        self._budget_nbytes = budget_nbytes
        self._lock = threading.Lock()
        self.infinite: set[str] = set()
        """Keys of tensors of which finite numbers became infinite when they were converted to a smaller type."""

    def fill(self, wanted: Sequence[tuple[TensorPart, int, int, memoryview]]) -> None:
        """Fill memory with bytes of parts, from one of its whole elements to another."""
        if not wanted:
            return
        rows: list[int] = []
        boxes: list[Box] = []
        into: list[torch.Tensor] = []
        flats: list[tuple[TensorPart, torch.Tensor]] = []
        with collector_paused():  # a window may hold many thousand tensors
            for part, start, stop, memory in wanted:
                size, at = part.dtype.itemsize, 0
                flat = torch.frombuffer(memory, dtype=torch.uint8).view(to_torch(part.dtype))
                flats.append((part, flat))
                for box in flat_range_to_boxes(part.box.sizes, start // size, stop // size):
                    offsets = tuple(a + b for a, b in zip(part.box.offsets, box.offsets, strict=True))
                    rows.append(part.row)
                    boxes.append(Box(offsets, box.sizes))
                    into.append(flat[at : at + box.volume].view(box.sizes))
                    at += box.volume
        self._fill(rows, boxes, into)
        for (part, start, _, _), (_, flat) in zip(wanted, flats, strict=True):
            if _may_overflow(self._source.index.dtype(part.row), part.dtype):
                self._look_at(part, start // part.dtype.itemsize, flat)

    def _look_at(self, part: TensorPart, first: int, flat: torch.Tensor) -> None:
        """Take note of a tensor of which numbers are infinite now that were finite; those are read once more."""
        if part.key in self.infinite or not bool(torch.isinf(flat).any()):
            return
        stored = to_torch(self._source.index.dtype(part.row))
        for at in range(0, flat.numel(), _LOOKED_AT):
            now = flat[at : at + _LOOKED_AT]
            infinite = torch.isinf(now)
            if not bool(infinite.any()):
                continue
            before = torch.empty(now.numel(), dtype=stored)
            self._read(part, first + at, before)
            if bool((infinite & torch.isfinite(before)).any()):
                with self._lock:
                    self.infinite.add(part.key)
                return

    def _read(self, part: TensorPart, first: int, into: torch.Tensor) -> None:
        """Read elements of a part as they are stored."""
        boxes, pieces, at = [], [], 0
        for box in flat_range_to_boxes(part.box.sizes, first, first + into.numel()):
            boxes.append(Box(tuple(a + b for a, b in zip(part.box.offsets, box.offsets, strict=True)), box.sizes))
            pieces.append(into[at : at + box.volume].view(box.sizes))
            at += box.volume
        self._fill([part.row] * len(boxes), boxes, pieces)

    def _fill(self, rows: list[int], boxes: list[Box], into: list[torch.Tensor]) -> None:
        axes = max((len(box.sizes) for box in boxes), default=0)
        fill(
            self._source,
            np.array(rows, np.int64),
            Boxes(matrix_of([b.offsets for b in boxes], axes, 0), matrix_of([b.sizes for b in boxes], axes, 1)),
            into,
            threads=self._threads,
            budget_nbytes=self._budget_nbytes,
        )


def _may_overflow(stored: DType, target: DType) -> bool:
    """Say whether there are finite numbers of one type that are infinite in another."""
    if stored is target:
        return False
    before, after = to_torch(stored), to_torch(target)
    if not before.is_floating_point or not after.is_floating_point:
        return False
    return torch.finfo(before).max > torch.finfo(after).max


class _Sink:
    """Where windows go: gathered, hashed and written by the thread that calls."""

    def __init__(
        self, store: Creates, files: Mapping[str, FileParts], gathering: PartReader, progress: Progress | None
    ) -> None:
        self._store = store
        self._files = files
        self._gathering = gathering
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(file.job.data_nbytes for file in files.values())

    def begin(self, job: FileJob) -> BlobWriter:
        return self._store.create(job.name, job.nbytes)

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        data = own[: window.nbytes]
        self._gather(window, data)
        digests = hash_and_write(file, window.offset, data, window.job.block_nbytes)
        if self._progress is not None:
            with self._lock:
                self._done += window.nbytes
                self._progress(self._done, self._total)
        return digests

    def _gather(self, window: Window, data: memoryview) -> None:
        parts = self._files[window.job.name].parts
        wanted = []
        for row in window.rows:
            begin = int(window.job.start[row])
            part = parts[row]
            low, high = max(begin, window.start), min(begin + part.nbytes, window.stop)
            into = data[low - window.start : high - window.start]
            if isinstance(part, memoryview):
                into[:] = part[low - begin : high - begin]
            else:
                wanted.append((part, low - begin, high - begin, into))
        self._gathering.fill(wanted)


def write_parts(
    store: WritableStore, files: Sequence[FileParts], source: Source, options: Options, progress: Progress | None = None
) -> tuple[list[bytes], set[str]]:
    """
    Write files, durable on return; if anything fails, all of them are removed.

    Returns:
        The digests of each file's blocks, and keys of tensors whose finite numbers are infinite after the conversion.

    """
    threads, window = _limits(options, store, source.store)
    gathering = PartReader(source, threads=1, budget_nbytes=2 * window)
    sink = _Sink(store, {file.job.name: file for file in files}, gathering, progress)
    digests = write_files(store, [file.job for file in files], threads=threads, window_nbytes=window, sink=sink)
    return digests, gathering.infinite


def verify_written(
    store: ReadableStore,
    files: Sequence[FileParts],
    digests: Sequence[bytes],
    options: Options,
    *,
    entries: Sequence[FileEntry] | None = None,
) -> None:
    """
    Read files back, every byte, and compare them with what was meant to be written.

    `entries`: what the commit record will say of them, where it says more than what they are made of.

    Raises:
        ChecksumMismatch: they differ; names the file, the offset and the tensors.

    """
    threads, window = _limits(options, store)
    known = DigestCache(most_nbytes=None)
    entries = [file_entry(file.job) for file in files] if entries is None else entries
    for file, entry, of_file in zip(files, entries, digests, strict=True):
        if not file.job.header:  # which would be read and checked itself, and has the digests
            known.keep(entry, of_file)

    def keys_at(file: int, at: int, end: int) -> str:
        job, parts = files[file].job, files[file].parts
        hit = [
            repr(part.key)
            for part, start in zip(parts, job.start.tolist(), strict=True)
            if isinstance(part, TensorPart) and start < end and start + part.nbytes > at
        ]
        return ", ".join(hit[:4]) + (" and others" if len(hit) > 4 else "") or "the header"

    plans = [every_block(number, file.job.data_nbytes, window_nbytes=window) for number, file in enumerate(files)]
    read_files(store, entries, plans, {}, keys_at=keys_at, threads=threads, window_nbytes=window, digests=known)


def _limits(options: Options, *stores: object) -> tuple[int, int]:
    """Return threads and the size of a window: each thread has one to write, and one to read through."""
    threads = max(preferred_requests(store, options.io_threads) for store in stores)
    return window_for(threads, options.host_budget_bytes // 2)
