"""
What the operating system offers for files: opening, reading and writing at an offset, making durable, locking.

This is the only module that knows which calls Linux, macOS and Windows have, and where an OSError becomes one of our
errors. Only regular files are opened, and through a symbolic link only if the caller allows it. It also identifies
processes, so that files can name the process that wrote them, and says how much memory is available.
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

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of a file system that has no direct I/O, or not with this alignment."""
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# O_NONBLOCK: opening a FIFO does not hang. O_BINARY: Windows translates no newlines.
_O_PLAIN: int = sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
_O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""Magic numbers of tmpfs and ramfs."""
_CACHESTAT = 451
"""System call number, from Linux 6.5 on; the same on every architecture that has torch."""
_VERSION_CHUNK_BYTES = 1 << 20
_LOCK_TIMEOUT_S = 30.0
"""The lock is held for about two system calls, unless its holder was stopped in between."""
_LOCK_POLL_S = 0.002
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOLCK})
_seek_lock = threading.Lock()
_process_lock = threading.Lock()


@contextmanager
def storage_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn an OSError raised inside into one of our errors, with the place, the name, the offset and the errno."""
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
    The descriptors of one open file, used by any number of threads.

    They are closed when the last user is done: a descriptor closed during a call may by then refer to another file.
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
        """Close now, or when the last user is done; True for the first call."""
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
    """Open a regular file, and a second time for direct I/O if that is wanted and possible."""
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
        if flags & os.O_EXCL:  # this call created it
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
    # The name may refer to another file since the first open.
    with suppress(OSError):
        if os.path.samestat(os.fstat(fd), wanted):
            return fd
    os.close(fd)
    return None


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read once into `view`; may read less than asked for, and 0 bytes at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(view))
    view[: len(data)] = data
    return len(data)


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write once from `view`; may write less than asked for."""
    if hasattr(os, "pwrite"):
        done = os.pwrite(fd, view, offset)
    else:
        with _seek_lock:
            os.lseek(fd, offset, os.SEEK_SET)
            done = os.write(fd, view)
    if view and not done:
        raise OSError(errno.EIO, "the system wrote nothing and reported no error")
    return done


def sync(fd: int) -> None:
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def sync_directory(path: str) -> None:
    """Make names added to or removed from a directory durable."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot sync a directory; its file systems journal names
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network file systems cannot sync directories, and need not
            raise
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory and its parents; each name is durable before the next one is made below it."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        make_directory(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
        sync_directory(parent)


def reserve(fd: int, nbytes: int) -> None:
    """
    Reserve space, so that a full disk is reported before the first byte; does nothing where that is not supported.

    Calls fallocate itself, not `os.posix_fallocate`: on file systems without it (NFS, FUSE), glibc emulates it with a
    write to every block.
    """
    if not nbytes or not sys.platform.startswith("linux"):
        return
    if _lies_in_memory(fd):  # fallocate would zero every page now, for nothing
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
    """Return whether a file is on a file system in memory."""
    found = (ctypes.c_long * 32)()  # longer than the kernel's struct, whose first field is the type of file system
    return not _libc().fstatfs(fd, found) and found[0] in _IN_MEMORY


def cached_bytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Return how much of a range is in the page cache; None if the system does not say."""
    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
    found = (ctypes.c_uint64 * 5)()
    # Fails on an older kernel, under a container's seccomp filter, or for a file of another user.
    if not sys.platform.startswith("linux") or _libc().syscall(_CACHESTAT, fd, wanted, found, 0):
        return None
    return found[0] * mmap.PAGESIZE


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def file_version(files: Descriptors) -> Version:
    """
    Return the version of a small file: a digest of its bytes, and when it was written.

    Not its inode: the next file may get the inode of a file that was just deleted.
    """
    found = blake2b(digest_size=16)
    with files:
        at = 0
        buffer = memoryview(bytearray(min(_VERSION_CHUNK_BYTES, files.nbytes) or 1))
        while got := read_at(files.buffered, buffer, at):
            found.update(buffer[:got])
            at += got
        return Version(found.hexdigest(), str(os.fstat(files.buffered).st_mtime_ns))


@contextmanager
def directory_lock(directory: str) -> Iterator[None]:
    """
    Keep other processes and threads of this machine from replacing files of a directory.

    The lock is on the directory itself, so it leaves no file behind and ends with its holder. On NFS it only works
    between processes of one machine; if two machines replace a file in the same millisecond, both may succeed. Where
    directories cannot be locked (Windows, Lustre mounted without flock), it works between threads of this process, or
    not at all.
    """
    if fcntl is None or not hasattr(os, "O_DIRECTORY"):
        with _process_lock:
            yield
        return
    # A new descriptor each time: a lock belongs to an open file description, so this also excludes other threads.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    until = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(
                    errno.EBUSY, f"another process has held the lock on the directory for {_LOCK_TIMEOUT_S:.0f} s"
                ) from None
            time.sleep(_LOCK_POLL_S)
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:  # Lustre without its mount option, some FUSE
                raise
            return
        else:
            return


def host_identity() -> str:
    """Identify machine, boot and process namespace; equal only where a process id means the same process."""
    boot = namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass  # not Linux: use the host name alone
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def process_start(pid: int) -> str:
    """Return when a process of this host started, to recognise a reused process id; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return _exists(pid)
    return "" if fields[0] in ("Z", "X") else fields[19]


def available_memory() -> int:
    """Return how many bytes of memory are available; a cautious guess if the system does not say."""
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
