"""
Writes files whose bytes are produced as they are written: memory is one window a thread, however large the files.

A file is a list of parts laid end to end: bytes in memory, bytes that depend on earlier ones, or a part that the caller
fills, such as a box of a stored tensor, perhaps converted. The engine's file job writes them: files are durable on
return, or removed. Digests are taken before bytes leave memory; `verify_written` reads the files back and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardkeep.dist.team import Team
from shardkeep.engine.fill import fill
from shardkeep.engine.reader import DataFiles, DigestCache, Source, list_keys, read_files
from shardkeep.engine.workers import divide_budget
from shardkeep.engine.writer import FileJob, Window, file_entry, write_files
from shardkeep.errors import CheckpointExists
from shardkeep.format.boxes import Box, Boxes, flat_range_to_boxes
from shardkeep.format.data_file import block_nbytes_for
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.record import FileEntry
from shardkeep.options import Options, collector_paused
from shardkeep.plan.load_plan import every_block
from shardkeep.storage.base import ReadableStore, WritableStore, preferred_requests

_LOOKED_AT = 1 << 18
"""Elements read again at a time, to see whether they were finite before the conversion."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a stored tensor, its elements in row-major order, as elements of some dtype."""

    key: str
    row: int
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LatePart:
    """Bytes that depend on what the file holds before them: made when all other parts of their window are filled."""

    nbytes: int
    make: Callable[[], bytes]


Part = memoryview | LatePart | TensorPart


class Wanted(NamedTuple):
    """Bytes of a part that are wanted, from `start` on, and the memory for them."""

    part: Any
    start: int
    into: memoryview


Fill = Callable[[list[Wanted]], None]
"""Fills memory with bytes of parts; called from several threads."""
Progress = Callable[[int, int], None]
"""Called now and then, from any thread, with the bytes that are done and those there are."""


@dataclass(frozen=True)
class FileParts:
    job: FileJob
    parts: Sequence[Part]
    """Those that are not empty, one for each source of the job."""


class WriteArguments(NamedTuple):
    overwrite: bool
    options: Options
    progress: Progress | None
    team: Team


class Written(NamedTuple):
    files: list[str]
    nbytes: int
    """Of the data files together, as they lie in the store."""
    infinite: set[int]
    """Rows in the source's index of tensors with finite numbers that became infinite when they were converted."""


def file_parts(
    name: str,
    parts: Sequence[Part],
    *,
    header: bytearray | None = None,
    block_nbytes: int | None = None,
    sidecar: bool = False,
) -> FileParts:
    """Lay parts end to end, each at a multiple of its elements' size; the rest is for native files, as in `FileJob`."""
    filled = [part for part in parts if part.nbytes]
    ends = np.cumsum([0, *(part.nbytes for part in filled)], dtype=np.int64)
    total = int(ends[-1])
    job = FileJob(
        name=name,
        header=bytearray() if header is None else header,
        data_nbytes=total,
        block_nbytes=block_nbytes or block_nbytes_for(total),
        start=ends[:-1],
        address=np.zeros(len(filled), np.int64),
        scattered={},
        sidecar=sidecar,
    )
    return FileParts(job, filled)


class PartReader:
    """Fills memory with parts of an opened checkpoint. Used by several threads, each of which reads by itself."""

    def __init__(self, source: Source, *, budget_nbytes: int) -> None:
        self._source = source
        self._options = Options(io_threads=1, host_budget_bytes=budget_nbytes)
        self.infinite: set[int] = set()
        """Rows of tensors with finite numbers that became infinite when they were converted to a smaller type."""

    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Fill memory with bytes of parts; each range must be of whole elements."""
        if not wanted:
            return
        rows: list[int] = []
        boxes: list[Box] = []
        into: list[torch.Tensor] = []
        flats: list[torch.Tensor] = []
        with collector_paused():  # a window may hold many thousand tensors
            for part, start, memory in wanted:
                flats.append(torch.frombuffer(memory, dtype=torch.uint8).view(to_torch(part.dtype)))
                for box, piece in _boxes_of(part, start // part.dtype.itemsize, flats[-1]):
                    rows.append(part.row)
                    boxes.append(box)
                    into.append(piece)
        self._fill(rows, boxes, into)
        for (part, start, _), flat in zip(wanted, flats, strict=True):
            before, after = to_torch(self._source.index.dtype(part.row)), to_torch(part.dtype)
            floats = before.is_floating_point and after.is_floating_point
            if before != after and floats and torch.finfo(before).max > torch.finfo(after).max:
                self._look_at(part, start // part.dtype.itemsize, flat)

    def _look_at(self, part: TensorPart, first: int, flat: torch.Tensor) -> None:
        """Note a tensor if finite numbers of it became infinite; what is infinite now is read again as it is stored."""
        if part.row in self.infinite or not bool(torch.isinf(flat).any()):
            return
        stored = to_torch(self._source.index.dtype(part.row))
        for at in range(0, flat.numel(), _LOOKED_AT):
            now = flat[at : at + _LOOKED_AT]
            infinite = torch.isinf(now)
            if not bool(infinite.any()):
                continue
            before = torch.empty(now.numel(), dtype=stored)
            boxes, pieces = zip(*_boxes_of(part, first + at, before), strict=True)
            self._fill([part.row] * len(boxes), boxes, pieces)
            if bool((infinite & torch.isfinite(before)).any()):
                self.infinite.add(part.row)
                return

    def _fill(self, rows: list[int], boxes: Sequence[Box], into: Sequence[torch.Tensor]) -> None:
        fill(self._source, np.array(rows, np.int64), Boxes.of(boxes), into, self._options, keep_cached=False)


def _boxes_of(part: TensorPart, first: int, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut a run of a part's elements into boxes of its tensor, each with the piece of `flat` that it fills."""
    at = 0
    for box in flat_range_to_boxes(part.box.sizes, first, first + flat.numel()):
        offsets = tuple(a + b for a, b in zip(part.box.offsets, box.offsets, strict=True))
        yield Box(offsets, box.sizes), flat[at : at + box.volume].view(box.sizes)
        at += box.volume


