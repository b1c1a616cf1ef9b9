"""
A store that is a directory: blobs are its files, places below it are its directories.

Large writes bypass the page cache (O_DIRECT) where memory and offset allow it, which is steadier and takes a fifth of
the CPU time. So do large reads of what is not cached, except after `prefetch`: then they go through the cache, for the
other processes of this machine. Everything else, and every system without O_DIRECT, is buffered. The store never reads
or writes outside its directory, opens only regular files, and follows symbolic links only if the caller allows it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import blake2b
from typing import Any, Literal

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, StorageError, StorageFull
from shardkeep.options import available_memory, local_ranks, per_process
from shardkeep.storage import base
from shardkeep.storage.buffers import ALIGNMENT, PerThread, Scratch, address_of, aligned_buffer, copy, flat

# -- the operating system ----------------------------------------------------------------------------------------------
#
# Only this part knows which calls Linux, macOS and Windows have, and where an OSError becomes one of our errors. It
# also identifies processes, so that files can name the process that wrote them, and says how much memory is available.

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
_ON_DISK = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x2FC12FC1, 0x794C7630})
"""Magic numbers of ext4, XFS, Btrfs, F2FS, ZFS and overlayfs: reading from these does not load a network."""
_CACHESTAT = 451
"""System call number, from Linux 6.5 on; the same on every architecture that has torch."""
_LOCK_TIMEOUT_S = 30.0
"""The lock is held for about two system calls, unless its holder was stopped in between."""
_LOCK_POLL_S = 0.002
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF, errno.ENOLCK})
_MEMORY_ALIGNMENT = 64
"""How torch aligns tensors. NVMe accepts such memory; other disks refuse it, and are then given whole pages."""
_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
_seek_lock = threading.Lock()
_process_lock = threading.Lock()


def errno_of(exc: OSError) -> int:
    """Return the number of an error, or that of its class: many file systems of fsspec, and of users, give none."""
    return exc.errno or next((number for kind, number in _NUMBERS.items() if isinstance(exc, kind)), errno.EIO)


class storage_errors:  # noqa: N801 - used as a function, like contextlib.suppress
    """
    Turns an OSError raised inside into one of our errors, with the place, the name, the offset and the errno.

    Not a generator: in Python 3.13 an error that ends one is in a cycle with its frame, and keeps what all callers hold.
    """

    def __init__(self, action: str, url: str, name: str = "", offset: int | None = None) -> None:
        self._action, self._url, self._name, self._offset = action, url, name, offset

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if not isinstance(exc, OSError) or isinstance(exc, CheckpointError):
            return
        number = errno_of(exc)
        where = os.path.join(self._url, self._name) if self._name else self._url
        at = "" if self._offset is None else f" at offset {self._offset}"
        code = errno.errorcode.get(number, number)
        message = f"{where}: {self._action}{at}: {exc.strerror or exc or os.strerror(number)} (errno {code})"
        details: dict[str, Any] = {"name": self._name, "offset": self._offset, "errno": number}
        if number in {errno.ENOSPC, errno.EDQUOT}:
            raise StorageFull(message, hint="free some space there, or choose another place", **details) from exc
        kind = BlobNotFound if number in {errno.ENOENT, errno.ENOTDIR} else StorageError
        raise kind(message, **details) from exc


class Descriptors:
    """The descriptors of one open file; closed when no thread uses them, because their numbers are reused."""

    def __init__(self, buffered: int, direct: int | None, nbytes: int) -> None:
        self.buffered = buffered
        self.direct = direct
        """For direct I/O, while that seems possible."""
        self.memory_alignment = _MEMORY_ALIGNMENT
        self.nbytes = nbytes
        self._fds = [buffered] if direct is None else [direct, buffered]
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    def __enter__(self) -> None:
        with self._lock:
            if self._closing:
                raise OSError(errno.EBADF, "the blob is already closed")
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Close when the last user is done."""
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock, ExitStack() as stack:  # closes all of them, even if closing one fails
            while self._closing and not self._users and self._fds:
                stack.callback(os.close, self._fds.pop())

    def direct_failed(self, error: OSError, alignment: int) -> None:
        """After direct I/O with memory of this alignment failed: require whole pages, or give it up; raise other errors."""
        if error.errno not in NO_DIRECT:
            raise error
        # Compare with what the call used: another thread may have found out the same in the meantime.
        if alignment < ALIGNMENT:
            self.memory_alignment = ALIGNMENT
        else:
            self.direct = None


