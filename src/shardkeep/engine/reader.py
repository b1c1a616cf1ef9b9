"""
Digests that lie beside the data file they are of, as the store had no place for them in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from shardkeep.codecs.coded_store import FrameReader, checksum_of
from shardkeep.engine.memory import Scattered, copy_memory, view_memory
from shardkeep.engine.workers import run_workers, windows_for
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    ChecksumMismatch,
    MalformedFile,
    WrongSize,
)
from shardkeep.format.boxes import (
    ITEMSIZES,
    Box,
    Boxes,
    IntArray,
    concat_ranges,
    contiguous_run,
    flat_range_to_boxes,
    intersect,
    relative,
    segment_starts,
    whole,
)
from shardkeep.format.checksum import DIGEST_NBYTES, block_digests, checksum_text, digest
from shardkeep.format.data_file import (
    MAX_BLOCK_NBYTES,
    count_blocks,
    decode_sidecar,
    read_block_digests,
    sidecar_nbytes,
)
from shardkeep.format.index import Index
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME, FileEntry, Record, decode_record
from shardkeep.layouts.native import data_sizes, save_id_of
from shardkeep.plan.load_plan import Edge, FileReads, Read, Scatter, check_tensors, chunk_rows
from shardkeep.storage.base import BlobReader, Gets, Opens
from shardkeep.storage.buffers import address_of
from shardkeep.storage.reread import (
    SecondRead,
    decode_or_reread,
    warn_reread_ok,
    with_reread_result,
)

if TYPE_CHECKING:
    import torch


def read_sidecar(store: Opens, entry: FileEntry, blocks: int) -> tuple[bytes, bytes]:
    """
    Return the digest of a data file's header, and those of all its blocks, from the file beside it.

    Raises:
        WrongSize: that is missing, or is not as large as it must be.
        ChecksumMismatch: it is not what was written.

    """
    name = entry.blocks or ""
    try:
        reader = store.open(name)
    except BlobNotFound as exc:
        raise WrongSize(f"{name}: the file is missing", hint="restore it from a copy", file=name) from exc
    with closing(reader):
        if reader.nbytes != sidecar_nbytes(blocks):
            raise WrongSize(
                f"{name}: {reader.nbytes} bytes, and {sidecar_nbytes(blocks)} are the digests of {entry.name}",
                hint="the file was cut short or changed after the save",
                file=name,
            )
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))

    def decode(data: bytearray) -> tuple[bytes, bytes]:
        if checksum_text(digest(data)) != entry.checksum:
            raise ChecksumMismatch(
                f"{name}: the digests of {entry.name} have checksum {checksum_text(digest(data))}, the commit record says"
                f" {entry.checksum}",
                hint="the file was damaged after the save",
                file=name,
                offset=0,
            )
        return decode_sidecar(bytes(data), blocks=blocks, where=name)

    with closing(SecondRead(name, store)) as again:
        return decode_or_reread(data, decode, lambda: again.read(0, len(data)), name=name)


# Out of a window of a file, to where its bytes belong: runs, rows and boxes.
#
# Windows are cut at multiples of every element size, but files of other makers may begin a tensor anywhere, so that
# an
# element lies in two windows. Its bytes are then kept until all of them are there.


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


# The read pipeline: blocks are read straight into place or into a buffer, checked, and copied where they belong.
#
# Few files are open at a time, each from its first read to its last. Memory beyond the destination is one window a
# thread. A file whose size or header is not what the commit record says is never read further.

_HOT_NBYTES = 2 * MAX_BLOCK_NBYTES
"""What is in memory already is read, hashed and copied in pieces of this size, all while they are in the CPU's cache."""

KeysAt = Callable[[int, int, int], str]
"""Which tensors lie in a range of a file's data, in words; asked only when there is something wrong with it."""
_HEADERS_NBYTES = 64 << 20


class ReadableStore(Opens, Gets, Protocol):
    """What reading needs of a store."""


class DigestCache:
    """The block digests of files whose headers were checked, so that a header is read once; large ones are not kept."""

    def __init__(self) -> None:
        self._digests: dict[FileEntry, bytes] = {}
        self._room_nbytes = _HEADERS_NBYTES

    def get(self, entry: FileEntry) -> bytes | None:
        """Return a file's digests if they are here."""
        return self._digests.get(entry)

    def keep(self, entry: FileEntry, digests: bytes) -> None:
        """Keep a file's digests if there is room."""
        if entry not in self._digests and len(digests) <= self._room_nbytes:
            self._room_nbytes -= len(digests)
            self._digests[entry] = digests


