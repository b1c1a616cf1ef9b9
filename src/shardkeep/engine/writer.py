"""
The write pipeline of all layouts: windows of a file are gathered from tensors, hashed while in cache, and written.

Memory beyond the state is one window for each thread. The thread that writes the last window of a file makes it
durable. If anything fails, every file of the call is removed. The native header, with the digests, is written last; if
a store takes bytes only in order, it is written first, and the digests go into a sidecar file. In torch's layout the
digests are kept elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkeep.display import format_count
from shardkeep.engine.workers import Scattered, run_workers, windows_for
from shardkeep.errors import CheckpointError
from shardkeep.format import data_file
from shardkeep.format.boxes import IntArray
from shardkeep.format.record import FileEntry
from shardkeep.layouts import native
from shardkeep.storage.base import BlobWriter, WritableStore, abandoning, delete_all
from shardkeep.storage.buffers import address_of, copy_alike, copy_memory
from shardkeep.storage.cancel import CancelScope, create_in, run_with_deadline

if TYPE_CHECKING:
    import torch

    from shardkeep.engine.pools import StagingMemory

MOST_FILES = 8
"""Files written at a time: the kernel lets only one thread at a time write to a file."""


@dataclass(frozen=True)
class FileJob:
    """One data file: its header and where each of its bytes comes from."""

    name: str
    header: bytearray
    """With room for the digests; empty if the layout has none."""
    data_nbytes: int
    block_nbytes: int
    start: IntArray
    """Where each source begins in the data; sorted, without gaps."""
    address: IntArray
    """Where each source lies in host memory; 0: it is in `scattered`."""
    scattered: dict[int, Scattered]
    owners: Sequence[object] = ()
    """Objects that must live as long as the addresses are used."""
    sidecar: bool = False
    """The header has no room for the digests: it is written first, and they go into a sidecar file."""
    digests: bytearray = field(default_factory=bytearray)
    """Of its blocks; filled as it is written."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.data_nbytes


class Window(NamedTuple):
    """Bytes of one file's data that are written at once."""

    job: FileJob
    start: int
    stop: int
    rows: range
    """The sources it takes bytes from."""

    @property
    def key(self) -> tuple[str, int]:
        """Identifies it among the windows of a save."""
        return self.job.name, self.start

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def offset(self) -> int:
        return len(self.job.header) + self.start

    @property
    def addresses(self) -> IntArray:
        return self.job.address[self.rows.start : self.rows.stop]


Take = Callable[[Window, memoryview], AbstractContextManager[memoryview]]
"""Gives the bytes of a window while the context lasts; the memory, of the size of a window, belongs to the writing thread."""


Put = Callable[[Window, BlobWriter, memoryview], bytes]
"""Writes a window to its file, and returns the digests of its blocks. The memory is as for `Take`."""


def hash_and_write(file: BlobWriter, offset: int, data: memoryview, block_nbytes: int) -> bytes:
    """Write bytes, and return the digests of their blocks. Hashing comes first, which brings them into the cache."""
    digests = data_file.block_digests(data, block_nbytes)
    file.write_at(offset, data)
    return digests


@dataclass
class _FileInProgress:
    job: FileJob
    writer: BlobWriter
    windows_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


