"""
The read pipeline: blocks are read straight into place or into a buffer, verified, and copied where they belong.

`read_files` executes planned reads of a `Source` on a few threads. Only a few files are open at a time, each from its
first read to its last. Memory beyond the destination is one window per thread. A file whose size or header does not
match the commit record is not read any further.

Damage is found by reading every byte. The stored form of coded files has digests of its own, so an encrypted checkpoint
can be verified without the key; but not that a file was replaced together with its digests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from shardkeep.codecs.coded_store import DecodingStore, FrameReader, collecting_damage
from shardkeep.engine.workers import Scattered, run_workers, windows_for
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedFile,
    WrongSize,
)
from shardkeep.format import boxes, data_file
from shardkeep.format.index import Index
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME, Blob, FileEntry, Record, data_sizes, decode_record
from shardkeep.format.torch_zip import ArchivedTensor
from shardkeep.layouts.native import checksum_of, save_id_of
from shardkeep.options import Options
from shardkeep.plan.load_plan import FileReads, Read, Scatter, check_tensors, chunk_rows, every_block
from shardkeep.storage import base
from shardkeep.storage.base import ReadableStore, is_cached, open_sized
from shardkeep.storage.buffers import address_of, copy_memory, view_memory
from shardkeep.storage.cancel import CancelScope

_CACHED_STEP_NBYTES = 2 * data_file.MAX_BLOCK_NBYTES
"""Bytes in the page cache are read, hashed and copied in steps of this size, so that they stay in the CPU's cache."""
_LARGE_HEADER_NBYTES = 1 << 20
"""Of about 14,000 chunks."""
_SMALL_PART = 1 / 16
_MOST_RANGES = 20
"""How many damaged ranges of a file are listed; the rest are counted."""
_MOST_NAMED = 4

T = TypeVar("T")
KeysAt = Callable[[int, int, int], str]
"""Names the tensors in a byte range (file, start, stop) of a file's data. Called only to explain damage."""
DigestCache = dict[FileEntry, bytes]
"""The block digests of files that were opened, so that they are read once."""


class DataFiles(NamedTuple):
    store: ReadableStore
    entries: Sequence[FileEntry]
    keys_at: KeysAt
    digests: DigestCache


@dataclass(frozen=True)
class Source:
    """
    An opened checkpoint of any layout: a store, a list of files, and an index that says where in them each chunk lies.

    This class is the native layout; subclasses override what is different in theirs.
    """

    store: ReadableStore
    record: Record
    index: Index
    digests: DigestCache = field(default_factory=dict)

    aligned: ClassVar[bool] = True
    """Whether every chunk begins at a multiple of its element size."""
    repeated_nbytes: ClassVar[int] = 0
    """How much larger than their files tensors may be, because they repeat elements."""

    def locate(self, tensors: boxes.IntArray) -> None:
        """Find out where the chunks of these tensors begin, as far as `index.chunks.start` does not say so yet."""

    def strided(self, chunk: int) -> ArchivedTensor | None:  # noqa: ARG002 - all chunks of native files are row-major
        """Return how a chunk lies in its file that is not stored in row-major order; None for one that only torch reads."""
        return None

    def check(self, tensors: boxes.IntArray) -> None:
        """Check, before memory is allocated, that these tensors, none of them tied, are in files of the right size."""
        index, sizes = self.index, data_sizes(self.record)
        check_tensors(index, tensors, sizes, aligned=self.aligned)
        files = np.unique(index.chunks.file[boxes.concat_ranges(*chunk_rows(index, tensors))]).tolist()
        elements = np.asarray(index.tensors.shape[tensors], np.int64).prod(axis=1)
        wanted = sum((elements * boxes.ITEMSIZES[index.tensors.dtype[tensors]]).tolist())
        if wanted > sum(sizes[files].tolist()) + self.repeated_nbytes:
            raise MalformedFile(f"{self.record.index.name}: tensors of {wanted} bytes, more than their files hold")
        for file in files:
            _open_or_explain(self.store, self.record.files[file], self.digests)[0].close()

    def check_index(self, tensors: boxes.IntArray) -> None:
        self.index.check_parts()
        check_tensors(self.index, tensors, data_sizes(self.record), aligned=self.aligned)

    @property
    def data_files(self) -> DataFiles:
        return DataFiles(self.store, self.record.files, self.keys_at, self.digests)

    def keys_at(self, file: int, at: int, end: int) -> str:
        index = self.index
        ends = np.asarray(index.chunk_ends, np.int64)
        counts = ends - boxes.segment_starts(ends)
        tensor = np.repeat(np.arange(len(counts)), counts)
        nbytes = index.chunks.boxes.volumes() * boxes.ITEMSIZES[index.tensors.dtype][tensor]
        start = np.asarray(index.chunks.start, np.int64)
        hit = (np.asarray(index.chunks.file) == file) & (start < end) & (start + nbytes > at)
        return list_keys(index.keys.raw(row).decode() for row in np.unique(tensor[hit]).tolist())

    def damage_by_form(self, file: int, uncompared: set[int]) -> Iterator[CheckpointError] | None:
        """Find damage by a file's form; None: read all of it. `uncompared` gets files with bytes without checksums."""
        uncompared.add(file)
        return None

    def value_nbytes(self, key: str) -> int:  # noqa: ARG002 - the index has all values
        return 0

    def position(self, chunk: int) -> tuple[int, int]:
        """Return the file of a chunk, and about where it begins there: what is read in one sweep has close positions."""
        return int(self.index.chunks.file[chunk]), int(self.index.chunks.start[chunk])