def open_files(path: str, flags: int, *, direct: bool, follow_links: bool = False) -> Descriptors:
    """Open a regular file, and a second time for direct I/O if that is wanted and possible."""
    flags |= _O_PLAIN | (0 if follow_links else _O_NOFOLLOW)
    name = os.path.basename(path)
    try:
        buffered = os.open(path, flags, 0o666)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        raise MalformedFile(f"{path}: a symbolic link, not a regular file", name=name) from exc
    second = None
    try:
        status = os.fstat(buffered)
        if not stat.S_ISREG(status.st_mode):
            raise MalformedFile(f"{path}: {stat.filemode(status.st_mode)}, not a regular file", name=name)
        if direct and _O_DIRECT:
            with suppress(OSError):
                second = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL) | _O_DIRECT)
        # The name may refer to another file since the first open.
        if second is not None and not os.path.samestat(os.fstat(second), status):
            os.close(second)
            second = None
    except BaseException:
        for fd in (buffered, second):
            if fd is not None:
                os.close(fd)
        if flags & os.O_EXCL:  # this call created it
            with suppress(OSError):
                os.unlink(path)
        raise
    return Descriptors(buffered, second, status.st_size)


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


@contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | _O_PLAIN)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot sync a directory; its file systems journal names
    with _opened(path) as fd:
        try:
            os.fsync(fd)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # some network file systems cannot sync directories, and need not
                raise


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

    Not by `os.posix_fallocate`: on file systems without it (NFS, FUSE), glibc emulates it with a write to every block.
    """
    if not nbytes or not sys.platform.startswith("linux"):
        return
    if _file_system(fd) in _IN_MEMORY:  # fallocate would zero every page now, for nothing
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


def _file_system(fd: int) -> int:
    """Return the magic number of the file system of an open file; 0 if the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0
    kind = (ctypes.c_long * 32)()  # longer than the kernel's struct, whose first field is the type of file system
    return 0 if _libc().fstatfs(fd, kind) else kind[0]


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


@contextmanager
def directory_lock(directory: str) -> Iterator[None]:
    """
    Keep other processes and threads of this machine from replacing files of a directory.

    The lock is on the directory itself: it leaves no file behind and ends with its holder. On NFS it does not reach other
    machines; where directories cannot be locked (Windows, Lustre without flock), at most other threads of this process.
    """
    if fcntl is None or not hasattr(os, "O_DIRECTORY"):
        with _process_lock:
            yield
        return
    # A new descriptor each time: a lock belongs to an open file description, so this also excludes other threads.
    with _opened(directory) as fd:
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(fd):
            if time.monotonic() > until:
                raise OSError(
                    errno.EBUSY, f"another process has held the lock on the directory for {_LOCK_TIMEOUT_S:.0f} s"
                )
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(fd: int) -> bool:
    """Return False while another has the lock; True where there are no locks (Lustre without its option, some FUSE)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno not in _NO_LOCKS:
            raise
    return True


def host_identity() -> str:
    """Identify machine, boot and process namespace; equal only where a process id means the same process."""
    boot = namespace = ""
    with suppress(OSError):  # not Linux: use the host name alone
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def process_start(pid: int) -> str:
    """Return when a process of this host started, to recognise a reused process id; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return ""
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "running"
    return "" if fields[0] in ("Z", "X") else fields[19]


