"""
Copies the files of a checkpoint from one store to another as they are stored, and verifies every byte.

The expected digests of a file are known without any key: a plain data file has those of its blocks in its header or
sidecar, an encoded one those of its frames in its table, and any other file has one digest in the commit record.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import xxhash

from shardkeep.codecs.coded_store import read_table
from shardkeep.engine.queue import lower_priority
from shardkeep.engine.reader import open_checked, read_sidecar
from shardkeep.engine.torch_source import item_batches
from shardkeep.engine.workers import divide_budget, run_workers
from shardkeep.errors import ChecksumMismatch, DamagedCheckpoint, SaveCancelled, StorageError, WrongSize
from shardkeep.format.data_file import ALGORITHM, DIGEST_NBYTES, count_blocks, digest
from shardkeep.format.frames import MAGIC
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.options import Options
from shardkeep.storage import base

NICENESS = 10
"""Higher than that of asynchronous saves, which go first."""
_PAUSE_S = 0.02
_PAUSES = 10  # while a save is under way, one window per 0.2 s is copied: at most 40 MB a second per rank
_DAMAGED_HINT = "the file was damaged after the save: use another copy, or another checkpoint"


def throttle(is_saving: Callable[[], bool], sleep: Callable[[float], object]) -> None:
    """Lower the priority of this thread, and wait a moment while a save is under way; called before each window."""
    # A copy is slowed down, not stopped: if saves follow each other without a break, it would never end, and the near root
    # would grow. Only threads that copy may call this, and only after another thread has used the stores: a library that
    # starts threads for the whole process at its first request gives them the priority of the requesting thread.
    lower_priority(NICENESS)
    for _ in range(_PAUSES):
        if not is_saving():
            return
        sleep(_PAUSE_S)


class DigestedRange(NamedTuple):
    start: int
    nbytes: int
    digest: bytes

    def verify(self, data: memoryview, store: base.Store, name: str) -> None:
        """Check what was read. If it is wrong, read it once more: correct `data`, or raise `ChecksumMismatch`."""
        if digest(data) == self.digest:
            return
        base.repair(store, name, self.start, data, lambda again: digest(again) == self.digest)
        self.check(digest(data), f"{store.url}/{name}")
        base.warn_reread_ok(name, self.start, self.nbytes)

    def check(self, found: bytes, where: str) -> None:
        if found != self.digest:
            raise ChecksumMismatch(
                f"{where}: bytes {self.start} to {self.start + self.nbytes} are not what was saved",
                hint=_DAMAGED_HINT,
                file=where,
                offset=self.start,
            )


class ExpectedDigests(NamedTuple):
    name: str
    nbytes: int
    ranges: list[DigestedRange]
    """In order, without gaps."""


def expected_digests(store: base.Store, record: Record, name: str) -> ExpectedDigests:
    """Find the digests of one of a record's files, in headers, tables and sidecars, which may be damaged themselves."""
    nbytes = record.at_rest[name]
    entry = next(entry for entry in (record.index, *record.files) if name in dict(entry.at_rest))
    ranges = [DigestedRange(0, nbytes, _digest_in(entry.checksum))]  # of the index, or of a sidecar
    if name == entry.name and entry.chain is not None:
        ranges = _frame_digests(store, entry, nbytes)
    elif name == entry.name and isinstance(entry, FileEntry):
        ranges = _block_digests(store, entry)
    return ExpectedDigests(name, nbytes, ranges)


def _frame_digests(store: base.Store, entry: Blob, nbytes: int) -> list[DigestedRange]:
    with closing(base.open_sized(store, entry.name, nbytes)) as reader:
        table = read_table(reader, entry, store)
    frames = [
        DigestedRange(int(table.stored_start[frame]), int(table.stored_nbytes[frame]), table.digest(frame))
        for frame in np.lexsort((table.stored_nbytes, table.stored_start)).tolist()
    ]
    at = len(MAGIC) + sum(frame.nbytes for frame in frames)
    return [
        DigestedRange(0, len(MAGIC), digest(MAGIC)),
        *frames,
        DigestedRange(at, nbytes - at, _digest_in(entry.table_checksum or "")),
    ]


def _block_digests(store: base.Store, entry: FileEntry) -> list[DigestedRange]:
    count = count_blocks(entry.nbytes - entry.header_nbytes, entry.block_nbytes)
    if entry.blocks is None:
        reader, digests = open_checked(store, entry)
        reader.close()
        of_header = _digest_in(entry.checksum)
    else:
        of_header, digests = read_sidecar(store, entry, count)
    ranges = [DigestedRange(0, entry.header_nbytes, of_header)]
    for block in range(count):
        start = entry.header_nbytes + block * entry.block_nbytes
        size = min(entry.block_nbytes, entry.nbytes - start)
        ranges.append(DigestedRange(start, size, digests[block * DIGEST_NBYTES : (block + 1) * DIGEST_NBYTES]))
    return ranges


def _digest_in(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix(f"{ALGORITHM}:"))


class Copied(NamedTuple):
    """What was copied, and not found in the target."""

    nbytes: int
    files: int


