"""
The read pipeline: blocks are read straight into place or into a buffer, checked, and copied where they belong.

Few files are open at a time, each from its first read to its last. Memory beyond the destination is one window a
thread. A file whose size or header is not what the commit record says is never read further.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardkeep.errors import BlobNotFound, ChecksumMismatch, WrongSize
from shardkeep.format.checksum import DIGEST_NBYTES, digest, first_bad_block, text_of
from shardkeep.format.columns import ITEMSIZES, segment_starts
from shardkeep.format.header import count_blocks, read_block_digests
from shardkeep.format.index import Index
from shardkeep.format.record import FileEntry, Record
from shardkeep.format.region import flat_range_to_boxes, intersect, relative
from shardkeep.plan.loads import Scatter, check_tensors
from shardkeep.plan.ranges import FileReads, Read, touching
from shardkeep.run.workers import run_workers
from shardkeep.stage.memory import Scattered, copy_memory, view_memory
from shardkeep.store.aligned import address_of
from shardkeep.store.protocol import BlobReader, Opens

KeyAt = Callable[[int, int], str]
"""Which tensors lie at a byte of a file's data, in words; asked only when there is something wrong with it."""


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: where its bytes are and what they mean."""

    store: Opens
    record: Record
    index: Index


class _Task(NamedTuple):
    file: _OpenFile
    read: Read


@dataclass
class _OpenFile:
    reads: FileReads
    entry: FileEntry
    reads_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: BlobReader | None = None
    digests: memoryview = field(default_factory=lambda: memoryview(b""))


def open_checked(store: Opens, entry: FileEntry) -> tuple[BlobReader, bytes]:
    """Open a data file after checking its size and header; return the digests of its blocks."""
    try:
        reader = store.open(entry.name)
    except BlobNotFound as exc:
        raise WrongSize(f"{entry.name}: the file is missing", hint="restore it from a copy", file=entry.name) from exc
    try:
        if reader.nbytes != entry.nbytes:
            raise WrongSize(
                f"{entry.name}: {reader.nbytes} bytes, the commit record says {entry.nbytes}",
                hint="the file was cut short or changed after the save",
                file=entry.name,
            )
        header = bytearray(entry.header_nbytes)
        reader.read_into(0, memoryview(header))
        found = text_of(digest(header))
        if found != entry.checksum:
            raise ChecksumMismatch(
                f"{entry.name}: the header has checksum {found}, the commit record says {entry.checksum}",
                hint="the file was damaged after the save",
                file=entry.name,
                offset=0,
            )
        blocks = count_blocks(entry.nbytes - entry.header_nbytes, entry.block_nbytes)
        return reader, read_block_digests(header, blocks=blocks, where=entry.name)
    except BaseException:
        reader.close()
        raise


def check_stored(source: Source, tensor: int) -> None:
    """Insist that all of a tensor is stored, in files as long as the record says, before memory is made for it."""
    index, files = source.index, source.record.files
    owner = np.array([index.tensors.alias[tensor]], np.int64)
    check_tensors(index, owner, np.array([file.nbytes - file.header_nbytes for file in files], np.int64))
    for file in np.unique(index.chunks.file[index.chunk_rows(tensor)]).tolist():
        open_checked(source.store, files[file])[0].close()


def read_files(
    store: Opens,
    files: Sequence[FileEntry],
    plans: Sequence[FileReads],
    scattered: Mapping[int, Scattered],
    *,
    key_at: KeyAt,
    threads: int,
    window_nbytes: int,
) -> int:
    """Do all reads; `scattered` gives the memory of scatters by want. Return the bytes read."""
    opened = [_OpenFile(plan, files[plan.file], len(plan.reads)) for plan in plans]

    def tasks() -> Iterator[_Task]:
        for file in opened:
            for read in file.reads.reads:
                yield _Task(file, read)

    def work(task: _Task, buffer: memoryview) -> None:
        file, read = task
        with file.lock:
            if file.reader is None:
                file.reader, digests = open_checked(store, file.entry)
                file.digests = memoryview(digests)
            reader = file.reader
        _do_read(file, reader, read, buffer, scattered, key_at)
        with file.lock:
            file.reads_left -= 1
            if not file.reads_left:
                reader.close()

    try:
        run_workers(tasks(), work, threads=threads, buffer_nbytes=window_nbytes)
    finally:
        for file in opened:
            if file.reader is not None:
                file.reader.close()
    return sum(file.entry.header_nbytes + sum(read.nbytes for read in file.reads.reads) for file in opened)


def _do_read(
    file: _OpenFile,
    reader: BlobReader,
    read: Read,
    buffer: memoryview,
    scattered: Mapping[int, Scattered],
    key_at: KeyAt,
) -> None:
    window = view_memory(read.address, read.nbytes) if read.address else buffer[: read.nbytes]
    reader.read_into(file.entry.header_nbytes + read.start, window)
    check_blocks(file.entry, file.digests, read.start, window, file.reads.file, key_at)
    if not read.address:
        _copy_edges(file.reads, read, window)
        _copy_scatters(file.reads, read, window, scattered)


def check_blocks(
    entry: FileEntry, digests: memoryview, start: int, window: memoryview, file: int, key_at: KeyAt
) -> None:
    """Compare whole blocks, the first at byte `start` of the data, with their digests."""
    first = start // entry.block_nbytes
    expected = digests[first * DIGEST_NBYTES :][: -(-len(window) // entry.block_nbytes) * DIGEST_NBYTES]
    bad = first_bad_block(window, entry.block_nbytes, expected)
    if bad is not None:
        at = (first + bad) * entry.block_nbytes
        keys = key_at(file, at)
        raise ChecksumMismatch(
            f"{entry.name}: bytes {entry.header_nbytes + at} to"
            f" {min(entry.header_nbytes + at + entry.block_nbytes, entry.nbytes)} are not what was saved; they hold {keys}",
            hint="the file was damaged after the save: use another checkpoint, or exclude these keys",
            file=entry.name,
            offset=entry.header_nbytes + at,
            key=keys,
        )


def _copy_edges(plan: FileReads, read: Read, window: memoryview) -> None:
    rows = touching(plan.edges.start, plan.edge_reach, read.start, read.start + read.nbytes)
    part = slice(rows.start, rows.stop)
    source = address_of(window) - read.start
    stop = read.start + read.nbytes
    columns = (plan.edges.start, plan.edges.nbytes, plan.edges.address)
    for start, nbytes, address in zip(*(column[part].tolist() for column in columns), strict=True):
        low = max(start, read.start)
        high = min(start + nbytes, stop)
        if high > low:
            copy_memory(address + low - start, source + low, high - low)


def _copy_scatters(plan: FileReads, read: Read, window: memoryview, scattered: Mapping[int, Scattered]) -> None:
    for row in touching(plan.scatter_first, plan.scatter_reach, read.start, read.start + read.nbytes):
        _copy_scatter(plan.scatters[row], read, window, scattered)


def _copy_scatter(scatter: Scatter, read: Read, window: memoryview, scattered: Mapping[int, Scattered]) -> None:
    """Copy what this window holds of a scatter: the window's part of the chunk, as boxes, met with what is wanted."""
    size = scatter.itemsize
    volume = 1
    for n in scatter.shape:
        volume *= n
    low = max(read.start, scatter.start)
    high = min(read.start + read.nbytes, scatter.start + volume * size)
    at = low - read.start
    for box in flat_range_to_boxes(scatter.shape, (low - scatter.start) // size, (high - scatter.start) // size):
        nbytes = box.volume * size
        if common := intersect(box, scatter.source):
            inside = relative(common, scatter.source)
            offsets = tuple(t + i for t, i in zip(scatter.target.offsets, inside.offsets, strict=True))
            scattered[scatter.want].write(
                type(box)(offsets, common.sizes), window[at : at + nbytes], box.sizes, relative(common, box)
            )
        at += nbytes


def keys_at(index: Index, record: Record) -> KeyAt:
    """Make the function that names the tensors in a block of a file; used only to explain damage."""

    def name(file: int, at: int) -> str:
        end = at + record.files[file].block_nbytes
        ends = np.asarray(index.chunk_ends, np.int64)
        counts = ends - segment_starts(ends)
        tensor = np.repeat(np.arange(len(counts)), counts)
        nbytes = index.chunks.boxes.volumes() * ITEMSIZES[index.tensors.dtype][tensor]
        start = np.asarray(index.chunks.start, np.int64)
        hit = (np.asarray(index.chunks.file) == file) & (start < end) & (start + nbytes > at)
        keys = [repr(index.keys.raw(row).decode()) for row in np.unique(tensor[hit])[:4].tolist()]
        return ", ".join(keys) + (" and others" if len(np.unique(tensor[hit])) > len(keys) else "")

    return name