_FILLING_BYTES = 2 << 20
"""Of a read that only fills the page cache."""
_CACHED_FRACTION = 4
"""A file is read through the page cache if it takes at most this fraction, one in four, of the available memory."""
_ALWAYS_CACHED_BYTES = 64 << 20
_REQUEST_BYTES = 4 << 20
"""Size of one read: small enough that the bytes are still in the CPU's cache when they leave a scratch buffer."""
_DIRECT_READ_BYTES = 1 << 20
"""Shorter reads are buffered: headers and indexes are read more than once, and the page cache reads ahead for them."""
_SCRATCH_BYTES = _REQUEST_BYTES + _DIRECT_READ_BYTES
"""Room for the last few bytes of a range, so that they need no request of their own."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_TEMPORARY = re.compile(r"\.(tmp|converting)-(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\w*)-[0-9a-f]+")


def _host_mark() -> str:
    return blake2b(host_identity().encode(), digest_size=6).hexdigest()


def temporary_name(kind: Literal["tmp", "converting"] = "tmp") -> str:
    """Return a name that says which process writes a file, so that it can be recognised as abandoned."""
    return f".{kind}-{_host_mark()}-{os.getpid()}-{process_start(os.getpid())}-{secrets.token_hex(8)}"


def clear_temporaries(path: str) -> None:
    """Remove temporary files of processes of this machine that died; best effort."""
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            left = _TEMPORARY.fullmatch(entry.name)
            if left and left["host"] == _host_mark() and process_start(int(left["pid"])) != left["started"]:
                with suppress(OSError):
                    # The processes of other users may be hidden, and look dead: leave their files alone.
                    if left[1] == "tmp" or entry.stat(follow_symlinks=False).st_uid == getattr(os, "geteuid", int)():
                        os.unlink(entry.path)


def fits_cache(nbytes: int) -> bool:
    """Return whether this much can be kept in the page cache without taking memory that programs may need."""
    return nbytes <= _ALWAYS_CACHED_BYTES or nbytes * _CACHED_FRACTION <= available_memory()


def fill_cache(fd: int, offset: int, nbytes: int, scratch: memoryview) -> None:
    # By reads in order, for which the kernel reads ahead into large pages. With POSIX_FADV_WILLNEED it takes small ones, which are
    # read at two thirds of the speed, and so are all later reads of them.
    for at in range(offset, offset + nbytes, _FILLING_BYTES):
        if not read_at(fd, scratch[: min(_FILLING_BYTES, offset + nbytes - at)], at):
            return


class NewestSave:
    """
    Keeps what this process saved last in the page cache, so that a restart on the same machine loads it from memory.

    Files are written around the cache and read into it afterwards, which takes a tenth of the CPU time of writing through it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: list[str] = []

    def keep(self, paths: list[str], nbytes: int) -> bool:
        """Read files into the page cache, on a thread, and drop those of the save before; return False without room."""
        with self._lock:
            before, self._paths = self._paths, paths
        if before:
            drop_from_cache(before)
        worth = nbytes > _DIRECT_READ_BYTES and fits_cache(nbytes * local_ranks()) and _kind_of(paths[0]) in _ON_DISK
        if worth:
            threading.Thread(target=self._read, args=(paths,), name="shardkeep-cache", daemon=True).start()
        return worth

    def _read(self, paths: list[str]) -> None:
        scratch = memoryview(bytearray(_FILLING_BYTES))
        with suppress(OSError):  # a file may be replaced or deleted meanwhile
            for path in paths:
                with _opened(path) as fd:
                    for at in range(0, os.fstat(fd).st_size, _FILLING_BYTES):
                        if self._paths is not paths:
                            return  # another save is newer
                        fill_cache(fd, at, _FILLING_BYTES, scratch)


newest_save = per_process(NewestSave)


_REALTIME_COARSE = 5
"""Linux's clock by which file systems stamp what changes: it goes on in steps of some milliseconds."""
_WORTH_KEEPING = 64
"""Directories with fewer names are listed in no time."""
_MOST_KEPT = 16