def copy_files(
    source: base.Store,
    target: base.Store,
    record: Record,
    names: Sequence[str],
    options: Options,
    wanted: Callable[[], bool],
    pause: Callable[[], None] = lambda: None,
) -> Copied:
    """
    Copy files of a checkpoint, and make them durable; those that are in the target already are only checked.

    On return all of them are sound in the target: they were read back there, or the service has verified them. `wanted`
    (whether to go on) and `pause` (which may wait) are called before each window, by the thread that copies it. Copying uses
    half of the memory budget. A `DamagedCheckpoint` is always one of the source.
    """
    move = partial(_move_files, options=options, wanted=wanted, pause=pause)
    there = {info.name: info.nbytes for info in target.list()}
    files = [expected_digests(source, record, name) for name in names]
    present = [file for file in files if there.get(file.name) == file.nbytes]
    sound = {file.name for file in present}.difference(move(target, None, present))
    for name in set(names).difference(sound).intersection(there):
        target.delete(name)
    rest = [file for file in files if file.name not in sound]
    move(source, target, rest)
    if not base.verifies_uploads(target):
        for name, why in move(target, None, rest).items():
            raise StorageError(
                f"{target.url}/{name} was written, and is not read back as it was: {why.message}",
                hint="the store or its disk changes bytes: look at its log; the copy is not used, and made again",
                name=name,
                offset=why.details.get("offset"),
                errno=errno.EIO,
            ) from why
    return Copied(nbytes=sum(file.nbytes for file in rest), files=len(rest))


@dataclass
class _OpenFile:
    name: str
    reader: base.BlobReader
    writer: base.BlobWriter | None
    windows_left: int


def _move_files(
    source: base.Store,
    target: base.Store | None,
    files: Sequence[ExpectedDigests],
    *,
    options: Options,
    wanted: Callable[[], bool],
    pause: Callable[[], None],
) -> dict[str, DamagedCheckpoint]:
    """Copy files, and raise what is damaged; without a target, only check them, and return what is damaged, and why."""
    damaged: dict[str, DamagedCheckpoint] = {}
    if not files:
        return damaged
    stores = [source] if target is None else [source, target]
    threads = max(base.preferred_requests(each, options.io_threads) for each in stores)
    threads, window_nbytes = divide_budget(threads, options.host_budget_bytes // 2)[:2]
    opened: dict[str, _OpenFile] = {}
    lock = threading.Lock()

    def tasks() -> Iterator[tuple[_OpenFile, list[DigestedRange]]]:
        """Open files one after the other, and yield their windows. Only one thread at a time is in here."""
        for expected in files:
            windows = list(item_batches(expected.ranges, lambda each: each.nbytes, most_nbytes=window_nbytes))
            pause()  # here, where threads come one at a time, so that it limits all of them together
            try:
                reader = base.open_sized(source, expected.name, expected.nbytes)
            except WrongSize as error:
                if target is not None:
                    raise
                damaged[expected.name] = error  # it was deleted since it was listed
                continue
            file = _OpenFile(expected.name, reader, None, len(windows))
            with lock:
                opened[file.name] = file
            if target is not None:
                file.writer = target.create(expected.name, expected.nbytes)
            for number, window in enumerate(windows):
                if number:
                    pause()
                yield file, window

    def work(task: tuple[_OpenFile, list[DigestedRange]], buffer: memoryview) -> bool:
        file, ranges = task
        if not wanted():
            raise SaveCancelled("copying was cancelled")
        if file.name not in damaged:
            try:
                _move_ranges(source, file, ranges, buffer)
            except DamagedCheckpoint as error:
                if target is not None:
                    raise
                damaged.setdefault(file.name, error)
        with lock:
            file.windows_left -= 1
            last = not file.windows_left
        if last:
            file.reader.close()
            if file.writer is not None:
                file.writer.finish()
            with lock:
                opened.pop(file.name, None)
        return True  # it waited for a disk or a network

    def abandon() -> None:
        with lock:
            left = list(opened.values())
            opened.clear()
        for file in left:
            if file.writer is not None:
                file.writer.abandon()
            file.reader.close()

    try:
        # On a failure at once, because another thread may wait for a part that never comes.
        run_workers(tasks(), work, threads=threads, buffer_nbytes=window_nbytes, on_stop=abandon)
    finally:
        abandon()
    return damaged


def _move_ranges(source: base.Store, file: _OpenFile, ranges: list[DigestedRange], buffer: memoryview) -> None:
    """Read a window, verify it, and write it if the file is copied."""

    def read(offset: int, nbytes: int) -> memoryview:
        file.reader.read_into(offset, buffer[:nbytes])
        return buffer[:nbytes]

    if (long := ranges[0]).nbytes > len(buffer):
        # A range that does not fit into the buffer is read once to verify its digest, then again to copy it.
        parts, found = _split(long, read, len(buffer))
        if found != long.digest:
            parts, found = _split(long, partial(base.read_again, source, file.name), len(buffer))
            long.check(found, f"{source.url}/{file.name}")
            base.warn_reread_ok(file.name, long.start, long.nbytes)
        windows = [[part] for part in parts] if file.writer is not None else []
    else:
        windows = [ranges]
    for window in windows:
        start = window[0].start
        data = read(start, window[-1].start + window[-1].nbytes - start)
        for each in window:
            each.verify(data[each.start - start :][: each.nbytes], source, file.name)
        if file.writer is not None:
            file.writer.write_at(start, data)


def _split(
    whole: DigestedRange, read: Callable[[int, int], bytearray | memoryview], nbytes: int
) -> tuple[list[DigestedRange], bytes]:
    """Read a range in parts; return the digests of the parts as they were read, and of the whole."""
    total, parts = xxhash.xxh3_128(), []
    for start in range(whole.start, whole.start + whole.nbytes, nbytes):
        data = read(start, min(nbytes, whole.start + whole.nbytes - start))
        total.update(data)
        parts.append(DigestedRange(start, len(data), digest(data)))
    return parts, total.digest()