class FoundCheckpoint(NamedTuple):
    record: Record
    open: Callable[[Options], Source]


def list_keys(keys: Iterable[str]) -> str:
    found = list(dict.fromkeys(keys))
    return ", ".join(map(repr, found[:_MOST_NAMED])) + (" and others" if len(found) > _MOST_NAMED else "")


def saved_at(store: ReadableStore, names: Collection[str]) -> str:
    """Return when the last of these files of a place was written."""
    if (path := base.local_path(store)) is not None:
        times = [os.stat(os.path.join(path, name)).st_mtime for name in names]  # of what links lead to
    else:
        infos: Iterable[base.BlobInfo] = getattr(store, "list", tuple)()
        times = [info.modified_s for info in infos if info.name in names]
    return datetime.fromtimestamp(max(times, default=0.0), timezone.utc).isoformat(timespec="milliseconds")


def open_checked(
    store: ReadableStore, entry: FileEntry, cache: DigestCache | None = None, *, reads_nbytes: int | None = None
) -> tuple[base.BlobReader, bytes]:
    """
    Open a data file after checking its size and header; return the reader and the digests of the file's blocks.

    If only `reads_nbytes` of it are to be read, a small part, the digests are all that is read of a large header.
    """
    reader = open_sized(store, entry.name, entry.nbytes)
    try:
        if not entry.block_nbytes:
            return reader, b""
        if cache is not None and entry in cache:
            return reader, cache[entry]
        large = entry.header_nbytes > _LARGE_HEADER_NBYTES
        whole = reads_nbytes is None or not large or reads_nbytes >= _SMALL_PART * entry.data_nbytes
        digests = _read_digests(store, entry, reader, whole_header=whole)
    except BaseException:
        reader.close()
        raise
    if cache is not None:
        cache[entry] = digests
    return reader, digests


def _read_digests(store: ReadableStore, entry: FileEntry, reader: base.BlobReader, *, whole_header: bool) -> bytes:
    blocks = data_file.count_blocks(entry.data_nbytes, entry.block_nbytes)
    sidecar = None if entry.blocks is None else read_sidecar(store, entry, blocks)
    chain = reader.chain if isinstance(reader, FrameReader) else None
    if not whole_header and chain is None:  # blocks that do not match their digests are damage, wherever it is
        if sidecar:
            return sidecar[1]
        of_header = partial(data_file.read_block_digests, blocks=blocks, where=entry.name)
        nbytes = min(entry.header_nbytes, data_file.most_until_digests_end(blocks))
        return _read_and_decode(store, reader, entry.name, nbytes, of_header)

    def decode(header: bytearray) -> bytes:
        expected = data_file.checksum_text(sidecar[0]) if sidecar else entry.checksum
        found = checksum_of(header, None if sidecar else chain)
        _check_checksum(entry.name, "the header has", found, expected)
        return sidecar[1] if sidecar else data_file.read_block_digests(header, blocks=blocks, where=entry.name)

    return _read_and_decode(store, reader, entry.name, entry.header_nbytes, decode)


