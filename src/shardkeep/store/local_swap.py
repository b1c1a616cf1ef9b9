"""
Compare-and-swap of files: which version of one is there, and a moment in which nobody else of this machine swaps.

A version is when the bytes were written and what they are. The lock is one on the directory itself, so nothing is left
there, and it ends with whoever holds it. Over NFS it holds between processes of one machine only; where two machines
swap one file in the same millisecond, there, both may be told that they did. Where directories cannot be locked
(Windows, Lustre mounted without flock), it holds between threads of one process, or not at all.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

from shardkeep.store.files import Descriptors, read_at
from shardkeep.store.protocol import Version

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_CHUNK_BYTES = 1 << 20
_WAIT_S = 30.0
"""Others hold the lock for as long as two system calls take, unless they were stopped in between."""
_LOOK_S = 0.002
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOLCK})
_within_process = threading.Lock()


def version_of(files: Descriptors) -> Version:
    """Say which version of a small file is open."""
    found = blake2b(digest_size=16)
    with files:
        at = 0
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, files.nbytes) or 1))
        while got := read_at(files.buffered, buffer, at):
            found.update(buffer[:got])
            at += got
        # Not its inode: that of a file just deleted is given to the next one.
        return Version(found.hexdigest(), str(os.fstat(files.buffered).st_mtime_ns))


@contextmanager
def alone_in(directory: str) -> Iterator[None]:
    """Keep other processes and threads of this machine out of a directory's swaps, where the system can."""
    if fcntl is None or not hasattr(os, "O_DIRECTORY"):
        with _within_process:
            yield
        return
    # A descriptor of its own: locks belong to what `open` returned, and so hold between threads too.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(
                    errno.EBUSY, f"another process has held the directory's lock for {_WAIT_S:.0f} s"
                ) from None
            time.sleep(_LOOK_S)
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:  # Lustre without its mount option, some FUSE
                raise
            return
        else:
            return
