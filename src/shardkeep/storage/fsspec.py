"""
Any place that fsspec opens, as a store: as atomic and as durable as that file system is, and no more.

Parts of a blob are written in order; what comes early is kept in memory, up to a bound, and then waits. Of several
writers of one blob one wins by looking again, unless the file system has puts that create only.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, StorageError, WrongSize
from shardkeep.storage.base import BlobInfo, Version, check_name, checked_end, delete_contents, is_name
from shardkeep.storage.buffers import MemoryBudget, copy, flat
from shardkeep.storage.cancel import CANCELLED, current_scope
from shardkeep.storage.conditional_put import ConditionalPuts, name_taken
from shardkeep.storage.system import storage_errors

# Files of fsspec's file systems, written in order and read by ranges, and their errors in our words.

_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}
"""Many raise these without a number."""
_PATIENCE_S = 30.0
"""For the next bytes, where there is no room for more that come after them."""
_LOOK_S = 0.1
_USER = re.compile(r"(?<=://)[^/\s]*@")


def without_user(text: str) -> str:
    """Leave `user:password@` out of all URLs in a text: it is to be shown."""
    return _USER.sub("", text)


@contextmanager
def fs_errors(
    action: str, url: str, name: str = "", offset: int | None = None, *, looks: bool = False
) -> Iterator[None]:
    """
    Turn whatever a file system raises into ours; each raises what its own library does.

    `looks`: something is looked for that may not be there. So it is below a file, whatever else is said of that.
    """
    try:
        with storage_errors(action, url, name, offset), _numbered(looks=looks):
            yield
    except CheckpointError:
        raise
    except Exception as exc:  # noqa: BLE001 - raised as ours
        where = f"{url}/{name}" if name else url
        message = without_user(f"{where}: {action}: {type(exc).__name__}: {exc}")
        raise StorageError(message, name=name, offset=offset, errno=errno.EIO) from (exc if _is_clean(exc) else None)


@contextmanager
def _numbered(*, looks: bool) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        number = _NUMBERS.get(type(exc)) if exc.errno is None else exc.errno
        if looks and isinstance(exc, NotADirectoryError):
            number = errno.ENOENT
        if _is_clean(exc) and number == exc.errno:
            raise
        number = number or errno.EIO
        text = without_user(exc.strerror or str(exc)) or os.strerror(number)
        raise OSError(number, text) from (exc if _is_clean(exc) else None)


def _is_clean(exc: Exception) -> bool:
    """Tell whether an exception can be shown as it is."""
    return without_user(str(exc)) == str(exc)


class FsspecWriter:
    """
    A new file, written from its beginning on. What comes early is kept in memory, and waits where there is no room.

    Whoever brings the next bytes never waits. Where nobody does for long, early bytes are an error; but on terms that
    promise them nearly in order (`giving_up.Hope`) they are taken all the same, as the next ones may wait for it.
    """

    def __init__(self, fs: Any, path: str, url: str, name: str, nbytes: int, *, room: MemoryBudget) -> None:
        """Begin one; `room` is for what comes early, unless the terms on which it is made have one."""
        self._fs, self._path, self._url, self._name, self._nbytes = fs, path, url, name, nbytes
        self._hope = hope = current_scope()
        self._room = room if hope is None or hope.room is None else hope.room
        self._state = threading.Condition()
        self._at = 0
        self._early: dict[int, Any] = {}
        self._open = True
        with fs_errors("cannot create", url, name):
            with suppress(Exception):  # object stores have no directories, and some say so
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._file = fs.open(path, "wb")

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        with self._state, fs_errors("cannot write", self._url, self._name, offset):
            memory = self._memory_for(offset, view)
            if memory is not None:
                copy(memoryview(memory), view)
                self._early[offset] = memory
                return
            self._append(view)
            while (early := self._early.pop(self._at, None)) is not None:
                self._append(memoryview(early))
            self._state.notify_all()

    def _memory_for(self, offset: int, view: memoryview) -> Any:
        """Return memory for bytes that are early, when there is room; None once it is their turn."""
        at, since = self._at, time.monotonic()
        while True:
            self._check(offset, view)
            if offset <= self._at or not view:
                return None
            if self._at > at:
                at, since = self._at, time.monotonic()
            in_vain = time.monotonic() - since > _PATIENCE_S
            memory = self._room.take(len(view), must=in_vain and self._hope is not None)
            if memory is not None:
                return memory
            if in_vain:
                raise self._too_early(offset, view)
            self._state.wait(_LOOK_S)  # the room is looked at again in any case

    def _check(self, offset: int, view: memoryview) -> None:
        if self._hope is not None and self._hope.is_lost:
            raise self._error(CANCELLED, errno.ECANCELED)
        if not self._open or offset < 0 or offset + len(view) > self._nbytes:
            raise self._error(f"{len(view)} bytes at offset {offset} do not fit an open blob of {self._nbytes}")
        if view and (offset < self._at or offset in self._early):
            raise self._error(f"the bytes at offset {offset} were written already")

    def _too_early(self, offset: int, view: memoryview) -> StorageError:
        held = sum(map(len, self._early.values()))
        what = (
            f"no room for {len(view)} bytes at offset {offset}: it is written in order, nobody has written what comes"
            f" at {self._at} for {_PATIENCE_S:g} s, and {held} bytes wait for that; {self._room.nbytes} may wait in all"
        )
        return self._error(what, errno.ENOBUFS, hint="write its parts nearly in order of offset")

    def _append(self, view: memoryview) -> None:
        if view:
            self._file.write(view)
            self._at += len(view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(f"{self._url}/{self._name}", self._name, nbytes, self._nbytes)
        with self._state, fs_errors("cannot finish", self._url, self._name):
            if not self._open or end != self._at:
                raise self._error(f"cannot end after {end} bytes: it has {self._at} from its beginning on")
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

    def _error(self, what: str, number: int = errno.EINVAL, hint: str = "") -> StorageError:
        return StorageError(f"{self._url}/{self._name}: {what}", hint=hint, name=self._name, errno=number)


class FsspecReader:
    """A file that is read by ranges."""

    def __init__(self, fs: Any, path: str, url: str, name: str) -> None:
        self._fs, self._path, self._url, self._name = fs, path, url, name
        with fs_errors("cannot open", url, name, looks=True):
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


_SETTLE_S = 1.0
_EARLY_NBYTES = 128 << 20
"""What is kept of bytes that come early, where whoever writes them sets no other bound."""
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
"""What file systems call when something was written."""


class FsspecStore:
    """A directory, or what passes for one, of a file system of fsspec."""

    sequential = True
    """Files are written from their beginning on."""

    def __init__(self, fs: Any, path: str, url: str, *, settle_s: float = _SETTLE_S) -> None:
        """Point to a place; `url` is what the user wrote, `settle_s` how long after a put it is looked whose it is."""
        self.url = url
        self._fs = fs
        self._path = path.rstrip("/")
        self._settle_s = settle_s
        self._lock, warned, self._room = _shared(type(fs).__name__)
        self._swaps = ConditionalPuts(self, url, settle_s=settle_s, lock=self._lock, warned=warned)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def create(self, name: str, nbytes: int) -> FsspecWriter:
        path = self._at(name)
        with self._lock:
            with fs_errors("cannot create", self.url, name):
                if self._fs.exists(path):
                    raise name_taken(self.url, name)
            return FsspecWriter(self._fs, path, self.url, name, nbytes, room=self._room)

    def open(self, name: str) -> FsspecReader:
        return FsspecReader(self._fs, self._at(name), self.url, name)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        self._swaps.put(check_name(name), data, replace=replace, over=over)

    def get(self, name: str, *, limit: int) -> bytes:
        return self.read(check_name(name), limit)

    def version(self, name: str) -> Version | None:
        try:
            with fs_errors("cannot look at", self.url, name, looks=True):
                return Version(blake2b(self._fs.cat_file(self._at(name)), digest_size=16).hexdigest())
        except BlobNotFound:
            return None

    def list(self) -> Iterator[BlobInfo]:
        found = []
        for each in self._level():
            name = each["name"].rstrip("/").rpartition("/")[2]
            if each.get("type") == "file" and is_name(name):
                found.append(BlobInfo(name, int(each["size"]), _modified_s(each)))
        return iter(sorted(found, key=lambda blob: blob.name))

    def delete(self, name: str) -> None:
        with suppress(BlobNotFound), fs_errors("cannot delete", self.url, name):
            self._fs.rm_file(self._at(name))

    # -- what swapping needs -------------------------------------------------------------------------------------

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:  # noqa: ARG002
        """Put a blob whole, once."""
        with fs_errors("cannot put", self.url, name):
            with suppress(Exception):
                self._fs.makedirs(self._path, exist_ok=True)
            self._fs.pipe_file(self._at(name), bytes(data), **({"mode": "create"} if create else {}))

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole blob of at most so many bytes."""
        with fs_errors("cannot get", self.url, name, looks=True):
            nbytes = int(self._fs.info(self._at(name))["size"])
            if nbytes > limit:
                raise MalformedFile(f"{self.url}/{name}: {nbytes} bytes, expected at most {limit}", name=name)
            return bytes(self._fs.cat_file(self._at(name)))

    def keeps_conditions(self, over: Version | None) -> bool:
        """Tell whether its own puts can create only; none can replace a version only."""
        if over is not None:
            return False
        kind = type(self._fs)
        verb = getattr(kind, "_pipe_file", None) or kind.pipe_file
        # The one that all inherit looks first and puts then, as we do.
        return (
            not verb.__module__.startswith(("fsspec.spec", "fsspec.asyn"))
            and "mode" in inspect.signature(verb).parameters
        )

    # --

    def _at(self, name: str) -> str:
        return f"{self._path}/{check_name(name)}"

    def _level(self) -> Sequence[dict[str, Any]]:
        with fs_errors("cannot list", self.url):
            self._fs.invalidate_cache(self._path)
            try:
                level = self._fs.ls(self._path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # A file is listed as being in itself.
        itself = self._fs._strip_protocol(self._path)
        return [info for info in level if self._fs._strip_protocol(info["name"]) != itself or info["type"] != "file"]


def _modified_s(info: dict[str, Any]) -> float:
    """Say when a file was written. Where that is not known it is now: what seems old may be taken for abandoned."""
    when = next((info[key] for key in _TIMES if info.get(key) is not None), None)
    if isinstance(when, str):
        with suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, (int, float)) else time.time()


@functools.cache
def _shared(kind: str) -> tuple[threading.Lock, set[str], MemoryBudget]:
    """Return what all places of one kind of file system share: a lock, what users were told of, room for early bytes."""
    del kind
    return threading.Lock(), set(), MemoryBudget(_EARLY_NBYTES)


# A root that fsspec opens.


class FsspecRoot(FsspecStore):
    """A directory of directories, of a file system of fsspec."""

    def places(self) -> Iterator[str]:
        found = [
            each["name"].rstrip("/").rpartition("/")[2] for each in self._level() if each.get("type") == "directory"
        ]
        return iter([name for name in found if is_name(name)])

    def place(self, name: str) -> FsspecStore:
        return FsspecStore(self._fs, self._at(name), f"{self.url}/{name}", settle_s=self._settle_s)

    def remove(self, name: str) -> None:
        delete_contents(self.place(name))
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self._fs.exists(self._at(name)):
                self._fs.rm(self._at(name), recursive=True)

    def drop_empty(self, name: str) -> None:
        path = self._at(name)
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self._fs.isdir(path) and not self._fs.ls(path):
                self._fs.rmdir(path)
