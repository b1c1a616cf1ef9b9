"""
A store on any file system that fsspec opens: as atomic and as durable as that file system is, and no more.

The parts of a blob are written in order; early ones are buffered up to a bound, and then wait. Of several writers of one
blob, one wins by reading back (`conditional_put`).
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from shardkeep.errors import BlobNotFound, CheckpointError, StorageError
from shardkeep.storage import base
from shardkeep.storage.buffers import MemoryBudget, copy, flat
from shardkeep.storage.cancel import CANCELLED, current_scope
from shardkeep.storage.conditional_put import ConditionalPuts
from shardkeep.storage.local import errno_of, storage_errors

_SETTLE_S = 1.0
_EARLY_NBYTES = 128 << 20
"""Budget for early bytes, unless the `CancelScope` has one."""
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
"""The names that file systems give to the time of the last change."""
_PATIENCE_S = 30.0
"""How long an early write waits for the next bytes when the budget is used up."""
_POLL_S = 0.1
_USER = re.compile(r"(?<=://)[^/\s]*@")


def url_to_fs(url: str, **options: Any) -> tuple[Any, str]:
    found: tuple[Any, str] = importlib.import_module("fsspec.core").url_to_fs(url, **options)  # slow to import
    return found


def without_user(text: str) -> str:
    """Remove `user:password@` from all URLs in a text that will be shown."""
    return _USER.sub("", text)


@contextmanager
def fs_errors(action: str, url: str, name: str = "", offset: int | None = None) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as exc:  # noqa: BLE001 - raised as ours
        cause = exc if without_user(str(exc)) == str(exc) else None  # its text may contain a password
        if not isinstance(exc, OSError):
            where = f"{url}/{name}" if name else url
            message = without_user(f"{where}: {action}: {type(exc).__name__}: {exc}")
            raise StorageError(message, name=name, offset=offset, errno=errno.EIO) from cause
        number = errno_of(exc)
        with storage_errors(action, url, name, offset):
            raise OSError(number, without_user(exc.strerror or str(exc)) or os.strerror(number)) from cause


class _FsspecWriter:
    """
    A new file, written in order. Early bytes are buffered, and wait when the budget is used up.

    The thread that brings the next bytes never waits. If no thread brings them for long, early bytes are buffered beyond
    the budget, because the next bytes may be waiting for them.
    """

    def __init__(self, store: FsspecStore, name: str, nbytes: int) -> None:
        self._fs, self._path, self._url = store.fs, store.path_of(name), store.url
        self._name, self._nbytes = name, nbytes
        self._where = f"{store.url}/{name}"
        self._scope = scope = current_scope()
        self._budget = store.budget if scope is None or scope.budget is None else scope.budget
        self._state = threading.Condition()
        self._at = 0
        self._early: dict[int, Any] = {}
        self._open = True
        with fs_errors("cannot create", store.url, name):
            with suppress(Exception):  # object stores have no directories, and some raise
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._file = self._fs.open(self._path, "wb")

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        with self._state, fs_errors("cannot write", self._url, self._name, offset):
            memory = self._memory_for(offset, view)
            if memory is not None:
                copy(memoryview(memory), view)
                self._early[offset] = memory
                return
            while view:
                self._file.write(view)
                self._at += len(view)
                view = memoryview(self._early.pop(self._at, b""))
            self._state.notify_all()

    def _memory_for(self, offset: int, view: memoryview) -> Any:
        """Return memory for early bytes when the budget allows it, or after a long wait; None once it is their turn."""
        at, since = self._at, time.monotonic()
        while True:
            if self._scope is not None and self._scope.cancelled:
                raise self._error(CANCELLED, errno.ECANCELED)
            base.check_fits(self._where, self._name, offset, len(view), self._nbytes, is_open=self._open)
            if view and (offset < self._at or offset in self._early):
                raise self._error(f"the bytes at offset {offset} were written already")
            if offset == self._at or not view:
                return None
            if self._at > at:
                at, since = self._at, time.monotonic()
            memory = self._budget.take(len(view), must=time.monotonic() - since > _PATIENCE_S)
            if memory is not None:
                return memory
            self._state.wait(_POLL_S)  # not woken when other files release memory: look again

    def finish(self, nbytes: int | None = None) -> None:
        end = base.checked_end(self._where, self._name, nbytes, self._nbytes)
        with self._state, fs_errors("cannot finish", self._url, self._name):
            if not self._open or end != self._at:
                raise self._error(f"cannot end after {end} bytes: {self._at} were written without a gap")
            self._file.close()
            self._open = False
            self._fs.invalidate_cache(self._path.rpartition("/")[0])

    def abandon(self) -> None:
        with self._state:
            if not self._open:
                return
            self._open = False
            self._early.clear()
            self._state.notify_all()
            with suppress(Exception):
                self._file.close()
            with suppress(Exception):
                self._fs.rm_file(self._path)

    def _error(self, what: str, number: int = errno.EINVAL) -> StorageError:
        return StorageError(f"{self._where}: {what}", name=self._name, errno=number)


class _FsspecReader:
    def __init__(self, store: FsspecStore, name: str) -> None:
        self._fs, self._path, self._url, self._name = store.fs, store.path_of(name), store.url, name
        with fs_errors("cannot open", store.url, name):
            self.nbytes = int(self._fs.info(self._path)["size"])

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002
        view = flat(into)
        base.check_within(f"{self._url}/{self._name}", self._name, offset, len(view), self.nbytes)
        with fs_errors("cannot read", self._url, self._name, offset):
            found = self._fs.cat_file(self._path, start=offset, end=offset + len(view)) if view else b""
        if len(found) != len(view):
            raise base.short_read(f"{self._url}/{self._name}", self._name, offset, len(view), len(found))
        view[:] = found

    def close(self) -> None:
        """Nothing to release: each read opens and closes what it needs."""


class FsspecStore(ConditionalPuts):
    """A directory, or its equivalent, of a file system of fsspec. It is also a root of the directories below it."""

    sequential = True
    remote = True

    def __init__(
        self, fs: Any, path: str, url: str, options: Mapping[str, Any] = {}, *, settle_s: float = _SETTLE_S
    ) -> None:
        """Point to a place; it was opened with `url` and `options`, `settle_s` is the wait before a put is read back."""
        self.url = without_user(url)
        self.fs = fs
        self._opened_url, self._options = url, options
        self._path = path.rstrip("/")
        self._settle_s = settle_s
        self._lock, self._warned, self.budget = _shared(type(fs).__name__)

    def spec(self) -> base.StoreSpec:
        kind = type(self.fs)
        names = [kind.protocol] if isinstance(kind.protocol, str) else [*kind.protocol]
        if "memory" in (*names, self.fs.storage_options.get("target_protocol")):
            raise base.not_sendable(self.url, kind.__name__)
        return base.StoreSpec(self._opened_url.encode(), base.sendable_options(self.url, self._options))

    def create(self, name: str, nbytes: int) -> _FsspecWriter:
        path = self.path_of(name)
        with self._lock:
            with fs_errors("cannot create", self.url, name):
                if self.fs.exists(path):
                    raise base.conflict(f"{self.url}/{name}", name)
            return _FsspecWriter(self, name, nbytes)

    def open(self, name: str) -> _FsspecReader:
        return _FsspecReader(self, name)

    def get(self, name: str, *, limit: int) -> bytes:
        return base.read_blob(self.open(name), f"{self.url}/{name}", name, limit)

    def version(self, name: str) -> base.Version | None:
        try:
            with fs_errors("cannot look up", self.url, name):
                return base.Version(blake2b(self.fs.cat_file(self.path_of(name)), digest_size=16).hexdigest())
        except BlobNotFound:
            return None

    def list(self) -> Iterator[base.BlobInfo]:
        files = [(name, info) for name, info in self._level() if info.get("type") == "file" and base.is_name(name)]
        found = [base.BlobInfo(name, int(info["size"]), _modified_s(info)) for name, info in files]
        return iter(sorted(found, key=lambda blob: blob.name))

    def delete(self, name: str) -> None:
        with suppress(BlobNotFound), fs_errors("cannot delete", self.url, name):
            self.fs.rm_file(self.path_of(name))

    def send(self, name: str, data: Any, *, create: bool = False, over: base.Version | None = None) -> None:  # noqa: ARG002
        with fs_errors("cannot put", self.url, name):
            with suppress(Exception):
                self.fs.makedirs(self._path, exist_ok=True)
            self.fs.pipe_file(self.path_of(name), bytes(data))

    def checks_conditions(self, over: base.Version | None) -> bool:  # noqa: ARG002
        """Return False: fsspec has no conditions. Its mode "create" looks and then puts, as `ConditionalPuts` does."""
        return False

    def all_names(self) -> base.Names:
        level = [(name, info.get("type")) for name, info in self._level() if base.is_place_name(name)]
        places = [name for name, kind in level if kind == "directory"]
        return base.Names(places, lambda: [name for name, kind in level if kind == "file"])

    def places(self) -> Iterator[str]:
        return iter(self.all_names().places)

    def place(self, name: str) -> FsspecStore:
        path = f"{self._path}/{base.check_place(name)}"
        return FsspecStore(self.fs, path, f"{self._opened_url}/{name}", self._options, settle_s=self._settle_s)

    def remove(self, name: str) -> None:
        place = self.place(name)
        base.delete_contents(place)
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self.fs.exists(place._path):
                self.fs.rm(place._path, recursive=True)

    def drop_empty(self, name: str) -> None:
        path = self.place(name)._path
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self.fs.isdir(path) and not self.fs.ls(path):
                self.fs.rmdir(path)

    def path_of(self, name: str) -> str:
        return f"{self._path}/{base.check_name(name)}"

    def _level(self) -> Sequence[tuple[str, dict[str, Any]]]:
        with fs_errors("cannot list", self.url):
            self.fs.invalidate_cache(self._path)
            try:
                level = self.fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # `ls` of a file lists the file itself.
        itself = self.fs._strip_protocol(self._path)
        level = [info for info in level if self.fs._strip_protocol(info["name"]) != itself or info["type"] != "file"]
        return [(info["name"].rstrip("/").rpartition("/")[2], info) for info in level]


def _modified_s(info: dict[str, Any]) -> float:
    """Return when a file was written; now if that is unknown, because a file that seems old may be taken for an orphan."""
    when = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(when, str):
        with suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, (int, float)) else time.time()


@functools.cache
def _shared(kind: str) -> tuple[threading.Lock, set[str], MemoryBudget]:
    """Return what all places of one kind of file system share: a lock, the warnings given, the budget for early bytes."""
    del kind
    return threading.Lock(), set(), MemoryBudget(_EARLY_NBYTES)
