"""
Files of fsspec's file systems, written in order and read by ranges, and their errors in our words.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shardkeep.errors import CheckpointError, StorageError, WrongSize
from shardkeep.store.aligned import flat
from shardkeep.store.files import storage_errors
from shardkeep.store.protocol import checked_end

_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""Many raise these without a number."""
_USER = re.compile(r"(?<=://)[^/\s]*@")


def without_user(text: str) -> str:
    """Leave `user:password@` out of all URLs in a text: it is to be shown."""
    return _USER.sub("", text)


@contextmanager
def fs_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    """Turn whatever a file system raises into ours; each raises what its own library does."""
    try:
        with storage_errors(action, url, name, offset), _numbered():
            yield
    except CheckpointError:
        raise
    except Exception as exc:  # noqa: BLE001 - raised as ours
        where = f"{url}/{name}" if name else url
        message = without_user(f"{where}: {action}: {type(exc).__name__}: {exc}")
        raise StorageError(message, name=name, offset=offset, errno=errno.EIO) from (exc if _is_clean(exc) else None)


@contextmanager
def _numbered() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        number = _NUMBERS.get(type(exc)) if exc.errno is None else exc.errno
        if _is_clean(exc) and number == exc.errno:
            raise
        number = number or errno.EIO
        text = without_user(exc.strerror or str(exc)) or os.strerror(number)
        raise OSError(number, text) from (exc if _is_clean(exc) else None)


def _is_clean(exc: Exception) -> bool:
    """Tell whether an exception can be shown as it is."""
    return without_user(str(exc)) == str(exc)


class FsspecWriter:
    """A new file, written from its beginning on; what comes early is kept in memory."""

    def __init__(self, fs: Any, path: str, url: str, name: str, nbytes: int) -> None:
        self._fs, self._path, self._url, self._name, self._nbytes = fs, path, url, name, nbytes
        self._lock = threading.Lock()
        self._at = 0
        self._early: dict[int, bytes] = {}
        self._open = True
        with fs_errors("cannot create", url, name):
            with suppress(Exception):  # object stores have no directories, and some say so
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._file = fs.open(path, "wb")

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        with self._lock, fs_errors("cannot write", self._url, self._name, offset):
            if not self._open or offset < 0 or offset + len(view) > self._nbytes:
                raise self._invalid(f"{len(view)} bytes at offset {offset} do not fit an open blob of {self._nbytes}")
            if view and offset < self._at:
                raise self._invalid(f"the bytes at offset {offset} were written already")
            if offset > self._at:
                self._early[offset] = bytes(view)
                return
            self._append(view)
            while (early := self._early.pop(self._at, None)) is not None:
                self._append(memoryview(early))

    def _append(self, view: memoryview) -> None:
        if view:
            self._file.write(view)
            self._at += len(view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(f"{self._url}/{self._name}", self._name, nbytes, self._nbytes)
        with self._lock, fs_errors("cannot finish", self._url, self._name):
            if not self._open or end != self._at:
                raise self._invalid(f"cannot end after {end} bytes: it has {self._at} from its beginning on")
            self._file.close()
            self._open = False
            self._fs.invalidate_cache(self._path.rpartition("/")[0])

    def abandon(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            with suppress(Exception):
                self._file.close()
            with suppress(Exception):
                self._fs.rm_file(self._path)

    def _invalid(self, what: str) -> StorageError:
        return StorageError(f"{self._url}/{self._name}: {what}", name=self._name, errno=errno.EINVAL)


class FsspecReader:
    """A file that is read by ranges."""

    def __init__(self, fs: Any, path: str, url: str, name: str) -> None:
        self._fs, self._path, self._url, self._name = fs, path, url, name
        with fs_errors("cannot open", url, name):
            self._nbytes = int(fs.info(path)["size"])

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cached(self, offset: int, nbytes: int) -> bool:  # noqa: ARG002 - it cannot say
        return False

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002
        view = flat(into)
        if offset < 0:
            message = f"{self._url}/{self._name}: there is no offset {offset}"
            raise StorageError(message, name=self._name, offset=offset, errno=errno.EINVAL)
        found = b""
        if view:
            with fs_errors("cannot read", self._url, self._name, offset):
                found = self._fs.cat_file(self._path, start=offset, end=offset + len(view))
        if len(found) != len(view):
            raise WrongSize(
                f"{self._url}/{self._name}: wanted {len(view)} bytes at offset {offset}, got {len(found)}",
                name=self._name, offset=offset, wanted=len(view), got=len(found),
            )  # fmt: skip
        view[:] = found

    def close(self) -> None:
        """Nothing to release: each read opens and closes what it needs."""
