"""
Blobs in this process's memory, for tests and for handing a checkpoint on without a disk.

Only the process that made a store sees it, and nothing is durable; every other promise of the protocol holds.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError, WrongSize
from shardkeep.storage.base import BlobInfo, Version, check_name, checked_end, delete_contents, version_conflict
from shardkeep.storage.buffers import copy, flat


class _MemoryBlob:
    """One blob's bytes, open for writing until finished; an open blob outlives its deletion."""

    def __init__(self, store: MemoryStore, name: str, nbytes: int) -> None:
        self._store = store
        self._name = name
        self.data = bytearray(nbytes)
        self.modified_s = time.time()
        self.version = store.next_version()
        self._open = True

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        if not self._open or offset < 0 or offset + len(view) > self.nbytes:
            message = f"{self._store.url}/{self._name}: {len(view)} bytes at offset {offset} do not fit an open blob"
            raise StorageError(f"{message} of {self.nbytes}", name=self._name, offset=offset, errno=errno.EINVAL)
        copy(memoryview(self.data)[offset : offset + len(view)], view)

    def finish(self, nbytes: int | None = None) -> None:
        end = checked_end(f"{self._store.url}/{self._name}", self._name, nbytes, self.nbytes)
        if end < self.nbytes:
            self.data = self.data[:end]
        self._open = False

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._store.delete(self._name)

    def cached(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset <= len(self.data) - nbytes

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - all is at hand
        view = flat(into)
        found = memoryview(self.data)[max(offset, 0) : max(offset, 0) + len(view)]
        if offset < 0 or len(found) != len(view):
            message = f"{self._store.url}/{self._name}: wanted {len(view)} bytes at offset {offset}, got {len(found)}"
            raise WrongSize(message, name=self._name, offset=offset, wanted=len(view), got=len(found))
        copy(view, found)

    def close(self) -> None:
        """Nothing to release: the bytes belong to whoever still holds them."""


class MemoryStore:
    """A store that lives as long as this object."""

    def __init__(self, url: str = "") -> None:
        """Make an empty store; `url` is what it is called in messages."""
        self.url = url or f"memory://{id(self):x}"
        self._lock = threading.Lock()
        self._blobs: dict[str, _MemoryBlob] = {}
        self._versions = itertools.count(1)

    def next_version(self) -> Version:
        """Name the version of a blob that is made now; no two are called the same."""
        return Version(str(next(self._versions)))

    def _add(self, blob: _MemoryBlob, name: str, *, replace: bool = False, over: Version | None = None) -> None:
        with self._lock:
            there = self._blobs.get(name)
            if over is not None and (there is None or there.version != over):
                raise version_conflict(f"{self.url}/{name}", name)
            if there is not None and over is None and not replace:
                message = f"{self.url}/{name}: cannot create: File exists (errno EEXIST)"
                raise StorageError(message, name=name, errno=errno.EEXIST)
            self._blobs[name] = blob

    def create(self, name: str, nbytes: int) -> _MemoryBlob:
        blob = _MemoryBlob(self, check_name(name), nbytes)
        self._add(blob, name)
        return blob

    def open(self, name: str) -> _MemoryBlob:
        with self._lock:
            blob = self._blobs.get(check_name(name))
        if blob is None:
            message = f"{self.url}/{name}: cannot open: No such file or directory (errno ENOENT)"
            raise BlobNotFound(message, name=name, errno=errno.ENOENT)
        return blob

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        blob = _MemoryBlob(self, check_name(name), len(data))
        blob.write_at(0, memoryview(data))
        blob.finish()
        self._add(blob, name, replace=replace, over=over)

    def get(self, name: str, *, limit: int) -> bytes:
        blob = self.open(name)
        if blob.nbytes > limit:
            raise MalformedFile(f"{self.url}/{name}: {blob.nbytes} bytes, expected at most {limit}", name=name)
        return bytes(blob.data)

    def version(self, name: str) -> Version | None:
        with self._lock:
            blob = self._blobs.get(check_name(name))
        return None if blob is None else blob.version

    def list(self) -> Iterator[BlobInfo]:
        with self._lock:
            found = [BlobInfo(name, blob.nbytes, blob.modified_s) for name, blob in self._blobs.items()]
        return iter(sorted(found, key=lambda blob: blob.name))

    def delete(self, name: str) -> None:
        with self._lock:
            self._blobs.pop(check_name(name), None)


class MemoryRoot(MemoryStore):
    """A root that lives as long as this object, with all of its places."""

    def __init__(self, url: str = "") -> None:
        """Make an empty root; `url` is what it is called in messages."""
        super().__init__(url)
        self._places: dict[str, MemoryRoot] = {}

    def places(self) -> Iterator[str]:
        with self._lock:
            places = list(self._places.items())
        return iter([name for name, store in places if store.holds_any()])

    def holds_any(self) -> bool:
        """Tell whether there is a blob here or further below."""
        return next(self.list(), None) is not None or next(self.places(), None) is not None

    def place(self, name: str) -> MemoryRoot:
        with self._lock:
            return self._places.setdefault(check_name(name), MemoryRoot(f"{self.url}/{name}"))

    def remove(self, name: str) -> None:
        place = self.place(name)
        delete_contents(place)
        for below in list(place.places()):
            place.remove(below)

    def drop_empty(self, name: str) -> None:
        check_name(name)  # that is all: a place without blobs is none
