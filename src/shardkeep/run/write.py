"""
The write pipeline: windows of a file are gathered from tensors, hashed while in cache, and written, on a few threads.

Memory beyond the state is one window a thread. A file is made durable by whichever thread finishes its last window.
On any failure every file of this call is removed again. Both layouts are written here: in the native one a header with
the digests goes before the data, in torch's one they are kept elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from shardkeep.errors import CheckpointError
from shardkeep.format.checksum import DIGEST_NBYTES, block_digests, digest, text_of
from shardkeep.format.columns import IntArray
from shardkeep.format.header import count_blocks, seal_header
from shardkeep.format.record import FileEntry
from shardkeep.run.workers import run_workers
from shardkeep.stage.memory import Scattered, copy_memory
from shardkeep.store.aligned import address_of
from shardkeep.store.protocol import BlobWriter, Creates, Deletes

MOST_FILES = 8
"""Files written at a time: a kernel lets one thread write to a file at a time, and the others wait for it."""


class _Writes(Creates, Deletes, Protocol):
    """What writing needs of a store."""


@dataclass(frozen=True)
class FileJob:
    """One data file: its header and where each of its bytes comes from."""

    name: str
    header: bytearray
    """With room for the digests; empty where they are kept elsewhere."""
    data_nbytes: int
    block_nbytes: int
    start: IntArray
    """Where each source begins in the data; sorted, without gaps."""
    address: IntArray
    """Where each source lies in host memory; 0: it is in `scattered`."""
    scattered: dict[int, Scattered]
    owners: Sequence[object] = ()
    """What must live as long as the addresses are used."""


@dataclass
class _OpenFile:
    job: FileJob
    writer: BlobWriter
    windows_left: int
    digests: bytearray
    lock: threading.Lock = field(default_factory=threading.Lock)


def write_files(store: _Writes, jobs: Sequence[FileJob], *, threads: int, window_nbytes: int) -> list[bytes]:
    """Write all files, durable on return; the digests of each one's blocks go into what is committed."""
    digests: dict[str, bytes] = {}
    with ExitStack() as undo:
        tasks = _tasks(store, jobs, window_nbytes, min(threads, MOST_FILES), undo)

        def work(task: tuple[_OpenFile, int, int], buffer: memoryview) -> bool:
            file, start, stop = task
            _write_window(file, start, stop, buffer)
            with file.lock:
                file.windows_left -= 1
                last = file.windows_left == 0
            if last:
                digests[file.job.name] = _finish(file)
            return True

        run_workers(tasks, work, threads=threads, buffer_nbytes=window_nbytes)
        undo.pop_all()
    return [digests[job.name] for job in jobs]


def _tasks(
    store: _Writes, jobs: Sequence[FileJob], window_nbytes: int, most_files: int, undo: ExitStack
) -> Iterator[tuple[_OpenFile, int, int]]:
    """Hand out the windows of a few files in turn, each file's in order, and begin a file as one comes to its end."""
    waiting = (_windows(store, job, window_nbytes, undo) for job in jobs)
    turns = deque(islice(waiting, most_files))
    while turns:
        windows = turns.popleft()
        if task := next(windows, None):
            yield task
            turns.append(windows)
        else:
            turns.extendleft(islice(waiting, 1))


def _windows(store: _Writes, job: FileJob, window_nbytes: int, undo: ExitStack) -> Iterator[tuple[_OpenFile, int, int]]:
    writer = store.create(job.name, len(job.header) + job.data_nbytes)
    undo.callback(take_back, store, job.name, writer)
    starts = range(0, job.data_nbytes, window_nbytes)
    blocks = count_blocks(job.data_nbytes, job.block_nbytes)
    file = _OpenFile(job, writer, len(starts), bytearray(blocks * DIGEST_NBYTES))
    for start in starts:
        yield file, start, min(start + window_nbytes, job.data_nbytes)


def take_back(store: Deletes, name: str, writer: BlobWriter) -> None:
    """Remove a blob that is not to be, whether it was finished or not."""
    writer.abandon()
    with contextlib.suppress(CheckpointError):
        store.delete(name)  # one that was finished outlives its writer's abandon


def _write_window(file: _OpenFile, start: int, stop: int, buffer: memoryview) -> None:
    job = file.job
    window = buffer[: stop - start]
    _gather(job, start, stop, window)
    at = start // job.block_nbytes * DIGEST_NBYTES
    digests = block_digests(window, job.block_nbytes)
    file.digests[at : at + len(digests)] = digests
    file.writer.write_at(len(job.header) + start, window)


def _gather(job: FileJob, start: int, stop: int, window: memoryview) -> None:
    """Copy the bytes `start..stop` of a file's data out of the tensors they come from."""
    first = int(np.searchsorted(job.start, start, "right")) - 1
    last = int(np.searchsorted(job.start, stop, "left"))
    base = address_of(window) - start
    begins = job.start[first : last + 1].tolist()
    if last == len(job.start):
        begins.append(job.data_nbytes)
    for row, address, begin, end in zip(
        range(first, last), job.address[first:last].tolist(), begins, begins[1:], strict=False
    ):
        low = max(begin, start)
        high = min(end, stop)
        if address:
            copy_memory(base + low, address + low - begin, high - low)
        else:
            job.scattered[row].read(low - begin, high - begin, window[low - start : high - start])


def _finish(file: _OpenFile) -> bytes:
    if file.job.header:
        seal_header(file.job.header, file.digests)
        file.writer.write_at(0, memoryview(file.job.header))
    file.writer.finish()
    return bytes(file.digests)


def entry_of(job: FileJob) -> FileEntry:
    """Say what the commit record says of a file that was written."""
    return FileEntry(
        name=job.name,
        nbytes=len(job.header) + job.data_nbytes,
        header_nbytes=len(job.header),
        block_nbytes=job.block_nbytes,
        checksum=text_of(digest(job.header)),
    )