def write_files(
    store: WritableStore,
    jobs: Sequence[FileJob],
    *,
    threads: int,
    window_nbytes: int,
    scope: CancelScope | None = None,
    take: Take | None = None,
    put: Put | None = None,
    create: Callable[[FileJob], BlobWriter] | None = None,
    on_written: Callable[[int, int], object] | None = None,
    after: Mapping[torch.device, torch.Event] | None = None,
    staging: StagingMemory | None = None,
) -> list[bytes]:
    """
    Write all files, durable on return, and return the digests of each file's blocks.

    By default, these threads gather windows (else `take` does), hash and write them (`put`), to files that the store makes
    (`create`). `on_written` is called after each window, by one thread at a time, with the bytes that are written and those there
    are. With `after`, threads copy from accelerators after these events, on streams of their own, also in `take`, and through
    windows of `staging`. The files belong to the `scope`: see `run_workers`.
    """
    gathers = after is not None or not (take or put)
    gathered = [each for job in jobs for each in job.scattered.values()] if gathers else []
    create = create or (lambda job: store.create(job.name, job.nbytes))
    written, total, counting = 0, sum(job.data_nbytes for job in jobs), threading.Lock()

    def hash_and_put(window: Window, file: BlobWriter, own: memoryview) -> bytes:
        if take is None:
            gather(window, own[: window.nbytes])
        with take(window, own) if take else contextlib.nullcontext(own[: window.nbytes]) as data:
            return hash_and_write(file, window.offset, data, window.job.block_nbytes)

    put = put or hash_and_put
    count = sum(1 for job in jobs for _ in islice(_windows(job, window_nbytes), threads))
    threads = min(threads, count) or 1
    # A single window is not worth a thread, unless that waits for an accelerator, or must not be waited for.
    alone = count == 1 and (scope is None or scope.wanted is None) and all(one.accelerator is None for one in gathered)
    with windows_for(gathered, window_nbytes, threads, after=after, staging=staging) as lend, ExitStack() as undo:
        gathered.clear()  # a file that is complete lets go of its tensors
        unique, begun = CancelScope(parent=scope), list[str]()
        undo.callback(_remove_begun, store, begun)

        def tasks() -> Iterator[tuple[_FileInProgress, Window]]:
            """Begin each file with the first of its windows, and note the names of all files that may exist then."""
            opened: dict[str, _FileInProgress] = {}
            for window in windows_in_turn(jobs, window_nbytes, threads):
                job = window.job
                if job.name not in opened:
                    # Only if no other file ever has this name: a cancelled upload may still appear, and is deleted then.
                    writer = create_in(unique if native.save_id_of(job.name) else scope, partial(create, job))
                    undo.callback(writer.abandon)
                    begun.append(job.name)
                    if job.sidecar:
                        begun.append(native.blocks_name(job.name))
                        writer.write_at(0, memoryview(job.header))
                    blocks = data_file.count_blocks(job.data_nbytes, job.block_nbytes)
                    job.digests[:] = bytes(blocks * data_file.DIGEST_NBYTES)
                    opened[job.name] = _FileInProgress(job, writer, sum(1 for _ in _windows(job, window_nbytes)))
                yield opened[job.name], window

        def work(task: tuple[_FileInProgress, Window], buffer: memoryview) -> bool:
            nonlocal written
            file, window = task
            found = put(window, file.writer, buffer)
            at = window.start // file.job.block_nbytes * data_file.DIGEST_NBYTES
            file.job.digests[at : at + len(found)] = found
            if on_written is not None:
                with counting:
                    written += window.nbytes
                    on_written(written, total)
            with file.lock:
                file.windows_left -= 1
                last = file.windows_left == 0
            if last:
                _finish(store, file, scope)
            return True

        run_workers(
            tasks(),
            work,
            threads=threads,
            buffer_nbytes=window_nbytes,
            lend=lend,
            on_stop=unique.cancel,
            scope=scope,
            alone=alone and after is None,
        )
        undo.pop_all()
    return [bytes(job.digests) for job in jobs]


def windows_in_turn(jobs: Sequence[FileJob], window_nbytes: int, threads: int) -> Iterator[Window]:
    """Yield the windows of a few files in turn, each file's in order; a new file begins when one comes to its end."""
    waiting = (_windows(job, window_nbytes) for job in jobs)
    turns = deque(islice(waiting, min(threads, MOST_FILES)))
    while turns:
        windows = turns.popleft()
        if window := next(windows, None):
            yield window
            turns.append(windows)
        else:
            turns.extendleft(islice(waiting, 1))