@dataclass(frozen=True)
class Source:
    """An opened checkpoint: where its bytes are and what they mean."""

    store: ReadableStore
    record: Record
    index: Index
    headers: DigestCache | None = None
    """Those checked so far, where there will be more reads."""

    # What is asked of a checkpoint whatever its layout; this one is native.

    def check(self, tensors: IntArray) -> None:
        """Insist that these tensors are stored, before memory is made for them."""
        check_stored(self, tensors)

    def check_index(self, tensors: IntArray) -> None:
        """Insist that what is said of these tensors makes sense."""
        check_tensors(self.index, tensors, data_sizes(self.record))

    def to_verify(self) -> tuple[DigestCache, KeysAt]:
        """Return what files are verified with: the headers to trust, which are none, and what names tensors in them."""
        return DigestCache(), keys_at(self.index)

    def undigested(self, file: int) -> Iterator[CheckpointError] | None:  # noqa: ARG002 - every file has digests
        """Find damage in a file that has no digests; None for one that has."""
        return None

    def place_of(self, chunk: int) -> tuple[str, int]:
        """Return the file of a chunk, and where in it the chunk begins."""
        return str(int(self.index.chunks.file[chunk])), int(self.index.chunks.start[chunk])

    def fill(
        self,
        tensor: IntArray,
        boxes: Boxes,
        into: Sequence[torch.Tensor],
        *,
        threads: int,
        budget_nbytes: int,
        first_file: float = 0.0,
    ) -> int:
        """
        Fill tensors from the checkpoint, and return the bytes read.

        Args:
            tensor: for each row, the row of its tensor in the index.
            boxes: the box each row wants of it.
            into: what it is to be filled into: of the box's shape, on any device, of any stride and dtype.
            threads: how many to use.
            budget_nbytes: memory to use beyond the destination.
            first_file: where in the list of files to begin, from 0 to 1, so that ranks do not all begin with the first.

        """
        from shardkeep.engine.fill import fill_native  # noqa: PLC0415 - only reading a tensor needs torch

        limits = {"threads": threads, "budget_nbytes": budget_nbytes}
        return fill_native(self, tensor, boxes, into, **limits, first_file=first_file)


class _Task(NamedTuple):
    file: _OpenFile
    read: Read


@dataclass
class _OpenFile:
    store: Opens
    reads: FileReads
    entry: FileEntry
    reads_left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: BlobReader | None = None
    digests: memoryview = field(default_factory=lambda: memoryview(b""))


def open_checked(store: Opens, entry: FileEntry, headers: DigestCache | None = None) -> tuple[BlobReader, bytes]:
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
        if not entry.block_nbytes:
            return reader, b""
        if headers and (known := headers.get(entry)) is not None:
            return reader, known
        digests = _digests_of(store, entry, reader)
    except BaseException:
        reader.close()
        raise
    if headers:
        headers.keep(entry, digests)
    return reader, digests


def _digests_of(store: Opens, entry: FileEntry, reader: BlobReader) -> bytes:
    """Return the digests of all blocks of a file, from its header or from the file beside it, once these are checked."""
    header = bytearray(entry.header_nbytes)
    reader.read_into(0, memoryview(header))
    blocks = count_blocks(entry.nbytes - entry.header_nbytes, entry.block_nbytes)
    apart = None if entry.blocks is None else read_sidecar(store, entry, blocks)
    chain = reader.chain if isinstance(reader, FrameReader) else None

    def decode(header: bytearray) -> bytes:
        if apart is None:
            found, expected = checksum_of(header, chain), entry.checksum
        else:
            found, expected = checksum_text(digest(header)), checksum_text(apart[0])
        if found != expected:
            raise ChecksumMismatch(
                f"{entry.name}: the header has checksum {found}, the commit record says {expected}",
                hint="the file was damaged after the save",
                file=entry.name,
                offset=0,
            )
        return read_block_digests(header, blocks=blocks, where=entry.name) if apart is None else apart[1]

    with closing(SecondRead(entry.name, store)) as again:
        return decode_or_reread(header, decode, lambda: again.read(0, len(header)), name=entry.name)