def write_filled(
    store: WritableStore,
    files: Sequence[FileParts],
    fill: Fill,
    *,
    threads: int,
    window_nbytes: int,
    progress: Progress | None = None,
) -> list[bytes]:
    """Write files of parts that `fill` provides, all durable or none there; return the digests of each one's blocks."""
    by_name = {file.job.name: file for file in files}

    @contextmanager
    def take(window: Window, own: memoryview) -> Iterator[memoryview]:
        data = own[: window.nbytes]
        wanted: list[Wanted] = []
        late: list[Wanted] = []
        for row in window.rows:
            begin, part = int(window.job.start[row]), by_name[window.job.name].parts[row]
            low, high = max(begin, window.start), min(begin + part.nbytes, window.stop)
            into = data[low - window.start : high - window.start]
            if isinstance(part, memoryview):
                into[:] = part[low - begin : high - begin]
            else:
                (late if isinstance(part, LatePart) else wanted).append(Wanted(part, low - begin, into))
        fill(wanted)
        for each in late:
            each.into[:] = each.part.make()[each.start :][: len(each.into)]
        yield data

    jobs = [file.job for file in files]
    return write_files(store, jobs, threads=threads, window_nbytes=window_nbytes, take=take, on_written=progress)


def write_parts(
    store: WritableStore, files: Sequence[FileParts], source: Source, options: Options, progress: Progress | None = None
) -> tuple[list[bytes], set[int]]:
    """Write files of parts of a checkpoint, as `write_filled` does; also return the rows of `PartReader.infinite`."""
    threads, window = limits(options, store, source.store)
    reader = PartReader(source, budget_nbytes=2 * window)
    digests = write_filled(store, files, reader.fill, threads=threads, window_nbytes=window, progress=progress)
    return digests, reader.infinite


def verify_written(
    store: ReadableStore,
    files: Sequence[FileParts],
    digests: Sequence[bytes],
    options: Options,
    *,
    entries: Sequence[FileEntry] | None = None,
) -> None:
    """Read every byte of files back, which the record will describe by `entries`; `ChecksumMismatch` for wrong ones."""
    threads, window = limits(options, store)
    known: DigestCache = {}
    entries = [file_entry(file.job) for file in files] if entries is None else entries
    for file, entry, of_file in zip(files, entries, digests, strict=True):
        if not file.job.header:  # which would be read and checked itself, and has the digests
            known[entry] = of_file

    def keys_at(file: int, at: int, end: int) -> str:
        job, parts = files[file].job, files[file].parts
        hit = (
            part.key
            for part, start in zip(parts, job.start.tolist(), strict=True)
            if isinstance(part, TensorPart) and start < end and start + part.nbytes > at
        )
        return list_keys(hit) or "the header"

    plans = [every_block(number, file.job.data_nbytes, window_nbytes=window) for number, file in enumerate(files)]
    read_files(DataFiles(store, entries, keys_at, known), plans, {}, threads=threads, window_nbytes=window)


def already_there(where: str, what: str, name: str) -> CheckpointExists:
    hint = "pass overwrite=True to replace it, or give another place"
    return CheckpointExists(f"{where}: {what} is already there ({name})", hint=hint)


def limits(options: Options, *stores: object) -> tuple[int, int]:
    """Return threads and the size of a window: each thread has one to write, and one to read through."""
    threads = max(preferred_requests(store, options.io_threads) for store in stores)
    return divide_budget(threads, options.host_budget_bytes // 2)[:2]