def _windows(job: FileJob, window_nbytes: int) -> Iterator[Window]:
    """Cut a file into windows of whole blocks; with a sidecar, if possible where the store cuts it into parts."""
    lead = len(job.header) % window_nbytes
    stop = window_nbytes - lead if job.sidecar and not lead % job.block_nbytes else window_nbytes
    edges = sorted({0, *range(stop, job.data_nbytes, window_nbytes), job.data_nbytes})
    firsts = (np.searchsorted(job.start, edges[:-1], "right") - 1).tolist()
    lasts = np.searchsorted(job.start, edges[1:], "left").tolist()
    return map(Window, repeat(job), edges, edges[1:], map(range, firsts, lasts))


def _remove_begun(store: WritableStore, names: Sequence[str]) -> None:
    """Remove finished files, which their writers' `abandon` does not remove, within a deadline."""
    batches = [names] if hasattr(store, "delete_all") else [[name] for name in names]
    waits = True

    def removed() -> None:
        for batch in batches:
            try:
                delete_all(store, batch)
            except CheckpointError:
                if not waits:
                    return

    # A name that another save may use must not be deleted later. Files with a save id may: what is left of them is an orphan,
    # which a later save removes as long as the claim is there.
    if not all(map(native.save_id_of, names)):
        removed()
    elif names:
        waits = run_with_deadline(removed, f"remove {format_count(len(names), 'file')}")


_SMALL_NBYTES, _MANY = 4096, 32
"""So many sources of at most this size are copied together, because a call for each takes ten times as long as the copy."""


def gather(window: Window, into: memoryview, *, queued: bool = False) -> None:
    """Copy the bytes of a window out of its tensors; with `queued`, copies from accelerators are only queued."""
    job, start, stop, rows = window
    edges = np.append(job.start[rows.start : rows.stop + 1], job.data_nbytes)[: len(rows) + 1]
    low, high = np.maximum(edges[:-1], start), np.minimum(edges[1:], stop)
    skipped, at, size, base = low - edges[:-1], low - start, high - low, address_of(into)
    held = window.addresses != 0
    source, left = np.where(held, window.addresses + skipped, 0), np.ones(len(rows), np.bool_)
    small = np.flatnonzero(held & (size > 0) & (size <= _SMALL_NBYTES))
    if len(small) >= _MANY:
        left[small] = False
        small = small[np.argsort(size[small].astype(np.uint16), kind="stable")]
        for alike in np.split(small, np.flatnonzero(np.diff(size[small])) + 1):
            copy_alike(base + at[alike], source[alike], int(size[alike[0]]))
    columns = (column[left].tolist() for column in (np.arange(len(rows)), skipped, at, source, size))
    for row, begin, to, address, nbytes in zip(*columns, strict=True):
        if address:
            copy_memory(base + to, address, nbytes)
        else:
            scattered = job.scattered[rows.start + row]
            scattered.read(begin, begin + nbytes, into[to : to + nbytes], queued=queued)


def _finish(store: WritableStore, file: _FileInProgress, scope: CancelScope | None) -> None:
    job = file.job
    if job.header and not job.sidecar:
        data_file.seal_header(job.header, job.digests)
        file.writer.write_at(0, memoryview(job.header))
    file.writer.finish()
    if job.sidecar:
        digests = data_file.encode_sidecar(job.header, job.digests)
        name = native.blocks_name(job.name)
        with abandoning(create_in(scope, lambda: store.create(name, len(digests)))) as beside:
            beside.write_at(0, memoryview(digests))
            beside.finish()


def file_entry(job: FileJob) -> FileEntry:
    """Return the entry in the commit record of a file that was written without codecs."""
    return FileEntry(
        name=job.name,
        nbytes=job.nbytes,
        header_nbytes=len(job.header),
        block_nbytes=job.block_nbytes,
        checksum=data_file.checksum_text(
            data_file.digest(data_file.encode_sidecar(job.header, job.digests) if job.sidecar else job.header)
        ),
        blocks=native.blocks_name(job.name) if job.sidecar else None,
    )
