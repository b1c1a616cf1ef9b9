"""
Stores in which some blobs pass through codecs, while their users read and write plain bytes at any offset.

Writing: bytes are cut into frames, which the calling thread encodes. Only then is their size known, so frames follow each
other in the order in which they were encoded; a header that is written last costs nothing extra. A table ends the blob.

Reading: only frames that contain the wanted bytes are fetched. Stored bytes are verified before they are decoded, so that
damage can be distinguished from a wrong key, and no codec sees bytes that were not written.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from shardkeep.codecs.base import FramePlace
from shardkeep.codecs.chain import CodecChain
from shardkeep.errors import ChecksumMismatch, DamagedCheckpoint, MalformedFile, StorageError
from shardkeep.format import frames
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.frames import FRAME_NBYTES, MAGIC, MAX_STORED_NBYTES, FrameTable
from shardkeep.format.record import Blob
from shardkeep.storage import base
from shardkeep.storage.buffers import ALIGNMENT, PerThread, Scratch, aligned_buffer, copy, flat

_TAIL_NBYTES = 64 << 10
"""First read at the end of a blob: the whole table of a blob of up to a gigabyte."""
REQUEST_NBYTES = 4 << 20
"""Adjacent frames are fetched together, up to this many bytes."""
SCRATCH_NBYTES = len(MAGIC) + REQUEST_NBYTES + FRAME_NBYTES
BATCH = 4
"""Frames that are encoded, and then written, together."""
_SPARE_FRAMES = 64
_SMALL_FRAME_NBYTES = 64 << 10
_MOST_TABLES = 128
_HINT = "the file was damaged after the save: use another checkpoint, or another copy of this one"


class Seal(msgspec.Struct, frozen=True):
    """What the commit record contains about a coded blob, in addition to what it contains about a plain one."""

    stored_nbytes: int
    table_checksum: str


class EncodingStore:
    """A store for writing. Can be used by several threads."""

    def __init__(
        self, inner: base.WritableStore, chains: Mapping[str, CodecChain], seals: dict[str, Seal] | None = None
    ) -> None:
        """`chains` has the chain of each coded blob; all others are written as they are. `seals` gets those of finished blobs."""
        self._inner = inner
        self._chains = chains
        # For the stored form of a batch, and to align it to a page.
        largest = max((min(chain.bound(FRAME_NBYTES), MAX_STORED_NBYTES) for chain in chains.values()), default=0)
        self.scratch = PerThread(lambda: aligned_buffer(BATCH * largest + ALIGNMENT))
        self.seals = {} if seals is None else seals

    def create(self, name: str, nbytes: int) -> base.BlobWriter:
        chain = self._chains.get(name)
        if chain is None:
            return self._inner.create(name, nbytes)
        with base.abandoning(base.create_upto(self._inner, name, _room_for(nbytes, chain))) as writer:
            return FrameWriter(writer, name, nbytes, chain, self)

    def delete(self, name: str) -> None:
        self._inner.delete(name)


def put_coded(
    store: base.WritableStore, name: str, data: bytes, chain: CodecChain, *, frame_nbytes: int = FRAME_NBYTES
) -> Seal:
    """Write a whole blob durably through a chain, and return its seal. Smaller frames have no room for their table."""
    coded = EncodingStore(store, {name: chain})
    with base.abandoning(coded.create(name, len(data))) as writer:
        for at in range(0, len(data), frame_nbytes):
            writer.write_at(at, memoryview(data)[at : at + frame_nbytes])
        writer.finish()
    return coded.seals[name]


def _room_for(nbytes: int, chain: CodecChain) -> int:
    """Return how much space to create a coded blob with; what is not used is freed in the end."""
    # Every write ends a frame, wherever it ends: there is space for frames much smaller than necessary.
    most = -(-nbytes // FRAME_NBYTES) + nbytes // _SMALL_FRAME_NBYTES + _SPARE_FRAMES
    overhead = max(0, chain.bound(FRAME_NBYTES) - FRAME_NBYTES, chain.bound(1) - 1)
    return len(MAGIC) + nbytes + most * overhead + frames.table_nbytes(most)


class FrameWriter:
    """Writes plain bytes to a coded blob. Can be used by several threads."""

    def __init__(self, inner: base.BlobWriter, name: str, nbytes: int, chain: CodecChain, store: EncodingStore) -> None:
        """`finish` adds to the seals of the store."""
        self._inner, self._name, self._nbytes, self._chain, self._store = inner, name, nbytes, chain, store
        self._lock = threading.Lock()
        self._numbered = 0
        self._end = len(MAGIC)
        self._rows: list[tuple[int, int, int, int, int, bytes]] = []
        """Of each frame: offset and size of its plain bytes, those of its stored bytes, its number and its digest."""
        inner.write_at(0, memoryview(MAGIC))

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        base.check_fits(self._name, self._name, offset, len(view), self._nbytes)
        for at in range(0, len(view), BATCH * FRAME_NBYTES):
            self._write_batch(offset + at, view[at : at + BATCH * FRAME_NBYTES])

    def _write_batch(self, offset: int, view: memoryview) -> None:
        starts = range(0, len(view), FRAME_NBYTES)
        with self._lock:
            first, self._numbered = self._numbered, self._numbered + len(starts)
        places = [
            FramePlace(self._name, first + row, offset + at, min(FRAME_NBYTES, len(view) - at))
            for row, at in enumerate(starts)
        ]
        stored = [flat(memoryview(each)) for each in self._chain.encode(view, places)]
        total = sum(map(len, stored))
        with self._lock:
            start, self._end = self._end, self._end + total
        # At the same offset within a page as in the blob, so that direct I/O can write most of it from here.
        together, skew = self._store.scratch.get(), start % ALIGNMENT
        at, rows = 0, []
        for place, each in zip(places, stored, strict=True):
            if len(each) > MAX_STORED_NBYTES:
                raise StorageError(
                    f"{self._name}: the codecs made {len(each)} bytes of a frame of {place.nbytes} at offset"
                    f" {place.offset}, expected at most {MAX_STORED_NBYTES}",
                    hint="use codecs that do not grow frames so much", name=self._name, offset=place.offset,
                )  # fmt: skip
            into = together[skew + at : skew + at + len(each)]
            copy(into, each)
            rows.append((place.offset, place.nbytes, start + at, len(each), place.number, digest(into)))
            at += len(each)
        del stored, each
        self._inner.write_at(start, together[skew : skew + total])
        with self._lock:
            self._rows.extend(rows)

    def finish(self, nbytes: int | None = None) -> None:
        end = base.checked_end(self._name, self._name, nbytes, self._nbytes)
        rows = sorted(self._rows)
        start, plain, stored_start, length, number = np.array([row[:5] for row in rows], np.int64).reshape(-1, 5).T
        table = FrameTable(start, plain, stored_start, length, number, b"".join(row[5] for row in rows))
        if not np.array_equal(table.start, np.cumsum(table.nbytes) - table.nbytes) or table.plain_nbytes != end:
            message = f"{self._name}: {table.plain_nbytes} bytes were written, expected each of {end} once"
            raise StorageError(message, name=self._name, errno=errno.EINVAL)
        encoded = frames.encode_table(table)
        self._inner.write_at(self._end, memoryview(encoded))
        stored = self._end + len(encoded)
        self._inner.finish(stored)
        self._store.seals[self._name] = Seal(stored, checksum_text(digest(encoded)))

    def abandon(self) -> None:
        self._inner.abandon()


def collecting_damage(store: base.ReadableStore, errors: list[DamagedCheckpoint]) -> base.ReadableStore:
    """Return the store so that damaged frames add to `errors` instead of raising; a store without codecs as it is."""
    view = getattr(store, "collecting_damage", None)
    return store if view is None else cast("base.ReadableStore", view(errors))


class DecodingStore:
    """A store for reading a checkpoint. Can be used by several threads."""

    def __init__(self, inner: base.ReadableStore, blobs: Iterable[Blob], chains: Sequence[CodecChain] | None) -> None:
        """`blobs` are those of the commit record, and `chains` its chains, opened; None: what is stored is only verified."""
        self.inner = inner
        coded = ((blob, blob.chain) for blob in blobs if blob.chain is not None)
        self._coded = {blob.name: (blob, chains[number] if chains is not None else None) for blob, number in coded}
        self._scratch = PerThread(lambda: aligned_buffer(SCRATCH_NBYTES))
        self._tables: dict[str, FrameTable] = {}
        self._errors: list[DamagedCheckpoint] | None = None

    def drop_cached(self, name: str, offset: int, nbytes: int) -> None:
        """Drop a range from caches; all of a coded blob, because any of its stored bytes may be needed."""
        base.drop_cached(self.inner, name, *((0, 0) if name in self._coded else (offset, nbytes)))

    def collecting_damage(self, errors: list[DamagedCheckpoint]) -> DecodingStore:
        """Return a view that adds errors of damaged frames to a list, and returns zeros for them."""
        other = DecodingStore(self.inner, (), ())
        other._coded, other._tables, other._errors = self._coded, self._tables, errors
        return other

    def open(self, name: str) -> base.BlobReader:
        if name not in self._coded:
            return self.inner.open(name)
        blob, chain = self._coded[name]
        reader = base.open_sized(self.inner, name, blob.stored_nbytes)
        try:
            table = self._table(reader, blob)
            return FrameReader(reader, blob, table, chain, self._scratch, self.inner, self._errors)
        except BaseException:
            reader.close()
            raise

    def _table(self, reader: base.BlobReader, blob: Blob) -> FrameTable:
        """Return a blob's table; it is read once, unless there are too many."""
        table = self._tables.get(blob.name)
        if table is None:
            table = read_table(reader, blob, self.inner)
            if len(self._tables) < _MOST_TABLES:
                self._tables[blob.name] = table
        return table

    def get(self, name: str, *, limit: int) -> bytes:
        if name not in self._coded:
            return self.inner.get(name, limit=limit)
        return base.read_blob(self.open(name), name, name, limit)


