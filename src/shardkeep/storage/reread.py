"""
Reading bytes a second time after a checksum mismatch: the network, a cache or memory may have changed them on the way.

If the second read matches, the load goes on, and a warning says that the stored copy is fine. If not, both reads are
compared: if they are equal, the stored copy is damaged; if they differ, something between the store and this process is.
The second read bypasses caches where possible: it opens the blob again, and drops a local file from the page cache.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple, TypeVar

from shardkeep.errors import DamagedCheckpoint
from shardkeep.events import log_safely
from shardkeep.storage.base import BlobReader, Opens, drop_cached

D = TypeVar("D", bytes, bytearray)
T = TypeVar("T")
E = TypeVar("E", bound=DamagedCheckpoint)

_ON_THE_WAY = (
    "two reads returned different bytes: the network, the disk or the memory of this machine corrupts data; try again, or"
    " on another machine"
)


class RereadResult(NamedTuple):
    """The result of a second read."""

    fits: bool
    """Whether its bytes are the expected ones."""
    same: bool | None = False
    """Whether its bytes equal those of the first read; None if they do, but may come from the same cache."""


class SecondRead:
    """Reads ranges of a blob a second time; opens it when it is first needed. Must be closed."""

    def __init__(self, name: str, store: Opens | None, reader: BlobReader | None = None) -> None:
        """The blob is opened again in `store`. Without a store, `reader` is used, which may return cached bytes."""
        self._name = name
        self._store = store
        self._given = reader
        self._opened: BlobReader | None = None
        self.is_fresh = True
        """Whether no byte came from a cache, as far as is known."""

    def read(self, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        reader = self._given
        if self._store is not None:
            drop_cached(self._store, self._name, offset, nbytes)
            if self._opened is None:
                self._opened = self._store.open(self._name)
            reader = self._opened
        elif reader is not None:
            self.is_fresh = self.is_fresh and not reader.cached(offset, nbytes)
        if reader is not None:
            reader.read_into(offset, memoryview(data))
        return data

    def repair(self, offset: int, piece: memoryview, fits: Callable[[bytearray], bool]) -> RereadResult:
        """Read the range of `piece` again; if it is right now, copy it into `piece`."""
        data = self.read(offset, len(piece))
        if fits(data):
            piece[:] = data
            return RereadResult(fits=True)
        return RereadResult(fits=False, same=self.same(piece, data))

    def same(self, first: bytes | bytearray | memoryview, second: bytes | bytearray) -> bool | None:
        """Return whether two reads are equal; None if they are, but the second may come from a cache."""
        return (True if self.is_fresh else None) if first == second else False

    def close(self) -> None:
        """Close the blob. Can be called twice."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def reread(
    name: str,
    store: Opens | None,
    reader: BlobReader,
    offset: int,
    piece: memoryview,
    fits: Callable[[bytearray], bool],
) -> RereadResult:
    """Read one range of a blob again, and warn if it is right now; see `SecondRead.repair`."""
    with closing(SecondRead(name, store, reader)) as again:
        result = again.repair(offset, piece, fits)
    if result.fits:
        warn_reread_ok(name, offset, len(piece))
    return result


def decode_or_reread(
    data: D,
    decode: Callable[[D], T],
    again: Callable[[], D],
    *,
    name: str,
    offset: int = 0,
    same: Callable[[D, D], bool | None] = operator.eq,
) -> T:
    """
    Decode bytes; if they are damaged, decode a second read (`again`) of them. `same` compares two reads.

    Raises:
        DamagedCheckpoint: both reads are damaged. The error is that of the first, and says whether they were equal.

    """
    try:
        return decode(data)
    except DamagedCheckpoint as exc:
        error = exc
    second = again()
    try:
        found = decode(second)
    except DamagedCheckpoint:
        raise with_reread_result(error, same=same(data, second)) from error.__cause__
    warn_reread_ok(name, offset, len(second))
    return found


def with_reread_result(error: E, *, same: bool | None) -> E:
    """Add to an error that its bytes were read twice, and whether the reads were equal; None: unknown."""
    if same is False:
        hint = _ON_THE_WAY
    else:
        times = "read twice, the same both times" if same else "read twice"
        hint = f"{error.hint or 'the file was damaged after the save'} ({times})"
    return type(error)(error.message, hint=hint, **{**error.details, "same_twice": same})


def warn_reread_ok(name: str, offset: int, nbytes: int) -> None:
    """Warn of bytes that were damaged at first, and right when they were read again."""
    log_safely(
        logging.WARNING,
        "%s: bytes %d to %d were damaged when first read and right when read again: the stored copy is fine, but the"
        " network, the disk or the memory of this machine corrupted data",
        name,
        offset,
        offset + nbytes,
    )