def _open_explained(store: ReadableStore, entry: FileEntry, headers: DigestCache | None) -> tuple[BlobReader, bytes]:
    try:
        return open_checked(store, entry, headers)
    except WrongSize as exc:
        if isinstance(exc.__cause__, BlobNotFound):
            raise explain_missing(store, entry.name) from exc
        raise


def explain_missing(store: Gets, name: str) -> WrongSize:
    """Say why a file of a committed checkpoint may be gone: another save replaced it, or it was lost."""
    try:
        now = decode_record(store.get(RECORD_NAME, limit=MAX_RECORD_NBYTES), RECORD_NAME).save_id
    except CheckpointError:
        now = None
    if now is not None and save_id_of(name) not in {None, now}:
        return WrongSize(
            f"{name}: the file is gone: the checkpoint was replaced by another save ({now}) meanwhile",
            hint="open or load it again",
            file=name,
        )
    return WrongSize(f"{name}: the file is missing", hint="restore it from a copy", file=name)


def check_stored(source: Source, tensors: IntArray) -> None:
    """
    Insist that these tensors are stored, in files as long as the record says, before memory is made for them.

    They are different ones, none tied to another.
    """
    index, sizes = source.index, data_sizes(source.record)
    check_tensors(index, tensors, sizes)
    files = np.unique(index.chunks.file[concat_ranges(*chunk_rows(index, tensors))]).tolist()
    elements = np.asarray(index.tensors.shape[tensors], np.int64).prod(axis=1)
    wanted = sum((elements * ITEMSIZES[index.tensors.dtype[tensors]]).tolist())
    if wanted > sum(sizes[files].tolist()):
        raise MalformedFile(f"{source.record.index.name}: tensors of {wanted} bytes, more than their files hold")
    for file in files:
        _open_explained(source.store, source.record.files[file], source.headers)[0].close()


def read_files(
    store: ReadableStore,
    files: Sequence[FileEntry],
    plans: Sequence[FileReads],
    scattered: Mapping[int, Scattered],
    *,
    key_at: KeysAt,
    threads: int,
    window_nbytes: int,
    headers: DigestCache | None = None,
    damaged: list[int] | None = None,
) -> int:
    """
    Do all reads and return the bytes read.

    `scattered` gives the memory of scatters by want. Damaged blocks are an error, or their numbers are added to
    `damaged`.
    """
    copies = Copies(scattered)
    opened = [_OpenFile(store, plan, files[plan.file], len(plan.reads)) for plan in plans]
    # Each piece costs turns at the interpreter's lock, which many cores beside an accelerator would all wait for.
    on_accelerator = any(each.accelerator is not None for each in scattered.values())
    hot_nbytes = window_nbytes if on_accelerator else _HOT_NBYTES

    def tasks() -> Iterator[_Task]:
        for file in opened:
            for read in file.reads.reads:
                yield _Task(file, read)

    def work(task: _Task, buffer: memoryview) -> bool:
        file, read = task
        with file.lock:
            if file.reader is None:
                file.reader, digests = _open_explained(store, file.entry, headers)
                file.digests = memoryview(digests)
            reader = file.reader
        cached = _do_read(file, reader, read, buffer, copies, hot_nbytes, key_at, damaged)
        with file.lock:
            file.reads_left -= 1
            if not file.reads_left:
                reader.close()
        return not cached

    try:
        with windows_for(scattered.values(), window_nbytes, threads) as lend:
            run_workers(tasks(), work, threads=threads, buffer_nbytes=window_nbytes, lend=lend)
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
    copies: Copies,
    hot_nbytes: int,
    key_at: KeysAt,
    damaged: list[int] | None,
) -> bool:
    """Read, check and copy; return whether the bytes were in memory, so that no disk was waited for."""
    offset = file.entry.header_nbytes
    cached = reader.cached(offset + read.start, read.nbytes)
    step = hot_nbytes if cached else read.nbytes
    for at in range(0, read.nbytes, step):
        nbytes = min(step, read.nbytes - at)
        part = Read(read.start + at, nbytes, read.address + at if read.address else 0)
        window = view_memory(part.address, nbytes) if part.address else buffer[:nbytes]
        reader.read_into(offset + part.start, window, cached=cached)
        if bad := bad_blocks(file.entry, file.digests, part.start, window):
            bad, same = _read_again(file, bad, part.start, window)
            if bad and damaged is None:
                raise damage_of(file.entry, file.reads.file, adjacent_blocks(bad)[0], key_at, same=same)
            if damaged is not None:
                damaged.extend(bad)
        if not part.address:
            copies.copy(file.reads, part, window)
    return cached