class KeptNames:
    """
    The last listings of large directories: valid until the directory's own times change, as they do with each name in it.

    Names that change in the same tick of the clock would leave no trace. So a listing is kept only if the directory last
    changed in an earlier tick, by the clock from which the next change gets its time; and only on local file systems.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[tuple[int, ...], base.Names]] = {}

    def of(self, path: str) -> tuple[base.Names, Sequence[os.DirEntry[str]]]:
        """
        Return the directories and files of a directory, and what is neither, such as links; nothing where there is none.

        A listing with links is not kept, so one that was kept has none.
        """
        now_ns = time.clock_gettime_ns(_REALTIME_COARSE) if sys.platform.startswith("linux") else 0
        try:
            status = os.stat(path)
            changed = status.st_mtime_ns, status.st_ctime_ns
            state = status.st_dev, status.st_ino, *changed
            if (kept := self._found.get(path)) and kept[0] == state:
                return kept[1], ()
            places, others = list[str](), list[os.DirEntry[str]]()
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        places.append(entry.name)
                    else:
                        others.append(entry)
        except FileNotFoundError:
            return base.Names((), tuple), ()
        places = list(filter(base.is_place_name, places))
        others = [entry for entry in others if base.is_place_name(entry.name)]
        blobs = [entry.name for entry in others if entry.is_file(follow_symlinks=False)]
        links = [entry for entry in others if not entry.is_file(follow_symlinks=False)]
        names = base.Names(places, lambda: blobs)
        self._found.pop(path, None)
        # What a link leads to changes elsewhere.
        if len(places) + len(blobs) < _WORTH_KEEPING or links or not has_settled(changed, now_ns):
            return names, links
        if _kind_of(path) in {*_ON_DISK, *_IN_MEMORY}:
            for oldest in list(self._found)[: 1 - _MOST_KEPT]:
                self._found.pop(oldest, None)
            self._found[path] = state, names
        return names, links


kept_names = per_process(KeptNames)


def has_settled(changed: Sequence[int], now_ns: int) -> bool:
    """Return whether what changes now, by the clock of the file system, gets other times than these."""
    # Some file systems keep whole seconds, or two.
    return max(changed) + (1_000_000 if all(each % 1_000_000 for each in changed) else 2_000_000_000) <= now_ns


def drop_from_cache(paths: Iterable[str], offset: int = 0, nbytes: int = 0) -> None:
    """Drop a range of files from the page cache; 0 bytes mean the rest of a file. Never raises."""
    if not hasattr(os, "posix_fadvise"):
        return
    begin = offset // mmap.PAGESIZE * mmap.PAGESIZE  # only whole pages are dropped
    end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    for path in paths:
        with suppress(OSError), _opened(path) as fd:  # if it fails, the bytes are read from wherever they come
            os.posix_fadvise(fd, begin, end - begin if nbytes else 0, os.POSIX_FADV_DONTNEED)


def _kind_of(path: str) -> int:
    with suppress(OSError), _opened(path) as fd:
        return _file_system(fd)
    return 0


class _LocalWriter:
    def __init__(self, url: str, name: str, path: str, nbytes: int, files: Descriptors, *, durable: bool) -> None:
        self._url, self._name, self._path, self._nbytes = url, name, path, nbytes
        self.files = files
        self._durable = durable
        self._finished = False

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        base.check_fits(self._path, self._name, offset, len(view), self._nbytes)
        done = 0
        with storage_errors("cannot write", self._url, self._name, offset), self.files:
            while done < len(view):
                done += self._write_some(offset + done, view[done:])

    def _write_some(self, offset: int, view: memoryview) -> int:
        # Direct and buffered writes must never share a page, so a partial page is buffered, whichever thread writes it.
        head = -offset % ALIGNMENT
        body = (len(view) - head) // ALIGNMENT * ALIGNMENT
        direct, alignment = self.files.direct, self.files.memory_alignment
        if direct is None or body <= 0 or (address_of(view) + head) % alignment:
            return write_at(self.files.buffered, view, offset)
        if head:
            return write_at(self.files.buffered, view[:head], offset)
        try:
            return write_at(direct, view[:body], offset)
        except OSError as exc:
            self.files.direct_failed(exc, alignment)
            return self._write_some(offset, view)

    def finish(self, nbytes: int | None = None) -> None:
        end = base.checked_end(self._path, self._name, nbytes, self._nbytes)
        with storage_errors("cannot make durable", self._url, self._name):
            with self.files:
                # Even if the size is right, the reservation may reach beyond it: truncating frees that space.
                if os.fstat(self.files.buffered).st_size != end or end < self._nbytes:
                    os.ftruncate(self.files.buffered, end)
                if self._durable:
                    sync(self.files.buffered)
            self.files.close()
            if self._durable:
                sync_directory(os.path.dirname(self._path))
        self._finished = True

    def abandon(self) -> None:
        with suppress(OSError):
            self.files.close()
        if not self._finished:
            with suppress(OSError):
                os.unlink(self._path)
            self._finished = True


class _LocalReader:
    def __init__(self, url: str, name: str, files: Descriptors, scratch: Scratch) -> None:
        self._url, self._name = url, name
        self._files = files
        self._scratch = scratch
        self._asks_cache = True
        self._direct = files.direct is not None
        self.nbytes = files.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        with storage_errors("cannot read", self._url, self._name, offset), self._files:
            return self._mostly_cached(offset, nbytes)

    @functools.cached_property
    def _fits_cache(self) -> bool:
        """Found out once, because a file has many reads."""
        return fits_cache(self.nbytes)

    def prefetch(self, offset: int, nbytes: int) -> bool:
        with storage_errors("cannot read", self._url, self._name, offset), self._files:
            self._direct = self._direct and not self._fits_cache
            cached = self._asks_cache and (cached_bytes(self._files.buffered, offset, nbytes) or 0) >= nbytes
            if fills := not self._direct and not cached:
                fill_cache(self._files.buffered, offset, nbytes, self._scratch.get())
            return fills

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        view = flat(into)
        done = 0
        with storage_errors("cannot read", self._url, self._name, offset), self._files:
            if offset < 0:  # to preadv, -1 means "where the last read ended"
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            while done < len(view):
                got = self._read_some(offset + done, view[done:], cached=cached)
                if not got:
                    raise base.short_read(os.path.join(self._url, self._name), self._name, offset, len(view), done)
                done += got

    def _read_some(self, offset: int, view: memoryview, *, cached: bool = False) -> int:
        if cached or not self._direct:
            return read_at(self._files.buffered, view, offset)
        if len(view) + offset % ALIGNMENT > _SCRATCH_BYTES:
            view = view[: _REQUEST_BYTES - offset % ALIGNMENT]
        direct, alignment = self._files.direct, self._files.memory_alignment
        if direct is None or len(view) < _DIRECT_READ_BYTES or self._mostly_cached(offset, len(view)):
            return read_at(self._files.buffered, view, offset)
        try:
            return self._read_direct(direct, offset, view, alignment)
        except OSError as exc:
            self._files.direct_failed(exc, alignment)
            return self._read_some(offset, view)

    def _read_direct(self, fd: int, offset: int, view: memoryview, alignment: int) -> int:
        skip = offset % ALIGNMENT
        if not skip and not address_of(view) % alignment:
            return read_at(fd, view[: len(view) // ALIGNMENT * ALIGNMENT], offset)
        scratch = self._scratch.get()
        window = -(-(skip + len(view)) // ALIGNMENT) * ALIGNMENT
        # The last page may be cut short by the end of the file.
        got = max(0, min(read_at(fd, scratch[:window], offset - skip) - skip, len(view)))
        copy(view[:got], scratch[skip : skip + got])
        return got

    def _mostly_cached(self, offset: int, nbytes: int) -> bool:
        """Ask the page cache. A read with RWF_NOWAIT would make the kernel read ahead, and read all twice."""
        if not self._asks_cache:
            return False
        cached = cached_bytes(self._files.buffered, offset, nbytes)
        self._asks_cache = cached is not None
        return 2 * (cached or 0) > nbytes

    def close(self) -> None:
        with suppress(OSError):  # nothing is lost when a file was only read
            self._files.close()


class LocalStore:
    """A directory of this machine or of a network file system, made when the first blob is; also a root of those below."""

    prefetches = True

    def __init__(
        self, path: str | os.PathLike[str], *, direct: bool = True, durable: bool = True, foreign: bool = False
    ) -> None:
        """
        Point to a directory. `direct`: bypass the page cache where that is possible. `durable`: what is written survives a
        power failure when `finish` or `put` returns. `foreign`: read files of other programs, of any name below the
        directory, which are listed, and through symbolic links.
        """
        self.url = os.fspath(path)
        self._path = os.path.abspath(self.url)
        self._direct = direct
        self._durable = durable
        self._foreign = foreign
        self._scratch = PerThread(lambda: aligned_buffer(_SCRATCH_BYTES))
        self._cleared = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, direct={self._direct})"

    @property
    def local_path(self) -> str:
        return self.url

    @property
    def remote(self) -> bool:
        return _kind_of(self._path) not in {0, *_ON_DISK, *_IN_MEMORY}

    def any_names(self) -> LocalStore:
        return LocalStore(self.url, direct=self._direct, durable=self._durable, foreign=True)

    def spec(self) -> base.StoreSpec:
        return base.StoreSpec(os.fsencode(self._path), {"direct": self._direct, "durable": self._durable})

    def same_place(self, other: object) -> bool:
        """Compare directories by identity, because mounts and links may show one under two paths; else by path."""
        if not isinstance(other, LocalStore):
            return False
        try:
            return os.path.samefile(self.url, other.url)
        except OSError:  # one does not exist, or may not be looked at
            return os.path.realpath(self.url) == os.path.realpath(other.url)

    def create(self, name: str, nbytes: int) -> _LocalWriter:
        with base.abandoning(self.create_upto(name, nbytes)) as writer, storage_errors("cannot create", self.url, name):
            reserve(writer.files.buffered, nbytes)
            return writer

    def create_upto(self, name: str, nbytes: int) -> _LocalWriter:
        path = self._path_of(name)
        with storage_errors("cannot create", self.url, name):
            files = self._new_file(path, direct=self._direct)
        return _LocalWriter(self.url, name, path, nbytes, files, durable=self._durable)

    def _new_file(self, path: str, *, direct: bool) -> Descriptors:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return open_files(path, flags, direct=direct)
        except FileNotFoundError:
            make_directory(self._path)
            return open_files(path, flags, direct=direct)

    def open(self, name: str) -> base.BlobReader:
        return self._open(name, direct=self._direct)

    def _open(self, name: str, *, direct: bool) -> base.BlobReader:
        path = os.path.join(self._path, base.check_below(name)) if self._foreign else self._path_of(name)
        with storage_errors("cannot open", self.url, name):
            files = open_files(path, os.O_RDONLY, direct=direct, follow_links=self._foreign)
            return _LocalReader(self.url, name, files, self._scratch)

    def drop_cached(self, name: str, offset: int, nbytes: int) -> None:
        drop_from_cache([os.path.join(self.url, name)], offset, nbytes)

    def keep_cached(self, names: Sequence[str], nbytes: int) -> bool:
        return newest_save().keep([os.path.join(self._path, name) for name in names], nbytes)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: base.Version | None = None) -> None:
        path = self._path_of(name)
        temporary = os.path.join(self._path, temporary_name())
        with storage_errors("cannot put", self.url, name):
            self._write_whole(name, temporary, data)
            try:
                if replace or over is not None:
                    with directory_lock(self._path):
                        if over is not None and self.version(name) != over:
                            raise base.conflict(os.path.join(self.url, name), name, over)
                        os.replace(temporary, path)
                else:
                    try:
                        os.link(temporary, path)
                    except OSError as exc:
                        if exc.errno not in _NO_LINKS:
                            raise
                        # Without hard links, a crash can leave a part of a new blob, but never damages an existing one.
                        self._write_whole(name, path, data)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            if self._durable:
                sync_directory(self._path)
        if not self._cleared:
            self._cleared = True  # once per store
            clear_temporaries(self._path)

    def _write_whole(self, name: str, path: str, data: bytes) -> None:
        files = self._new_file(path, direct=False)
        with base.abandoning(_LocalWriter(self.url, name, path, len(data), files, durable=self._durable)) as writer:
            writer.write_at(0, memoryview(data))
            if self._durable:
                sync(files.buffered)
            files.close()

    def get(self, name: str, *, limit: int) -> bytes:
        return base.read_blob(self._open(name, direct=False), os.path.join(self.url, name), name, limit)

    def version(self, name: str) -> base.Version | None:
        with storage_errors("cannot look up", self.url, name):
            try:
                files = open_files(self._path_of(name), os.O_RDONLY, direct=False)
            except FileNotFoundError:
                return None
            # Not the inode: the next file may get that of a file that was just deleted.
            with closing(files), os.fdopen(files.buffered, "rb", closefd=False) as file:
                digest = blake2b(file.read(), digest_size=16).hexdigest()
                return base.Version(digest, str(os.fstat(files.buffered).st_mtime_ns))

    def all_names(self) -> base.Names:
        with storage_errors("cannot list", self.url):
            names, links = kept_names().of(self._path)
            more = [entry.name for entry in links if entry.is_dir()]
        return base.Names([*names.places, *more], names.blobs) if more else names

    def list(self) -> Iterator[base.BlobInfo]:
        found = []
        with storage_errors("cannot list", self.url):
            for name in sorted(kept_names().of(self._path)[0].blobs()):
                with suppress(FileNotFoundError):  # deleted since
                    if self._foreign or base.is_name(name):
                        status = os.stat(os.path.join(self._path, name), follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append(base.BlobInfo(name, status.st_size, status.st_mtime))
        return iter(found)

    def free_nbytes(self) -> int | None:
        path = self._path
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        try:
            room = shutil.disk_usage(path)
        except OSError:
            return None
        return room.free if room.total else None

    def delete(self, name: str) -> None:
        self.delete_all([name])

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete many files, and make that durable once for all of them."""
        deleted = 0
        for name in names:
            with storage_errors("cannot delete", self.url, name), suppress(FileNotFoundError):
                os.unlink(self._path_of(name))
                deleted += 1
        if deleted:
            with storage_errors("cannot delete", self.url, names[-1]):
                sync_directory(self._path)

    def places(self) -> Iterator[str]:
        return iter(self.all_names().places)

    def place(self, name: str) -> LocalStore:
        return LocalStore(os.path.join(self.url, base.check_place(name)), direct=self._direct, durable=self._durable)

    def remove(self, name: str) -> None:
        path = os.path.join(self._path, base.check_place(name))
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError):
            if os.path.islink(path):
                os.unlink(path)
                return
            with os.scandir(path) as entries:
                names = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
            markers = set(filter(base.is_commit_marker, names))
            for each in markers:  # one step both ends the checkpoint and marks the removal, even on a full disk
                os.replace(os.path.join(path, each), os.path.join(path, base.REMOVING_NAME))
            if not markers:
                base.delete_contents(self.place(name))
            elif self._durable:
                sync_directory(path)  # enough: what comes back after a power failure is marked, and swept
            for each in names - {base.REMOVING_NAME}:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, each))
            # Left are the mark, and what has no blob's name or is no file: other programs left it. Links are not followed.
            shutil.rmtree(path)

    def drop_empty(self, name: str) -> None:
        path = os.path.join(self._path, base.check_place(name))
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.rmdir(path)
            except OSError as exc:
                if exc.errno not in _NOT_EMPTY:
                    raise

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, base.check_name(name))