def read_sidecar(store: ReadableStore, entry: FileEntry, blocks: int) -> tuple[bytes, bytes]:
    """Read a data file's sidecar; return the digest of the data file's header, and those of all its blocks."""
    name = entry.blocks or ""

    def decode(data: bytearray) -> tuple[bytes, bytes]:
        _check_checksum(name, f"the digests of {entry.name} have", checksum_of(data, None), entry.checksum)
        return data_file.decode_sidecar(bytes(data), blocks=blocks, where=name)

    with closing(open_sized(store, name, data_file.sidecar_nbytes(blocks))) as reader:
        return _read_and_decode(store, reader, name, reader.nbytes, decode)


def _check_checksum(name: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        why = f"{what} checksum {found}, the commit record says {expected}, from byte 0 on"
        raise ChecksumMismatch.of(name, why, hint="the file was damaged after the save", offset=0)


def _read_and_decode(
    store: ReadableStore, reader: base.BlobReader, name: str, nbytes: int, decode: Callable[[bytearray], T]
) -> T:
    """Read and decode the first bytes of a file; if they are damaged, read them once more."""
    data = bytearray(nbytes)
    reader.read_into(0, memoryview(data))
    return base.decode_or_reread(data, decode, lambda: base.read_again(store, name, 0, nbytes), name=name)


def _open_or_explain(
    store: ReadableStore, entry: FileEntry, cache: DigestCache | None, *, reads_nbytes: int | None = None
) -> tuple[base.BlobReader, bytes]:
    try:
        return open_checked(store, entry, cache, reads_nbytes=reads_nbytes)
    except WrongSize as exc:
        if isinstance(exc.__cause__, BlobNotFound):
            raise explain_missing(store, entry.name) from exc
        raise


def explain_missing(store: ReadableStore, name: str) -> WrongSize:
    """Say why a file of a committed checkpoint may be gone: another save replaced it, or it was lost."""
    try:
        now = decode_record(store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES), RECORD_NAME).save_id
    except CheckpointError:
        now = None
    if now is not None and save_id_of(name) not in {None, now}:
        why = f"the file is gone: the checkpoint was replaced by another save ({now}) meanwhile"
        return WrongSize.of(name, why, hint="open or load it again")
    return WrongSize.of(name, "the file is missing", hint="restore it from a copy")


@dataclass
class _OpenFile:
    reads: FileReads
    entry: FileEntry
    reads_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: base.BlobReader | None = None
    digests: memoryview = field(default_factory=lambda: memoryview(b""))


_Task = tuple[_OpenFile, Read, bool]
"""A read of a file, and whether the page cache was filled for it."""


