"""
Blobs of a store as streams, for those who write and read files so: extensions, planners and writers of others.
"""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING

from shardkeep.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.store.protocol import BlobReader, BlobWriter, Store

_PIECE_NBYTES = 8 << 20
"""So much is held, and written at once; what is no more than that is put as one small blob."""
_ROOM_NBYTES = 64 << 30
"""Stores want to know beforehand how large a blob may become: the parts of an upload are measured by it."""


class BlobInput(io.RawIOBase):
    """A blob, to be read from any position. Give it to an `io.BufferedReader`: each read of its own is a request."""

    def __init__(self, reader: BlobReader, *, closes: bool = True) -> None:
        """`closes`: the reader is closed with the stream."""
        super().__init__()
        self._reader = reader
        self._closes = closes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.nbytes}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        nbytes = max(0, min(len(view), self._reader.nbytes - self._at))
        if nbytes:
            self._reader.read_into(self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def close(self) -> None:
        if not self.closed and self._closes:
            self._reader.close()
        super().close()


class BlobOutput(io.RawIOBase):
    """
    A blob that is written from its first byte to its last, in place of one that is there.

    It appears when the stream is closed, or not at all if `discard` is called first.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._held = bytearray()
        self._writer: BlobWriter | None = None
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + len(self._held)

    def write(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        if self.tell() + len(view) > _ROOM_NBYTES:
            raise StorageError(
                f"{self._store.url}/{self._name}: more than {_ROOM_NBYTES >> 30} GiB in one stream",
                hint="write more files: a larger thread_count, or single_file_per_rank=False",
                name=self._name,
                errno=errno.EFBIG,
            )
        for start in range(0, len(view), _PIECE_NBYTES):
            self._held += view[start : start + _PIECE_NBYTES]
            if len(self._held) > _PIECE_NBYTES:
                self._pass_on()
        return len(view)

    def _pass_on(self) -> None:
        if self._writer is None:
            self._store.delete(self._name)
            self._writer = self._store.create(self._name, _ROOM_NBYTES)
        self._writer.write_at(self._written, memoryview(bytes(self._held)))
        self._written += len(self._held)
        self._held = bytearray()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._writer is None:
                self._store.put(self._name, bytes(self._held), replace=True)
            else:
                self._pass_on()
                self._writer.finish(self._written)
        except BaseException:
            self.discard()
            raise
        super().close()

    def discard(self) -> None:
        """Close the stream without a blob."""
        if self._writer is not None:
            self._writer.abandon()
        super().close()
