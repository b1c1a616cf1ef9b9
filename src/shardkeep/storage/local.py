"""
A store that is a directory: blobs are its files, places below it are its directories.

Large reads and writes bypass the page cache (O_DIRECT) where memory and offset allow it, which is steadier and takes a
fifth of the CPU time; everything else, and every system without O_DIRECT, is buffered. A blob is durable when `finish`
or `put` returns. The store never reads or writes outside its directory, opens only regular files, and follows symbolic
links only if the caller allows it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import blake2b

import msgspec

from shardkeep.storage.base import (
    BlobInfo,
    BlobReader,
    Version,
    check_below,
    check_fits,
    check_name,
    checked_end,
    delete_contents,
    is_name,
    read_whole,
    short_read,
    version_conflict,
)
from shardkeep.storage.buffers import ALIGNMENT, ScratchPool, address_of, copy, flat
from shardkeep.storage.system import (
    NO_DIRECT,
    Descriptors,
    cached_bytes,
    directory_lock,
    file_version,
    host_identity,
    make_directory,
    open_files,
    process_start,
    read_at,
    reserve,
    storage_errors,
    sync,
    sync_directory,
    write_at,
)

_REQUEST_BYTES = 4 << 20
"""Size of one read: small enough that the bytes are still in the CPU's cache when they leave a scratch buffer."""
_DIRECT_READ_BYTES = 1 << 20
"""Shorter reads are buffered: headers and indexes are read more than once, and the page cache reads ahead for them."""
_SCRATCH_BYTES = _REQUEST_BYTES + _DIRECT_READ_BYTES
"""Room for the last few bytes of a range, so that they need no request of their own."""
_MEMORY_ALIGNMENT = 64
"""How torch aligns tensors. NVMe accepts such memory; other disks refuse it, and are then given whole pages."""
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
_TEMPORARY = re.compile(r"\.tmp-(?P<host>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\w*)-[0-9a-f]+")


def _host_mark() -> str:
    return blake2b(host_identity().encode(), digest_size=6).hexdigest()


def _temporary_name() -> str:
    """Name a temporary file after the process that writes it, so that it can be recognised as abandoned."""
    return f".tmp-{_host_mark()}-{os.getpid()}-{process_start(os.getpid())}-{secrets.token_hex(8)}"