def read_files(
    files: DataFiles,
    plans: Sequence[FileReads],
    scattered: Mapping[int, Scattered],
    *,
    threads: int,
    window_nbytes: int,
    damaged: list[int] | None = None,
    keep_cached: bool = False,
    scope: CancelScope | None = None,
) -> int:
    """
    Execute all reads and return the number of bytes read. `scattered` has the memory of each scatter's destination.
    Damaged blocks raise an error or are added to `damaged`. `keep_cached`: other processes of this machine may want the
    same bytes, so they are read through the page cache where there is memory for that.
    """
    copies, store = Copies(scattered), files.store
    opened = [_OpenFile(plan, files.entries[plan.file], len(plan.reads)) for plan in plans]
    # Every step takes the interpreter lock. With an accelerator there are many threads, so their steps are larger.
    on_accelerator = any(each.accelerator is not None for each in scattered.values())
    step_nbytes = window_nbytes if on_accelerator else _CACHED_STEP_NBYTES

    def reader_of(file: _OpenFile) -> base.BlobReader:
        with file.lock:
            if file.reader is None:
                nbytes = sum(read.nbytes for read in file.reads.reads)
                file.reader, of_blocks = _open_or_explain(store, file.entry, files.digests, reads_nbytes=nbytes)
                file.digests = memoryview(of_blocks)
            return file.reader

    fills = keep_cached and base.prefetches(store)

    def tasks() -> Iterator[_Task]:
        """Fill the page cache in order, by one thread at a time while the others copy: a disk and its kernel are fastest then."""
        for file in opened:
            for read in file.reads.reads:
                yield file, read, fills and prefetch(file, read)

    def prefetch(file: _OpenFile, read: Read) -> bool:
        return base.prefetch(reader_of(file), file.entry.header_nbytes + read.start, read.nbytes)

    def work(task: _Task, buffer: memoryview) -> bool:
        """Read, verify and copy; return whether a disk may have been waited for."""
        file, read, waited = task
        reader = reader_of(file)
        offset = file.entry.header_nbytes
        cached = is_cached(reader, offset + read.start, read.nbytes)
        step = step_nbytes if cached else read.nbytes
        for at in range(0, read.nbytes, step):
            nbytes = min(step, read.nbytes - at)
            part = Read(read.start + at, nbytes, read.address + at if read.address else 0)
            window = view_memory(part.address, nbytes) if part.address else buffer[:nbytes]
            reader.read_into(offset + part.start, window, cached=cached)
            if bad := _bad_blocks(file.entry, file.digests, part.start, window):
                bad, same = _reread_blocks(store, file, bad, part.start, window)
                if bad and damaged is None:
                    raise damage_of(file.entry, file.reads.file, adjacent_blocks(bad)[0], files.keys_at, same=same)
                if damaged is not None:
                    damaged.extend(bad)
            if not part.address:
                copies.copy(file.reads, part, window)
        with file.lock:
            file.reads_left -= 1
            if not file.reads_left:
                reader.close()
        return waited or not cached

    count = sum(len(plan.reads) for plan in plans)
    # A single read, or a single thread, is not worth starting one. One that copies to an accelerator needs a stream of its own.
    threads = min(threads, count) or 1
    alone = threads == 1 and scope is None and not on_accelerator
    try:
        with windows_for(scattered.values(), window_nbytes, threads) as lend:
            run_workers(
                tasks(), work, threads=threads, buffer_nbytes=window_nbytes, lend=lend, scope=scope, alone=alone
            )
    finally:
        for file in opened:
            if file.reader is not None:
                file.reader.close()
    return sum(file.entry.header_nbytes + sum(read.nbytes for read in file.reads.reads) for file in opened)


def _reread_blocks(
    store: ReadableStore, file: _OpenFile, bad: Sequence[int], start: int, window: memoryview
) -> tuple[list[int], bool]:
    """Read damaged blocks again, into place; return those that are still damaged, and whether both reads agree."""
    entry, damaged = file.entry, []
    same = True
    for block in bad:
        begin = block * entry.block_nbytes
        piece = window[begin - start : begin - start + entry.block_nbytes]

        def fits(data: bytearray, begin: int = begin) -> bool:
            return not _bad_blocks(entry, file.digests, begin, memoryview(data))

        equal = base.repair(store, entry.name, entry.header_nbytes + begin, piece, fits)
        if equal is not None:
            damaged.append(block)
            same = same and equal
    for healed in adjacent_blocks({*bad}.difference(damaged)):
        at, nbytes = entry.header_nbytes + healed.start * entry.block_nbytes, len(healed) * entry.block_nbytes
        base.warn_reread_ok(entry.name, at, min(nbytes, entry.nbytes - at))
    return damaged, same


def _bad_blocks(entry: FileEntry, digests: memoryview, start: int, window: memoryview) -> list[int]:
    """Compare whole blocks, the first at byte `start` of the data, with their digests; return those that differ."""
    if not digests:
        return []  # this file has none
    first = start // entry.block_nbytes
    found = data_file.block_digests(window, entry.block_nbytes)
    expected = digests[first * data_file.DIGEST_NBYTES :][: len(found)]
    if found == expected:
        return []
    starts, size = range(0, len(found), data_file.DIGEST_NBYTES), data_file.DIGEST_NBYTES
    return [first + i for i, at in enumerate(starts) if found[at : at + size] != expected[at : at + size]]