def _read_again(file: _OpenFile, bad: Sequence[int], start: int, window: memoryview) -> tuple[list[int], bool | None]:
    """Read blocks that differ once more, into place; return those that still do, and if both reads of them agree."""
    entry, differ = file.entry, []
    same: bool | None = True
    with closing(SecondRead(entry.name, file.store)) as again:
        for block in bad:
            begin = block * entry.block_nbytes
            piece = window[begin - start : begin - start + entry.block_nbytes]
            verdict = again.mend(entry.header_nbytes + begin, piece, _fits(file, begin))
            if not verdict.fits:
                differ.append(block)
                same = same and verdict.same
    for healed in adjacent_blocks({*bad}.difference(differ)):
        at, nbytes = entry.header_nbytes + healed.start * entry.block_nbytes, len(healed) * entry.block_nbytes
        warn_reread_ok(entry.name, at, min(nbytes, entry.nbytes - at))
    return differ, same


def _fits(file: _OpenFile, start: int) -> Callable[[bytearray], bool]:
    return lambda data: not bad_blocks(file.entry, file.digests, start, memoryview(data))


def bad_blocks(entry: FileEntry, digests: memoryview, start: int, window: memoryview) -> list[int]:
    """Compare whole blocks, the first at byte `start` of the data, with their digests; return those that differ."""
    if not entry.block_nbytes:
        return []  # nobody took digests of this file
    first = start // entry.block_nbytes
    found = block_digests(window, entry.block_nbytes)
    expected = digests[first * DIGEST_NBYTES :][: len(found)]
    if found == expected:
        return []
    starts = range(0, len(found), DIGEST_NBYTES)
    return [first + i for i, at in enumerate(starts) if found[at:][:DIGEST_NBYTES] != expected[at:][:DIGEST_NBYTES]]


def adjacent_blocks(blocks: Iterable[int]) -> list[range]:
    """Join block numbers that follow each other."""
    found: list[range] = []
    for block in sorted(blocks):
        if found and found[-1].stop == block:
            found[-1] = range(found[-1].start, block + 1)
        else:
            found.append(range(block, block + 1))
    return found


def damage_of(
    entry: FileEntry, file: int, blocks: range, key_at: KeysAt, *, same: bool | None = None
) -> ChecksumMismatch:
    """Describe blocks of a file that were damaged when they were read, twice; `same`: both reads brought the same."""
    start = blocks.start * entry.block_nbytes
    stop = min(blocks.stop * entry.block_nbytes, entry.nbytes - entry.header_nbytes)
    keys = key_at(file, start, stop)
    error = ChecksumMismatch(
        f"{entry.name}: bytes {entry.header_nbytes + start} to {entry.header_nbytes + stop} are not what was saved;"
        f" they hold {keys}",
        hint="the file was damaged after the save: use another checkpoint, or exclude these keys",
        file=entry.name,
        offset=entry.header_nbytes + start,
        key=keys,
    )
    return with_reread_result(error, same=same)


def keys_at(index: Index) -> KeysAt:
    """Make the function that names the tensors in a range of a file; used only to explain damage."""

    def name(file: int, at: int, end: int) -> str:
        ends = np.asarray(index.chunk_ends, np.int64)
        counts = ends - segment_starts(ends)
        tensor = np.repeat(np.arange(len(counts)), counts)
        nbytes = index.chunks.boxes.volumes() * ITEMSIZES[index.tensors.dtype][tensor]
        start = np.asarray(index.chunks.start, np.int64)
        hit = (np.asarray(index.chunks.file) == file) & (start < end) & (start + nbytes > at)
        keys = [repr(index.keys.raw(row).decode()) for row in np.unique(tensor[hit])[:4].tolist()]
        return ", ".join(keys) + (" and others" if len(np.unique(tensor[hit])) > len(keys) else "")

    return name