def read_table(reader: base.BlobReader, entry: Blob, store: base.ReadableStore) -> FrameTable:
    """Read and verify the table of a coded blob, a second time if it is damaged."""
    stored_nbytes = reader.nbytes
    if stored_nbytes < len(MAGIC) + frames.FOOTER_NBYTES:
        raise MalformedFile(f"{entry.name}: too small for a table of frames", file=entry.name, offset=0)
    nbytes = min(_TAIL_NBYTES, stored_nbytes)
    return base.decode_or_reread(
        _read_tail(partial(base.read_range, reader), entry, nbytes, stored_nbytes),
        lambda tail: _decode_tail(tail, entry, stored_nbytes),
        lambda: _read_tail(partial(base.read_again, store, entry.name), entry, nbytes, stored_nbytes),
        name=entry.name,
        offset=stored_nbytes - nbytes,
    )


def _read_tail(read: Callable[[int, int], bytearray], entry: Blob, nbytes: int, stored_nbytes: int) -> bytearray:
    tail = read(stored_nbytes - nbytes, nbytes)
    with suppress(MalformedFile):  # raised again by `_decode_tail`
        wanted = frames.read_footer(bytes(tail[-frames.FOOTER_NBYTES :]), stored_nbytes=stored_nbytes, where=entry.name)
        if wanted > nbytes:
            return read(stored_nbytes - wanted, wanted)
    return tail


