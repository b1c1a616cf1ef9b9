"""
A coded blob that is read: only the frames that hold wanted bytes are fetched, checked and decoded.

What is stored is checked before it is decoded: damage is told from a wrong key, and no codec sees bytes that were not
written. A frame that is wanted whole is decoded straight into place, a part of one by way of a buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np

from shardkeep.codec.codecs import FramePlace
from shardkeep.codec.frame_chain import Chain
from shardkeep.errors import ChecksumMismatch, DamagedCheckpoint, MalformedFile, WrongSize
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.frames import (
    FOOTER_NBYTES,
    FRAME_NBYTES,
    MAGIC,
    MAX_STORED_NBYTES,
    FrameTable,
    decode_table,
    read_footer,
)
from shardkeep.format.record import Blob
from shardkeep.layout.rereading import Again, Verdict, decoded, judged, mend
from shardkeep.store.aligned import ScratchPool, copy, flat
from shardkeep.store.protocol import BlobReader, Opens

_TAIL_NBYTES = 64 << 10
"""What is read at first of the end of a blob: the whole table, of one of up to a gigabyte."""
REQUEST_NBYTES = 4 << 20
"""Frames that lie behind each other are fetched together, up to so much."""
SCRATCH_NBYTES = len(MAGIC) + REQUEST_NBYTES + FRAME_NBYTES
_HINT = "the file was damaged after the save: use another checkpoint, or another copy of this one"


def read_table(reader: BlobReader, entry: Blob, store: Opens | None = None) -> FrameTable:
    """
    Read and check the table of a coded blob that is as large as the commit record says.

    `store` is where the blob is opened anew, if its table is damaged.

    Raises:
        ChecksumMismatch: it is not what was written.
        MalformedFile: it makes no sense.

    """
    stored_nbytes = reader.nbytes
    if stored_nbytes < len(MAGIC) + FOOTER_NBYTES:
        raise MalformedFile(f"{entry.name}: too small to hold a table of frames", file=entry.name, offset=0)
    with closing(Again(entry.name, store, reader)) as again:

        def read(offset: int, nbytes: int) -> bytearray:
            data = bytearray(nbytes)
            reader.read_into(offset, memoryview(data))
            return data

        nbytes = min(_TAIL_NBYTES, stored_nbytes)
        return decoded(
            _table_at_end(read, entry, nbytes, stored_nbytes),
            lambda tail: _decoded_table(tail, entry, stored_nbytes),
            lambda: _table_at_end(again.read, entry, nbytes, stored_nbytes),
            name=entry.name,
            offset=stored_nbytes - nbytes,
            same=again.same,
        )


def _table_at_end(read: Callable[[int, int], bytearray], entry: Blob, nbytes: int, stored_nbytes: int) -> bytearray:
    """Read the end of a blob, so much of it or, if the table is larger, all of that."""
    tail = read(stored_nbytes - nbytes, nbytes)
    with suppress(MalformedFile):  # told by whoever decodes it
        wanted = read_footer(bytes(tail[-FOOTER_NBYTES:]), stored_nbytes=stored_nbytes, where=entry.name)
        if wanted > nbytes:
            return read(stored_nbytes - wanted, wanted)
    return tail


def _decoded_table(tail: bytearray, entry: Blob, stored_nbytes: int) -> FrameTable:
    nbytes = read_footer(bytes(tail[-FOOTER_NBYTES:]), stored_nbytes=stored_nbytes, where=entry.name)
    table = bytes(tail[-nbytes:])
    found = text_of(digest(table))
    if found != entry.table_checksum:
        raise ChecksumMismatch(
            f"{entry.name}: the table of frames has checksum {found}, the commit record says {entry.table_checksum}",
            hint=_HINT,
            file=entry.name,
            offset=stored_nbytes - nbytes,
        )
    return decode_table(table, plain_nbytes=entry.nbytes, stored_nbytes=stored_nbytes, where=entry.name)


def check_size(reader: BlobReader, entry: Blob) -> None:
    """Insist that a coded blob is as large as the commit record says."""
    if reader.nbytes != entry.stored_nbytes:
        raise WrongSize(
            f"{entry.name}: {reader.nbytes} bytes, the commit record says {entry.stored_nbytes}",
            hint="the file was cut short or changed after the save",
            file=entry.name,
        )


class FrameReader:
    """A reader of plain bytes over a reader of what is stored. May be used by several threads."""

    def __init__(
        self,
        inner: BlobReader,
        entry: Blob,
        table: FrameTable,
        chain: Chain,
        scratch: ScratchPool,
        noted: list[DamagedCheckpoint] | None = None,
        store: Opens | None = None,
    ) -> None:
        """
        Read a blob whose size and table are known.

        Args:
            inner: reads what is stored.
            entry: the blob.
            table: its frames.
            chain: what they went through.
            scratch: has buffers of `SCRATCH_NBYTES`.
            noted: damage is added to it and read as zeros; else it is raised.
            store: where the blob is opened anew to read once more what is damaged; else `inner` is asked again.

        """
        self._inner = inner
        self._store = store
        self._entry = entry
        self._table = table
        self._scratch = scratch
        self._noted = noted
        self._holds = True
        self.chain = chain
        """What its bytes went through."""
        scratch.hold()

    @property
    def nbytes(self) -> int:
        """How many plain bytes there are."""
        return self._entry.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:  # noqa: ARG002 - whatever is at hand
        """Say that they have to be waited for: small reads would decode frames several times."""
        return False

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - see `cached`
        """Fill all of `into` with plain bytes."""
        view = flat(into)
        if offset < 0 or offset + len(view) > self.nbytes:
            raise WrongSize(
                f"{self._entry.name}: wanted {len(view)} bytes at offset {offset}, of {self.nbytes}",
                file=self._entry.name,
                offset=offset,
            )
        with self._scratch.lease() as scratch:
            for run in runs_of(self._table, offset, offset + len(view)):
                self._read_run(run, offset, view, scratch)

    def _read_run(self, run: range, offset: int, view: memoryview, scratch: memoryview) -> None:
        table = self._table
        base = int(table.stored_start[run.start])
        nbytes = int(table.stored_nbytes[run.start : run.stop].sum())
        # What stands before the first frame is read and checked with it.
        lead = len(MAGIC) if base == len(MAGIC) else 0
        most = REQUEST_NBYTES + lead
        stored = scratch[: lead + nbytes] if lead + nbytes <= most else memoryview(bytearray(lead + nbytes))
        self._inner.read_into(base - lead, stored)
        if lead and stored[:lead] != MAGIC:
            verdict = self._mend(0, stored[:lead], lambda found: found == MAGIC)
            if not verdict.fits:
                self._note(_no_magic(self._entry, same=verdict.same))
        stored = stored[lead:]
        for frame in run:
            at = int(table.stored_start[frame]) - base
            place = place_of(self._entry, table, frame)
            low, high = max(place.offset, offset), min(place.offset + place.nbytes, offset + len(view))
            into = view[low - offset : high - offset]
            whole = len(into) == place.nbytes
            plain = into if whole else scratch[SCRATCH_NBYTES - FRAME_NBYTES :][: place.nbytes]
            try:
                self._decode(frame, stored[at : at + int(table.stored_nbytes[frame])], plain, place)
            except DamagedCheckpoint as error:
                self._note(error)
                plain[:] = bytes(len(plain))
            if not whole:
                copy(into, plain[low - place.offset : high - place.offset])

    def _note(self, error: DamagedCheckpoint) -> None:
        if self._noted is None:
            raise error
        self._noted.append(error)

    def _decode(self, frame: int, data: memoryview, into: memoryview, place: FramePlace) -> None:
        meant = self._table.digest(frame)
        if digest(data) != meant:
            at = int(self._table.stored_start[frame])
            verdict = self._mend(at, data, _has_digest(meant))
            if not verdict.fits:
                raise damaged_frame(self._entry, self._table, frame, same=verdict.same)
        try:
            self.chain.decode(data, into, place)
        except DamagedCheckpoint as error:
            error.details.update(_where(self._entry, self._table, frame))
            raise

    def _mend(self, at: int, stored: memoryview, fits: Callable[[bytearray], bool]) -> Verdict:
        return mend(self._entry.name, self._store, self._inner, at, stored, fits)

    def close(self) -> None:
        """Release what it holds."""
        if self._holds:
            self._holds = False
            self._scratch.let_go()
        self._inner.close()


def place_of(entry: Blob, table: FrameTable, frame: int) -> FramePlace:
    """Return what a frame was written as."""
    return FramePlace(entry.name, int(table.number[frame]), int(table.start[frame]), int(table.nbytes[frame]))


def runs_of(table: FrameTable, start: int, stop: int) -> Iterator[range]:
    """Go through the frames that hold plain bytes of a range, those together that are fetched together."""
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


def damaged_frame(entry: Blob, table: FrameTable, frame: int, *, same: bool | None = None) -> ChecksumMismatch:
    """Describe a frame whose stored bytes were not those that were written, twice; `same`: both reads agree."""
    at, place = int(table.stored_start[frame]), place_of(entry, table, frame)
    error = ChecksumMismatch(
        f"{entry.name}: bytes {at} to {at + int(table.stored_nbytes[frame])} are not what was saved; they are the coded"
        f" form of bytes {place.offset} to {place.offset + place.nbytes}",
        hint=_HINT,
        **_where(entry, table, frame),
    )
    return judged(error, same=same)


def _no_magic(entry: Blob, *, same: bool | None) -> ChecksumMismatch:
    text = f"{entry.name}: bytes 0 to {len(MAGIC)} are not what was saved"
    return judged(ChecksumMismatch(text, hint=_HINT, file=entry.name, offset=0), same=same)


def _where(entry: Blob, table: FrameTable, frame: int) -> dict[str, Any]:
    start, offset = int(table.start[frame]), int(table.stored_start[frame])
    stop = start + int(table.nbytes[frame])
    return {"file": entry.name, "offset": offset, "plain_start": start, "plain_stop": stop}


def damaged_frames(reader: BlobReader, entry: Blob, table: FrameTable, store: Opens | None = None) -> Iterator[int]:
    """
    Read all that is stored, without decoding it, and go through the frames that are not what was written, also when they
    are read once more: from `store`, where the blob is opened anew, or by the same reader.

    Raises:
        ChecksumMismatch: not even what stands before the first frame is.

    """
    magic = bytearray(len(MAGIC))
    reader.read_into(0, memoryview(magic))
    if magic != MAGIC:
        verdict = mend(entry.name, store, reader, 0, memoryview(magic), lambda found: found == MAGIC)
        if not verdict.fits:
            raise _no_magic(entry, same=verdict.same)
    order = np.argsort(table.stored_start, kind="stable")
    starts = table.stored_start[order].tolist()
    ends = (table.stored_start + table.stored_nbytes)[order].tolist()
    buffer = memoryview(bytearray(MAX_STORED_NBYTES))
    first = 0
    while first < len(starts):
        # As many as fit: they lie behind each other, without gaps.
        last = max(first + 1, bisect_right(ends, starts[first] + len(buffer)))
        base = starts[first]
        reader.read_into(base, buffer[: ends[last - 1] - base])
        for row in range(first, last):
            frame = int(order[row])
            stored, meant = buffer[starts[row] - base : ends[row] - base], table.digest(frame)
            if digest(stored) == meant:
                continue
            if not mend(entry.name, store, reader, starts[row], stored, _has_digest(meant)).fits:
                yield frame
        first = last


def _has_digest(meant: bytes) -> Callable[[bytearray], bool]:
    return lambda found: digest(found) == meant
