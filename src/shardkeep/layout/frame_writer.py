"""
A coded blob that is being written: plain bytes come in at any offset, frames go out one behind the other.

Bytes are cut into frames, which the calling thread encodes; only then is it known how long they are, and where in the
blob they go. So what is written last, such as a header, costs nothing, and the store below sees bytes nearly in order.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from shardkeep.codec.codecs import FramePlace
from shardkeep.codec.frame_chain import Chain
from shardkeep.errors import StorageError
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.frames import FRAME_NBYTES, MAGIC, MAX_STORED_NBYTES, FrameTable, encode_table, table_nbytes
from shardkeep.store.aligned import ALIGNMENT, ScratchPool, copy, flat
from shardkeep.store.protocol import BlobWriter, checked_end

BATCH = 4
"""Frames that are encoded and then written at once."""
_SPARE_FRAMES = 64
_SMALL_FRAME_NBYTES = 64 << 10


class Seal(msgspec.Struct, frozen=True):
    """What the commit record says of a coded blob, besides what it says of a plain one."""

    stored_nbytes: int
    table_checksum: str


class _Frame(NamedTuple):
    place: FramePlace
    stored_start: int
    stored_nbytes: int
    digest: bytes


def room_for(nbytes: int, chain: Chain) -> int:
    """
    Return how much room to take for a coded blob.

    Parts that are written may end anywhere, and with each a frame ends: there is room for frames that are much smaller
    than they need be, which is given back in the end.
    """
    frames = -(-nbytes // FRAME_NBYTES)
    extra = nbytes // _SMALL_FRAME_NBYTES + _SPARE_FRAMES
    overhead = max(0, chain.bound(FRAME_NBYTES) - FRAME_NBYTES, chain.bound(1) - 1)
    return len(MAGIC) + nbytes + (frames + extra) * overhead + table_nbytes(frames + extra)


class FrameWriter:
    """A writer of plain bytes over a writer of what is stored. May be used by several threads."""

    def __init__(
        self,
        inner: BlobWriter,
        name: str,
        nbytes: int,
        chain: Chain,
        scratch: ScratchPool,
        sealed: Callable[[str, Seal], None],
    ) -> None:
        """
        Begin a blob.

        Args:
            inner: a new blob with `room_for` these bytes.
            name: what it is called, which codecs may bind frames to.
            nbytes: how many plain bytes there will be.
            chain: what they go through.
            scratch: buffers of `scratch_nbytes`.
            sealed: is told, when the blob is finished, its name and what stands for all of it.

        """
        self._inner = inner
        self._name = name
        self._nbytes = nbytes
        self._chain = chain
        self._scratch = scratch
        self._room_nbytes = _room_nbytes(chain)
        self._sealed = sealed
        self._lock = threading.Lock()
        self._numbered = 0
        self._end = len(MAGIC)
        self._frames: list[_Frame] = []
        self._holds = True
        inner.write_at(0, memoryview(MAGIC))
        scratch.hold()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Encode and write all of `data`."""
        view = flat(data)
        if offset < 0 or offset + len(view) > self._nbytes:
            raise StorageError(
                f"{self._name}: {len(view)} bytes at offset {offset} do not fit a blob of {self._nbytes}",
                name=self._name,
                offset=offset,
                errno=errno.EINVAL,
            )
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
        frames = []
        with self._scratch.lease() as scratch:
            room, together = scratch[: self._room_nbytes], scratch[self._room_nbytes :]
            stored = self._encode(view, places, room)
            total = sum(map(len, stored))
            with self._lock:
                start, self._end = self._end, self._end + total
            # As far into a page as they will be into the blob's: so a disk takes most of them straight from here.
            skew = start % ALIGNMENT
            at = 0
            for place, each in zip(places, stored, strict=True):
                into = together[skew + at : skew + at + len(each)]
                copy(into, each)
                frames.append(_Frame(place, start + at, len(each), digest(into)))
                at += len(each)
            del stored, each
            self._inner.write_at(start, together[skew : skew + total])
        with self._lock:
            self._frames.extend(frames)

    def _encode(self, data: memoryview, places: list[FramePlace], room: memoryview) -> list[memoryview]:
        stored = [flat(memoryview(each)) for each in self._chain.encode_all(data, places, room)]
        for place, each in zip(places, stored, strict=True):
            if len(each) > MAX_STORED_NBYTES:
                raise StorageError(
                    f"{self._name}: its codecs made {len(each)} bytes of a frame of {place.nbytes} at offset"
                    f" {place.offset}",
                    hint="use codecs that make less of it",
                    name=self._name,
                    offset=place.offset,
                )
        return stored

    def finish(self, nbytes: int | None = None) -> None:
        """Write the table, make the blob durable, and tell what stands for it."""
        end = checked_end(self._name, self._name, nbytes, self._nbytes)
        frames = sorted(self._frames, key=lambda frame: frame.place.offset)
        rows = [(f.place.offset, f.place.nbytes, f.stored_start, f.stored_nbytes, f.place.number) for f in frames]
        start, plain, stored_start, length, number = np.array(rows, np.int64).reshape(-1, 5).T
        digests = b"".join(frame.digest for frame in frames)
        table = FrameTable(start, plain, stored_start, length, number, digests)
        if not np.array_equal(table.start, np.cumsum(table.nbytes) - table.nbytes) or table.plain_nbytes != end:
            raise StorageError(
                f"{self._name}: {table.plain_nbytes} bytes were written, not each of {end} once",
                name=self._name,
                errno=errno.EINVAL,
            )
        encoded = encode_table(table)
        self._inner.write_at(self._end, memoryview(encoded))
        stored = self._end + len(encoded)
        self._inner.finish(stored)
        self._let_go()
        self._sealed(self._name, Seal(stored, text_of(digest(encoded))))

    def abandon(self) -> None:
        """Remove what was written."""
        self._let_go()
        self._inner.abandon()

    def _let_go(self) -> None:
        if self._holds:
            self._holds = False
            self._scratch.let_go()


def scratch_nbytes(chain: Chain) -> int:
    """Return how large a buffer of a writer is: room for a batch, what it may become, and where in a page it begins."""
    return _room_nbytes(chain) + BATCH * min(chain.bound(FRAME_NBYTES), MAX_STORED_NBYTES) + ALIGNMENT


def _room_nbytes(chain: Chain) -> int:
    # In whole pages, as what comes behind it has to begin with one.
    return -(-BATCH * chain.room_nbytes(FRAME_NBYTES) // ALIGNMENT) * ALIGNMENT