def _decode_tail(tail: bytearray, entry: Blob, stored_nbytes: int) -> FrameTable:
    nbytes = frames.read_footer(bytes(tail[-frames.FOOTER_NBYTES :]), stored_nbytes=stored_nbytes, where=entry.name)
    table = bytes(tail[-nbytes:])
    found = checksum_text(digest(table))
    if found != entry.table_checksum:
        raise ChecksumMismatch(
            f"{entry.name}: the table of frames has checksum {found}, the commit record says {entry.table_checksum},"
            f" from byte {stored_nbytes - nbytes} on",
            hint=_HINT,
            file=entry.name,
            offset=stored_nbytes - nbytes,
        )
    return frames.decode_table(table, plain_nbytes=entry.nbytes, stored_nbytes=stored_nbytes, where=entry.name)


class FrameReader:
    """Reads plain bytes of a coded blob whose size and table are known. Can be used by several threads."""

    def __init__(
        self,
        inner: base.BlobReader,
        entry: Blob,
        table: FrameTable,
        chain: CodecChain | None,
        scratch: Scratch,
        store: base.ReadableStore,
        errors: list[DamagedCheckpoint] | None,
    ) -> None:
        """`errors` collects those of frames damaged in two reads, which become zeros; None: raise. No chain: only verify."""
        self._inner, self._entry, self._table, self.chain = inner, entry, table, chain
        self._scratch, self._store, self._errors = scratch, store, errors
        self.nbytes = entry.nbytes

    # Without the verb `cached`: small reads would decode frames several times, whatever is cached.

    def prefetch(self, offset: int, nbytes: int) -> bool:
        table, filled = self._table, False
        for run in runs_of(table, offset, offset + nbytes):
            stored_nbytes = int(table.stored_nbytes[run.start : run.stop].sum())
            filled |= base.prefetch(self._inner, int(table.stored_start[run.start]), stored_nbytes)
        return filled

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - see above
        view = flat(into)
        base.check_within(self._entry.name, self._entry.name, offset, len(view), self.nbytes)
        scratch = self._scratch.get()
        for place, where, stored in self._frames(offset, offset + len(view), scratch):
            if self.chain is None:
                continue
            low, high = max(place.offset, offset), min(place.offset + place.nbytes, offset + len(view))
            wanted = view[low - offset : high - offset]
            # A frame that is wanted whole is decoded into place, a part of one through a buffer.
            whole = len(wanted) == place.nbytes
            plain = wanted if whole else scratch[SCRATCH_NBYTES - FRAME_NBYTES :][: place.nbytes]
            damaged = stored is None
            if stored is not None:
                try:
                    self.chain.decode(stored, plain, place)
                except DamagedCheckpoint as error:
                    damaged = True
                    error.details.update(where)
                    self._raise_or_collect(error)
            if damaged:
                plain[:] = bytes(len(plain))
            if not whole:
                copy(wanted, plain[low - place.offset : high - place.offset])

    def _frames(
        self, start: int, stop: int, scratch: memoryview
    ) -> Iterator[tuple[FramePlace, dict[str, Any], memoryview | None]]:
        """
        Fetch and verify the frames with bytes of a range, a second time if necessary.

        Yields the place of each, the details of its errors, and its stored bytes; None: they are damaged, and collected.
        """
        table, name = self._table, self._entry.name
        for run in runs_of(table, start, stop):
            begun = int(table.stored_start[run.start])
            nbytes = int(table.stored_nbytes[run.start : run.stop].sum())
            # The magic number is read and verified with the first frame.
            lead = len(MAGIC) if begun == len(MAGIC) else 0
            fetched = scratch if nbytes <= REQUEST_NBYTES else memoryview(bytearray(lead + nbytes))
            fetched = fetched[: lead + nbytes]
            self._inner.read_into(begun - lead, fetched)
            if lead:
                self._verify(fetched[:lead], digest(MAGIC), "", {"file": name, "offset": 0})
            for frame in run:
                at = int(table.stored_start[frame])
                place = FramePlace(name, int(table.number[frame]), int(table.start[frame]), int(table.nbytes[frame]))
                begin, end = place.offset, place.offset + place.nbytes
                where = {"file": name, "offset": at, "plain_start": begin, "plain_stop": end}
                stored = fetched[lead + at - begun :][: int(table.stored_nbytes[frame])]
                form = f"; they are the coded form of bytes {begin} to {end}"
                is_right = self._verify(stored, table.digest(frame), form, where)
                yield place, where, stored if is_right else None

    def _verify(self, stored: memoryview, expected: bytes, form: str, where: dict[str, Any]) -> bool:
        """Return whether bytes have this digest, perhaps when read again; else raise or collect an error."""
        name, at = self._entry.name, where["offset"]
        if digest(stored) == expected:
            return True
        same = base.repair(self._store, name, at, stored, lambda found: digest(found) == expected)
        if same is None:
            base.warn_reread_ok(name, at, len(stored))
            return True
        text = f"{name}: bytes {at} to {at + len(stored)} are not what was saved{form}"
        self._raise_or_collect(base.with_reread_result(ChecksumMismatch(text, hint=_HINT, **where), same=same))
        return False

    def _raise_or_collect(self, error: DamagedCheckpoint) -> None:
        if self._errors is None:
            raise error
        self._errors.append(error)

    def close(self) -> None:
        self._inner.close()


def runs_of(table: FrameTable, start: int, stop: int) -> Iterator[range]:
    """Yield the frames that contain plain bytes of a range, grouped by what is fetched together."""
    if start >= stop:
        return
    first = int(np.searchsorted(table.start, start, "right")) - 1
    last = int(np.searchsorted(table.start, stop, "left"))
    starts = table.stored_start[first:last].tolist()
    ends = (table.stored_start[first:last] + table.stored_nbytes[first:last]).tolist()
    begin = 0
    for row in range(1, last - first + 1):
        joins = row < last - first and starts[row] == ends[row - 1] and ends[row] - starts[begin] <= REQUEST_NBYTES
        if not joins:
            yield range(first + begin, first + row)
            begin = row
