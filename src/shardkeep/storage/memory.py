"""Blobs in this process's memory: nothing is durable, and no other process sees it; every other promise holds."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterator

from shardkeep.errors import BlobNotFound
from shardkeep.storage import base
from shardkeep.storage.buffers import copy, flat


class _MemoryBlob:
    """The bytes of one blob, writable until it is finished; an open blob outlives its deletion."""

    def __init__(self, store: MemoryStore, name: str, nbytes: int) -> None:
        self._store = store
        self._name = name
        self._where = f"{store.url}/{name}"
        self.data = bytearray(nbytes)
        self.modified_s = time.time()
        self.version = base.Version(str(next(store.versions)))
        self._open = True

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def write_at(self, offset: int, data: memoryview) -> None:
        view = flat(data)
        base.check_fits(self._where, self._name, offset, len(view), self.nbytes, is_open=self._open)
        copy(memoryview(self.data)[offset : offset + len(view)], view)

    def finish(self, nbytes: int | None = None) -> None:
        end = base.checked_end(self._where, self._name, nbytes, self.nbytes)
        if end < self.nbytes:
            self.data = self.data[:end]
        self._open = False

    def abandon(self) -> None:
        if self._open:
            self._open = False
            self._store.delete(self._name)

    def cached(self, offset: int, nbytes: int) -> bool:
        return 0 <= offset <= len(self.data) - nbytes

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:  # noqa: ARG002 - all is cached
        view = flat(into)
        base.check_within(self._where, self._name, offset, len(view), self.nbytes)
        copy(view, memoryview(self.data)[offset : offset + len(view)])

    def close(self) -> None:
        """Nothing to release."""


class MemoryStore:
    """A store that lives as long as this object, with all places below it."""

    def __init__(self, url: str = "") -> None:
        """Make an empty store; `url` is its name in messages."""
        self.url = url or f"memory://{id(self):x}"
        self._lock = threading.Lock()
        self._blobs: dict[str, _MemoryBlob] = {}
        self.versions = itertools.count(1)
        self._places: dict[str, MemoryStore] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def same_place(self, other: object) -> bool:
        """Only the same object is the same place: two stores may have the same URL."""
        return other is self

    def _add(self, blob: _MemoryBlob, name: str, *, replace: bool = False, over: base.Version | None = None) -> None:
        with self._lock:
            there = self._blobs.get(name)
            if (over is not None or not replace) and over != (there and there.version):
                raise base.conflict(f"{self.url}/{name}", name, over)
            self._blobs[name] = blob

    def create(self, name: str, nbytes: int) -> _MemoryBlob:
        blob = _MemoryBlob(self, base.check_name(name), nbytes)
        self._add(blob, name)
        return blob

    def open(self, name: str) -> _MemoryBlob:
        with self._lock:
            blob = self._blobs.get(base.check_name(name))
        if blob is None:
            message = f"{self.url}/{name}: cannot open: No such file or directory (errno ENOENT)"
            raise BlobNotFound(message, name=name, errno=errno.ENOENT)
        return blob

    def put(self, name: str, data: bytes, *, replace: bool = False, over: base.Version | None = None) -> None:
        blob = _MemoryBlob(self, base.check_name(name), len(data))
        blob.write_at(0, memoryview(data))
        blob.finish()
        self._add(blob, name, replace=replace, over=over)

    def get(self, name: str, *, limit: int) -> bytes:
        blob = self.open(name)
        base.check_limit(f"{self.url}/{name}", name, blob.nbytes, limit)
        return bytes(blob.data)

    def version(self, name: str) -> base.Version | None:
        with self._lock:
            blob = self._blobs.get(base.check_name(name))
        return None if blob is None else blob.version

    def list(self) -> Iterator[base.BlobInfo]:
        with self._lock:
            found = [base.BlobInfo(name, blob.nbytes, blob.modified_s) for name, blob in self._blobs.items()]
        return iter(sorted(found, key=lambda blob: blob.name))

    def delete(self, name: str) -> None:
        with self._lock:
            self._blobs.pop(base.check_name(name), None)

    def places(self) -> Iterator[str]:
        with self._lock:
            places = list(self._places.items())
        return iter([name for name, store in places if any(store.list()) or any(store.places())])

    def place(self, name: str) -> MemoryStore:
        with self._lock:
            return self._places.setdefault(base.check_place(name), MemoryStore(f"{self.url}/{name}"))

    def remove(self, name: str) -> None:
        place = self.place(name)
        base.delete_contents(place)
        for below in list(place.places()):
            place.remove(below)

    def drop_empty(self, name: str) -> None:
        """Do nothing: a place without blobs does not exist."""
        base.check_place(name)
