"""
What the operating system offers for files: opening, reading and writing at an offset, making durable.

The one place that knows which calls Linux, macOS and Windows have, and the one place where an OSError becomes an error
of ours. Nothing is opened through a symbolic link unless the caller allows it, and nothing but regular files is.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from types import TracebackType
from typing import Any

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError, StorageFull
from shardkeep.storage.base import Version

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a file system answers that has no direct I/O, or not with this alignment."""
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# O_NOFOLLOW and O_NONBLOCK: a symbolic link is refused, a FIFO does not hang. O_BINARY: Windows changes no newline.
_O_PLAIN: int = sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""How tmpfs and ramfs are called."""
_CACHESTAT = 451
"""Linux 6.5; the same number on every architecture that has torch."""
_seek_lock = threading.Lock()


@contextmanager
def storage_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn any OSError raised inside into ours, with the place, the name, the offset and the errno in it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        where = os.path.join(url, name) if name else url
        at = "" if offset is None else f" at offset {offset}"
        code = errno.errorcode.get(exc.errno or 0, str(exc.errno))
        message = f"{where}: {action}{at}: {exc.strerror or exc} (errno {code})"
        details: dict[str, Any] = {"name": name, "offset": offset, "errno": exc.errno}
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFull(message, hint="free some space there, or choose another place", **details) from exc
        kind = BlobNotFound if exc.errno == errno.ENOENT else StorageError
        raise kind(message, **details) from exc


class Descriptors:
    """
    File descriptors in use by any number of threads.

    They close when the last user has let go: a number closed under a running call may by then name another file.
    """

    def __init__(self, buffered: int, direct: int | None, nbytes: int) -> None:
        self.buffered = buffered
        self.direct = direct
        self.nbytes = nbytes
        """Size of the file when it was opened."""
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closing:
                raise OSError(errno.EBADF, "the blob is already closed")
            self._users += 1

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._users -= 1
            last = self._closing and not self._users
        if last:
            self._close()

    def close(self) -> bool:
        """Close now or when the last user lets go; True for the first call."""
        with self._lock:
            first, self._closing = not self._closing, True
            idle = not self._users
        if first and idle:
            self._close()
        return first

    def _close(self) -> None:
        try:
            if self.direct is not None:
                os.close(self.direct)
        finally:
            os.close(self.buffered)


def open_files(path: str, flags: int, *, direct: bool, follow_links: bool = False) -> Descriptors:
    """Open a regular file, a second time for direct I/O if that is wanted and possible."""
    flags |= _O_PLAIN | (0 if follow_links else _O_NOFOLLOW)
    try:
        buffered = os.open(path, flags, 0o666)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        raise MalformedFile(f"{path}: a symbolic link, not a regular file", name=os.path.basename(path)) from exc
    try:
        status = _status_of_regular(buffered, path)
        second = _open_direct(path, flags & ~(os.O_CREAT | os.O_EXCL), status) if direct and _O_DIRECT else None
    except BaseException:
        os.close(buffered)
        if flags & os.O_EXCL:  # made just now
            with suppress(OSError):
                os.unlink(path)
        raise
    return Descriptors(buffered, second, status.st_size)


def _status_of_regular(fd: int, path: str) -> os.stat_result:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise MalformedFile(f"{path}: {stat.filemode(status.st_mode)}, not a regular file", name=os.path.basename(path))
    return status


def _open_direct(path: str, flags: int, wanted: os.stat_result) -> int | None:
    try:
        fd = os.open(path, flags | _O_DIRECT)
    except OSError:
        return None
    # The name may have come to mean another file since the first open.
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), wanted):
            return fd
    os.close(fd)
    return None


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read once into `view`; less than asked is possible, 0 is the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(view))
    view[: len(data)] = data
    return len(data)


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write once from `view`; less than asked is possible."""
    if hasattr(os, "pwrite"):
        done = os.pwrite(fd, view, offset)
    else:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            done = os.write(fd, view)
    if view and not done:
        raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
    return done


def sync(fd: int) -> None:
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def sync_directory(path: str) -> None:
    """Make names added to or removed from a directory durable."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no handle to sync; its file systems journal names themselves
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network file systems cannot, and need not
            raise
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory and its parents; each new name is durable before the next one is made below it."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        make_directory(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
        sync_directory(parent)


def reserve(fd: int, nbytes: int) -> None:
    """
    Take the space now, so that a full disk is known before the first byte; does nothing where it cannot be done.

    By fallocate itself and not `os.posix_fallocate`: where the file system has no such thing (NFS, FUSE), glibc
    imitates it with a write to every single block.
    """
    if not nbytes or not sys.platform.startswith("linux"):
        return
    if _lies_in_memory(fd):  # there every page would be zeroed now, and written later all the same
        room = os.fstatvfs(fd)
        if room.f_blocks and room.f_bavail * room.f_frsize < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    while _libc().fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return


def _lies_in_memory(fd: int) -> bool:
    """Tell whether a file is on a file system that has no disk."""
    found = (ctypes.c_long * 32)()  # longer than the kernel's answer, which begins with the kind of file system
    return not _libc().fstatfs(fd, found) and found[0] in _IN_MEMORY


def cached_bytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Tell how much of a range the page cache holds; None where the system does not say."""
    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
    found = (ctypes.c_uint64 * 5)()
    # Refused by an older kernel, by a container's filter, or for somebody else's file.
    if not sys.platform.startswith("linux") or _libc().syscall(_CACHESTAT, fd, wanted, found, 0):
        return None
    return found[0] * mmap.PAGESIZE


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# Compare-and-swap of files: which version of one is there, and a moment in which nobody else of this machine swaps.
#
# A version is when the bytes were written and what they are. The lock is one on the directory itself, so nothing is
# left
# there, and it ends with whoever holds it. Over NFS it holds between processes of one machine only; where two
# machines
# swap one file in the same millisecond, there, both may be told that they did. Where directories cannot be locked
# (Windows, Lustre mounted without flock), it holds between threads of one process, or not at all.

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


def file_version(files: Descriptors) -> Version:
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
def directory_lock(directory: str) -> Iterator[None]:
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


# Which process it is that writes something, in words that can be left on disk, whether it is still there, and how
# much
# memory there is for it.


def host_identity() -> str:
    """Name machine, boot and process namespace: equal only where process numbers mean the same."""
    boot = namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass  # not Linux: the host name has to do
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def process_start(pid: int) -> str:
    """Say when a process of this host began, so that a reused number is not taken for it; empty where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _exists(pid)
    return "" if fields[0] in ("Z", "X") else fields[19]


def available_memory() -> int:
    """Return how many bytes of memory the machine could still give; a cautious guess where it does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found = dict(line.split(":", 1) for line in file)
        return int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 4 << 30


def _exists(pid: int) -> str:
    if os.path.exists("/proc/self/stat"):
        return ""
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "running"