def adjacent_blocks(blocks: Iterable[int]) -> list[range]:
    numbers = np.array(sorted(blocks), np.int64)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [range(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def damage_of(
    entry: FileEntry, file: int, blocks: range, keys_at: KeysAt, *, same: bool | None = None
) -> ChecksumMismatch:
    """Describe blocks of a file that were damaged in two reads; `same`: both reads returned the same bytes."""
    start = blocks.start * entry.block_nbytes
    stop = min(blocks.stop * entry.block_nbytes, entry.data_nbytes)
    keys, begin, end = keys_at(file, start, stop), entry.header_nbytes + start, entry.header_nbytes + stop
    why = f"bytes {begin} to {end} are not what was saved; they hold {keys}"
    hint = "the file was damaged after the save: use another checkpoint, or exclude these keys"
    error = ChecksumMismatch.of(entry.name, why, hint=hint, offset=begin, key=keys)
    return base.with_reread_result(error, same=same)


class Copies:
    """Copies parts of windows to where they belong; shared by all threads of a read."""

    def __init__(self, scattered: Mapping[int, Scattered]) -> None:
        self._scattered = scattered
        self._lock = threading.Lock()
        self._cut: dict[tuple[Scatter, int], dict[int, bytes]] = {}
        """Parts of elements in several windows, as in files of other programs, by where in the element they begin."""

    def copy(self, reads: FileReads, read: Read, window: memoryview) -> None:
        """Copy everything that is wanted of a window. The window may be reused when this returns."""
        stop = read.start + read.nbytes
        source = address_of(window) - read.start
        for start, nbytes, address in reads.edges.touching(read.start, stop):
            low, high = max(start, read.start), min(start + nbytes, stop)
            if high > low:
                copy_memory(address + low - start, source + low, high - low)
        on_accelerators: dict[int, Scattered] = {}
        try:
            for scatter in reads.scatters.touching(read.start, stop):
                target = self._scattered[scatter.want]
                if target.accelerator is not None:
                    on_accelerators[target.accelerator] = target
                at = read.start - scatter.start
                if not target.write_chunk(scatter.shape, scatter.source, scatter.target, window, at):
                    self.copy_boxes(scatter, read, window, target)
        finally:
            for target in on_accelerators.values():
                target.wait()  # before the window is reused

    def copy_boxes(self, scatter: Scatter, read: Read, window: memoryview, target: Scattered) -> None:
        """Cut the window's part of the chunk into boxes, and copy what is wanted of each."""
        size = scatter.itemsize
        before = read.start - scatter.start
        low = max(before, 0)
        high = min(before + read.nbytes, boxes.whole(scatter.shape).volume * size)
        first, last = -(-low // size), high // size
        if first < last:
            _copy_elements(scatter, first, last, window[first * size - before : last * size - before], target)
        for element in {low // size, high // size}:
            begin, end = max(low, element * size), min(high, (element + 1) * size)
            if 0 < end - begin < size:
                part = bytes(window[begin - before : end - before])
                self._copy_cut(scatter, element, begin - element * size, part, target)

    def _copy_cut(self, scatter: Scatter, element: int, at: int, part: bytes, target: Scattered) -> None:
        """Keep a part of an element, or copy the element if this was its last missing part."""
        (box,) = boxes.flat_range_to_boxes(scatter.shape, element, element + 1)
        if boxes.intersect(box, scatter.source) is None:
            return  # not wanted; its other parts may never be read
        with self._lock:
            parts = self._cut.setdefault((scatter, element), {})
            parts[at] = part
            if sum(map(len, parts.values())) < scatter.itemsize:
                return
            del self._cut[scatter, element]
        joined = bytearray().join(parts[begin] for begin in sorted(parts))
        _copy_elements(scatter, element, element + 1, memoryview(joined), target)


def _copy_elements(scatter: Scatter, first: int, last: int, data: memoryview, target: Scattered) -> None:
    at = 0
    for box in boxes.flat_range_to_boxes(scatter.shape, first, last):
        nbytes = box.volume * scatter.itemsize
        if common := boxes.intersect(box, scatter.source):
            inside = boxes.relative(common, scatter.source)
            offsets = tuple(t + i for t, i in zip(scatter.target.offsets, inside.offsets, strict=True))
            target.write(
                boxes.Box(offsets, common.sizes), data[at : at + nbytes], box.sizes, boxes.relative(common, box)
            )
        at += nbytes


def damage_of_file(
    files: DataFiles, number: int, *, threads: int, window_nbytes: int, scope: CancelScope | None = None
) -> Iterator[CheckpointError]:
    """Read a whole file and yield the damage in it; raise if its size is wrong, or its header is damaged."""
    file, keys_at = files.entries[number], files.keys_at
    # The size must be checked first, because the plan relies on the size in the record.
    open_checked(files.store, file, files.digests)[0].close()
    coded: list[DamagedCheckpoint] = []
    damaged: list[int] = []
    # Otherwise verification would stop at the first damaged frame.
    files = files._replace(store=collecting_damage(files.store, coded))
    plans = [every_block(number, file.data_nbytes, window_nbytes=window_nbytes)]
    read_files(files, plans, {}, threads=threads, window_nbytes=window_nbytes, damaged=damaged, scope=scope)
    if not coded:
        yield from _few(file, [damage_of(file, number, blocks, keys_at) for blocks in adjacent_blocks(damaged)])
        return
    errors: list[CheckpointError] = []
    for error in _by_offset(coded):
        start, stop = (error.details.get(name, 0) - file.header_nbytes for name in ("plain_start", "plain_stop"))
        keys = keys_at(number, start, stop) if stop > 0 else "the header"
        held = f"; they hold {keys}" if keys else ""
        errors.append(DamagedCheckpoint(f"{error.message}{held}", hint=error.hint, **error.details))
    yield from _few(file, errors)


def _few(file: Blob, errors: Sequence[CheckpointError]) -> Iterator[CheckpointError]:
    yield from errors[:_MOST_RANGES]
    if len(errors) > _MOST_RANGES:
        yield DamagedCheckpoint(f"{file.name}: {len(errors) - _MOST_RANGES} more damaged ranges")


def stored_damage(
    store: ReadableStore, record: Record, *, deep: bool, threads: int, window_nbytes: int
) -> Iterator[CheckpointError]:
    """Yield damage in files whose keys are not available; unless `deep`, of sizes, tables and headers only."""
    blobs = [blob for blob in (record.index, *record.files) if blob.chain is not None or isinstance(blob, FileEntry)]
    # Of coded files, only the stored form can be verified, which has digests of its own.
    entries = [
        blob
        if isinstance(blob, FileEntry) and blob.chain is None
        else FileEntry(name=blob.name, nbytes=blob.nbytes, header_nbytes=0, block_nbytes=0, checksum="")
        for blob in blobs
    ]

    def keys_at(number: int, at: int, end: int) -> str:  # noqa: ARG001
        return "tensors that only the encrypted index names" if blobs[number].chain is None else ""

    files = DataFiles(DecodingStore(store, blobs, None), entries, keys_at, {})
    at_once, over = min(threads, len(entries)) or 1, threading.Event()
    scope = CancelScope(wanted=lambda: not over.is_set())

    def look(number: int) -> list[CheckpointError]:
        try:
            if deep:
                each = threads // at_once
                return [*damage_of_file(files, number, threads=each, window_nbytes=window_nbytes, scope=scope)]
            open_checked(files.store, entries[number])[0].close()
        except DamagedCheckpoint as exc:
            return [exc]
        except BaseException:
            over.set()
            raise
        return []

    with ThreadPoolExecutor(at_once, thread_name_prefix="shardkeep-verify") as pool:
        try:
            for found in pool.map(look, range(len(entries))):
                yield from found
        finally:  # if the store failed, or the caller stops early, the rest is not read
            over.set()
            pool.shutdown(cancel_futures=True)


def _by_offset(errors: Sequence[DamagedCheckpoint]) -> list[DamagedCheckpoint]:
    """Sort errors, and drop copies: two reads may share a frame."""
    found = {int(error.details.get("offset", 0)): error for error in errors}
    return [error for _, error in sorted(found.items())]
