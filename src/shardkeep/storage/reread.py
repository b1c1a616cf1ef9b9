"""
Bytes whose digest does not fit, read once more: a network, a cache or memory may have changed them on the way.

If they fit now, all goes on, and a warning says that the copy in the store is fine. If not, both reads are compared:
equal ones mean that the store's copy is damaged, different ones that something between it and here is. The second read
comes from the store itself as far as that can be had: from a blob that is opened anew, of a file past the page cache.
"""

from __future__ import annotations

import logging
import mmap
import operator
import os
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

from shardkeep.errors import DamagedCheckpoint
from shardkeep.events import log_safely
from shardkeep.storage.base import BlobReader, Opens
from shardkeep.storage.local import LocalStore

D = TypeVar("D", bytes, bytearray)
T = TypeVar("T")
E = TypeVar("E", bound=DamagedCheckpoint)

_ON_THE_WAY = (
    "it was read twice, and came out different each time: what brings it here (network, disk, memory) changes bytes;"
    " try again, or on another machine"
)


class RereadResult(NamedTuple):
    """What a second read brought."""

    fits: bool
    """What should be there."""
    same: bool | None = False
    """What the first read had brought; None if it did, and may be but a copy of that."""


class SecondRead:
    """Reads parts of a blob a second time; opens it when the first is wanted. To be closed."""

    def __init__(self, name: str, store: Opens | None, reader: BlobReader | None = None) -> None:
        """`store` is where it is opened anew. Where that is not known, `reader` is asked, which may keep what it read."""
        self._name = name
        self._store = store
        self._given = reader
        self._opened: BlobReader | None = None
        self.is_fresh = True
        """Whether all that was read came from the store, as far as can be told."""

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return so many bytes."""
        data = bytearray(nbytes)
        reader = self._given
        if self._store is not None:
            _forget(self._store, self._name, offset, nbytes)
            if self._opened is None:
                self._opened = self._store.open(self._name)
            reader = self._opened
        elif reader is not None:
            self.is_fresh = self.is_fresh and not reader.cached(offset, nbytes)
        if reader is not None:
            reader.read_into(offset, memoryview(data))
        return data

    def mend(self, offset: int, piece: memoryview, fits: Callable[[bytearray], bool]) -> RereadResult:
        """Read what is in `piece` once more; if it fits now, it is put there."""
        data = self.read(offset, len(piece))
        if fits(data):
            piece[:] = data
            return RereadResult(fits=True)
        return RereadResult(fits=False, same=self.same(piece, data))

    def same(self, first: bytes | bytearray | memoryview, second: bytes | bytearray) -> bool | None:
        """Say whether two reads brought the same; None if they did, and the second may be but a copy of the first."""
        return (True if self.is_fresh else None) if first == second else False

    def close(self) -> None:
        """Close what was opened. Safe when called twice."""
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
    """Read one piece of a blob once more, and warn if it fits now; as `Again` does it."""
    with closing(SecondRead(name, store, reader)) as again:
        verdict = again.mend(offset, piece, fits)
    if verdict.fits:
        warn_reread_ok(name, offset, len(piece))
    return verdict


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
    Decode what was read; if it is damaged, once more, from a second read.

    Args:
        data: what was read.
        decode: checks and decodes it.
        again: reads it anew.
        name: of the blob, for the warning.
        offset: where in the blob it is.
        same: says whether two reads brought the same.

    Raises:
        DamagedCheckpoint: both reads are damaged: what is wrong with the first, and whether they were the same.

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
    """Say in an error that its bytes were read twice, and whether that brought the same; None: that is not known."""
    if same is False:
        hint = _ON_THE_WAY
    else:
        times = "read twice, the same both times" if same else "read twice"
        hint = f"{error.hint or 'the file was damaged after the save'} ({times})"
    return type(error)(error.message, hint=hint, **{**error.details, "same_twice": same})


def warn_reread_ok(name: str, offset: int, nbytes: int) -> None:
    """Warn of bytes that were damaged on the way, and right when they were read again."""
    log_safely(
        logging.WARNING,
        "%s: bytes %d to %d came damaged, and were right when read again: the copy in the store is fine, but what brings"
        " it here (network, disk, memory) changed them",
        name,
        offset,
        offset + nbytes,
    )


def _forget(store: Opens, name: str, offset: int, nbytes: int) -> None:
    """Let the page cache drop a part of a file of this machine, so that it is read from the disk; where that is cheap."""
    place: object = store
    while (inner := getattr(place, "inner", None)) is not None:
        is_coded = getattr(place, "is_coded", None)  # of a store that decodes
        if is_coded is not None and is_coded(name):
            offset, nbytes = 0, 0  # to the system that is all of it
        place = inner
    if not isinstance(place, LocalStore) or not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError):  # then it is read from wherever it comes
        file = os.open(os.path.join(place.url, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            begin = offset // mmap.PAGESIZE * mmap.PAGESIZE  # only whole pages are dropped
            end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