class _LocalWriter:
    def __init__(self, url: str, name: str, path: str, nbytes: int, files: Descriptors, *, durable: bool) -> None:
        self._durable = durable
        self._url = url
        self._name = name
        self._path = path
        self._nbytes = nbytes
        self._files = files
        self._direct = files.direct
        self._memory_alignment = _MEMORY_ALIGNMENT
        self._finished = False

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        check_fits(self._path, self._name, offset, len(view), self._nbytes)
        done = 0
        with storage_errors("cannot write", self._url, self._name, offset), self._files:
            while done < len(view):
                done += self._write_some(offset + done, view[done:])

    def _write_some(self, offset: int, view: memoryview) -> int:
        # Direct and buffered writes must never share a page, so a partial page is buffered, whichever thread writes it.
        head = -offset % ALIGNMENT
        body = (len(view) - head) // ALIGNMENT * ALIGNMENT
        direct, alignment = self._direct, self._memory_alignment
        if direct is None or body <= 0 or (address_of(view) + head) % alignment:
            return write_at(self._files.buffered, view, offset)
        if head:
            return write_at(self._files.buffered, view[:head], offset)
        try:
            return write_at(direct, view[:body], offset)
        except OSError as exc:
            if exc.errno not in NO_DIRECT:
                raise
            # Compare with what this call used: another thread may have found out the same in the meantime.
            if alignment < ALIGNMENT:
                self._memory_alignment = ALIGNMENT
            else:
                self._direct = None
            return self._write_some(offset, view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(self._path, self._name, nbytes, self._nbytes)
        with storage_errors("cannot make durable", self._url, self._name):
            with self._files:
                # Even if the size is right, the reservation may reach beyond it: truncating frees that space.
                if os.fstat(self._files.buffered).st_size != end or end < self._nbytes:
                    os.ftruncate(self._files.buffered, end)
                if self._durable:
                    sync(self._files.buffered)
            self._files.close()
            if self._durable:
                sync_directory(os.path.dirname(self._path))
        self._finished = True

    def abandon(self) -> None:
        with suppress(OSError):
            self._files.close()
        if not self._finished:
            with suppress(OSError):
                os.unlink(self._path)
            self._finished = True


class _LocalReader:
    def __init__(self, url: str, name: str, files: Descriptors, scratch: ScratchPool) -> None:
        self._url = url
        self._name = name
        self._files = files
        self._direct = files.direct
        self._memory_alignment = _MEMORY_ALIGNMENT
        self._scratch = scratch
        self._asks_cache = True
        self._nbytes = files.nbytes
        scratch.retain()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        with storage_errors("cannot read", self._url, self._name, offset), self._files:
            return self._mostly_cached(offset, nbytes)

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        view = flat(into)
        done = 0
        with storage_errors("cannot read", self._url, self._name, offset), self._files:
            if offset < 0:  # to preadv, -1 means "where the last read ended"
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            while done < len(view):
                got = self._read_some(offset + done, view[done:], cached=cached)
                if not got:
                    raise short_read(os.path.join(self._url, self._name), self._name, offset, len(view), done)
                done += got

    def _read_some(self, offset: int, view: memoryview, *, cached: bool = False) -> int:
        if cached:
            return read_at(self._files.buffered, view, offset)
        if len(view) + offset % ALIGNMENT > _SCRATCH_BYTES:
            view = view[: _REQUEST_BYTES - offset % ALIGNMENT]
        direct, alignment = self._direct, self._memory_alignment
        if direct is None or len(view) < _DIRECT_READ_BYTES or self._mostly_cached(offset, len(view)):
            return read_at(self._files.buffered, view, offset)
        try:
            return self._read_direct(direct, offset, view, alignment)
        except OSError as exc:
            if exc.errno not in NO_DIRECT:
                raise
            if alignment < ALIGNMENT:
                self._memory_alignment = ALIGNMENT
            else:
                self._direct = None
            return self._read_some(offset, view)

    def _read_direct(self, fd: int, offset: int, view: memoryview, alignment: int) -> int:
        skip = offset % ALIGNMENT
        if not skip and not address_of(view) % alignment:
            return read_at(fd, view[: len(view) // ALIGNMENT * ALIGNMENT], offset)
        with self._scratch.lease() as scratch:
            window = -(-(skip + len(view)) // ALIGNMENT) * ALIGNMENT
            # The last page may be cut short by the end of the file.
            got = min(read_at(fd, scratch[:window], offset - skip) - skip, len(view))
            if got <= 0:
                return 0
            copy(view[:got], scratch[skip : skip + got])
            return got

    def _mostly_cached(self, offset: int, nbytes: int) -> bool:
        """
        Ask the page cache whether it holds most of a range.

        A read with RWF_NOWAIT would return cached bytes directly, but for bytes that are missing it makes the kernel
        read ahead as much as was asked for, and a cold load then reads everything twice.
        """
        if not self._asks_cache:
            return False
        cached = cached_bytes(self._files.buffered, offset, nbytes)
        self._asks_cache = cached is not None
        return 2 * (cached or 0) > nbytes

    def close(self) -> None:
        try:
            first = self._files.close()
        except OSError:  # nothing is lost when a file was only read
            first = True
        if first:
            self._scratch.release()


class LocalStore:
    """
    A directory of this machine or of a network file system. It is made when the first blob is.

    It is also a root: the places below it are its directories.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        direct: bool = True,
        durable: bool = True,
        foreign: bool = False,
    ) -> None:
        """
        Point to a directory.

        Args:
            path: the directory.
            direct: bypass the page cache where that is possible.
            durable: make what is written survive a power failure before `finish` and `put` return.
            foreign: read files of other programs: through symbolic links, and of any name below the directory.

        """
        self.url = os.fspath(path)
        self._path = os.path.abspath(self.url)
        self._direct = direct
        self._durable = durable
        self._foreign = foreign
        self._scratch = ScratchPool(_SCRATCH_BYTES)
        self._cleared = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, direct={self._direct})"

    @property
    def local_path(self) -> str:
        return self.url

    def any_names(self) -> LocalStore:
        """Return the same directory, for reading files that other programs named or linked."""
        return LocalStore(self.url, direct=self._direct, durable=self._durable, foreign=True)

    def spec(self) -> LocalStoreSpec:
        return LocalStoreSpec(os.fsencode(self._path), self._direct, self._durable)

    def same_place(self, other: object) -> bool:
        """Compare directories by identity, because mounts and links may show one under two paths; else by path."""
        if not isinstance(other, LocalStore):
            return False
        try:
            return os.path.samefile(self.url, other.url)
        except OSError:  # one does not exist, or may not be looked at
            return os.path.realpath(self.url) == os.path.realpath(other.url)

    def create(self, name: str, nbytes: int) -> _LocalWriter:
        return self._create(name, nbytes, reserved=nbytes)

    def create_upto(self, name: str, nbytes: int) -> _LocalWriter:
        return self._create(name, nbytes, reserved=0)

    def _create(self, name: str, nbytes: int, *, reserved: int) -> _LocalWriter:
        path = self._path_of(name)
        with storage_errors("cannot create", self.url, name):
            files = self._new_file(path, direct=self._direct)
            writer = _LocalWriter(self.url, name, path, nbytes, files, durable=self._durable)
            try:
                reserve(files.buffered, reserved)
            except BaseException:
                writer.abandon()
                raise
        return writer

    def _new_file(self, path: str, *, direct: bool) -> Descriptors:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return open_files(path, flags, direct=direct)
        except FileNotFoundError:
            make_directory(self._path)
            return open_files(path, flags, direct=direct)

    def open(self, name: str) -> BlobReader:
        return self._open(name, direct=self._direct)

    def _open(self, name: str, *, direct: bool) -> BlobReader:
        path = os.path.join(self._path, check_below(name)) if self._foreign else self._path_of(name)
        with storage_errors("cannot open", self.url, name):
            files = open_files(path, os.O_RDONLY, direct=direct, follow_links=self._foreign)
            return _LocalReader(self.url, name, files, self._scratch)

    def drop_cached(self, name: str, offset: int, nbytes: int) -> None:
        """Drop a range from the page cache, so that it is read from the disk; 0 bytes mean the rest of the file."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # then it is read from wherever it comes
            fd = os.open(os.path.join(self.url, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                begin = offset // mmap.PAGESIZE * mmap.PAGESIZE  # only whole pages are dropped
                end = -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        path = self._path_of(name)
        temporary = os.path.join(self._path, _temporary_name())
        with storage_errors("cannot put", self.url, name):
            self._write_whole(name, temporary, data)
            try:
                if replace or over is not None:
                    with directory_lock(self._path):
                        if over is not None and self.version(name) != over:
                            raise version_conflict(os.path.join(self.url, name), name)
                        os.replace(temporary, path)
                else:
                    self._link(name, temporary, path, data)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            if self._durable:
                sync_directory(self._path)
        if not self._cleared:
            self._cleared = True
            self._clear()

    def _clear(self) -> None:
        """Remove temporary files of processes of this machine that died in a `put`; best effort, once per store."""
        with suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                left = _TEMPORARY.fullmatch(entry.name)
                if left and left["host"] == _host_mark() and process_start(int(left["pid"])) != left["started"]:
                    with suppress(OSError):
                        os.unlink(entry.path)

    def _link(self, name: str, temporary: str, path: str, data: bytes) -> None:
        try:
            os.link(temporary, path)
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            # Without hard links, a crash can leave a part of a new blob, but never damages an existing one.
            self._write_whole(name, path, data)

    def _write_whole(self, name: str, path: str, data: bytes) -> None:
        files = self._new_file(path, direct=False)
        writer = _LocalWriter(self.url, name, path, len(data), files, durable=self._durable)
        try:
            writer.write_at(0, memoryview(data))
            if self._durable:
                sync(files.buffered)
            files.close()
        except BaseException:
            writer.abandon()
            raise

    def get(self, name: str, *, limit: int) -> bytes:
        return read_whole(self._open(name, direct=False), os.path.join(self.url, name), name, limit)

    def version(self, name: str) -> Version | None:
        with storage_errors("cannot look up", self.url, name):
            try:
                files = open_files(self._path_of(name), os.O_RDONLY, direct=False)
            except FileNotFoundError:
                return None
            with closing(files):
                return file_version(files)

    def list(self) -> Iterator[BlobInfo]:
        found = []
        # The inner suppress: a blob deleted since. The outer: a directory that was never made.
        with storage_errors("cannot list", self.url), suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                if is_name(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append(BlobInfo(entry.name, status.st_size, status.st_mtime))
        return iter(sorted(found, key=lambda blob: blob.name))

    def free_nbytes(self) -> int | None:
        """Return the free space of the file system; None if it does not say."""
        path = self._path
        while not os.path.isdir(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path)
        try:
            room = shutil.disk_usage(path)
        except OSError:
            return None
        return room.free if room.total else None

    def delete(self, name: str) -> None:
        with storage_errors("cannot delete", self.url, name), suppress(FileNotFoundError):
            os.unlink(self._path_of(name))
            sync_directory(self._path)

    # -- places below --------------------------------------------------------------------------------------------------

    def places(self) -> Iterator[str]:
        found: list[str] = []
        with storage_errors("cannot list", self.url), suppress(FileNotFoundError), os.scandir(self._path) as entries:
            found.extend(entry.name for entry in entries if is_name(entry.name) and entry.is_dir())
        return iter(found)

    def place(self, name: str) -> LocalStore:
        return LocalStore(os.path.join(self.url, check_name(name)), direct=self._direct, durable=self._durable)

    def remove(self, name: str) -> None:
        path = self._path_of(name)
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError):
            if os.path.islink(path):
                os.unlink(path)
            else:
                delete_contents(self.place(name))
                # What is left has no blob's name or is not a file: other programs left it. Links are not followed.
                shutil.rmtree(path)
            sync_directory(self._path)

    def drop_empty(self, name: str) -> None:
        path = self._path_of(name)
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.rmdir(path)
            except OSError as exc:
                if exc.errno not in _NOT_EMPTY:
                    raise

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, check_name(name))


class LocalStoreSpec(msgspec.Struct, frozen=True, tag=True):
    """A `LocalStore`, described for another process of this machine."""

    path: bytes
    """Absolute."""
    direct: bool
    durable: bool

    def open(self) -> LocalStore:
        return LocalStore(os.fsdecode(self.path), direct=self.direct, durable=self.durable)


class PathStore:
    """Reads files of this machine by their paths, through symbolic links, as in a Hugging Face cache."""

    def __init__(self, *, direct: bool) -> None:
        """Bypass the page cache where that is possible, if `direct`."""
        self._direct = direct
        self._scratch = ScratchPool(_SCRATCH_BYTES)

    def open(self, name: str) -> BlobReader:
        where, last = os.path.split(name)
        with storage_errors("cannot open", where, last):
            files = open_files(name, os.O_RDONLY, direct=self._direct, follow_links=True)
            return _LocalReader(where, last, files, self._scratch)

    def get(self, name: str, *, limit: int) -> bytes:
        return read_whole(self.open(name), name, name, limit)
