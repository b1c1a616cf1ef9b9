"""
Any place that fsspec opens, as a store: as atomic and as durable as that file system is, and no more.

Parts of a blob are written in order; what comes early is kept in memory, up to a bound, and then waits. Of several
writers of one blob one wins by looking again, unless the file system has puts that create only.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from shardkeep.errors import BlobNotFound, MalformedFile
from shardkeep.store.fsspec_files import FsspecReader, FsspecWriter, fs_errors
from shardkeep.store.object_parts import Room
from shardkeep.store.protocol import BlobInfo, Version, check_name, is_name
from shardkeep.store.swaps import Swaps, taken

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
        self._swaps = Swaps(self, url, settle_s=settle_s, lock=self._lock, warned=warned)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def create(self, name: str, nbytes: int) -> FsspecWriter:
        path = self._at(name)
        with self._lock:
            with fs_errors("cannot create", self.url, name):
                if self._fs.exists(path):
                    raise taken(self.url, name)
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
def _shared(kind: str) -> tuple[threading.Lock, set[str], Room]:
    """Return what all places of one kind of file system share: a lock, what users were told of, room for early bytes."""
    del kind
    return threading.Lock(), set(), Room(_EARLY_NBYTES)
