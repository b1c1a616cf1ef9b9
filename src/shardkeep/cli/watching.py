"""A place whose reads are counted, so that whoever waits for them sees how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from shardkeep.options import Options
from shardkeep.store.local import LocalStore
from shardkeep.store.place import open_store
from shardkeep.store.protocol import BlobReader, Store

OnRead = Callable[[int], None]


def watched(where: str, on_read: OnRead) -> Store:
    """Open the store of a place, with its reads told to somebody."""
    direct = Options().direct_io
    store = open_store(where, direct=direct)
    if type(store) is LocalStore:  # looked at by its type where files of other programs are to be read
        return _WatchedDirectory(store.url, on_read, direct=direct)
    return cast("Store", _WatchedStore(store, on_read))


class _WatchedStore:
    def __init__(self, inner: Store, on_read: OnRead) -> None:
        self._inner = inner
        self._on_read = on_read

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def open(self, name: str) -> BlobReader:
        return _WatchedReader(self._inner.open(name), self._on_read)


class _WatchedDirectory(LocalStore):
    def __init__(self, path: str, on_read: OnRead, *, direct: bool, foreign: bool = False) -> None:
        super().__init__(path, direct=direct, foreign=foreign)
        self._on_read = on_read

    def of_foreign_files(self) -> LocalStore:
        return _WatchedDirectory(self.url, self._on_read, direct=self._direct, foreign=True)

    def open(self, name: str) -> BlobReader:  # type: ignore[override]  # a reader all the same
        return _WatchedReader(super().open(name), self._on_read)


class _WatchedReader:
    def __init__(self, reader: BlobReader, on_read: OnRead) -> None:
        self._reader = reader
        self._on_read = on_read

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        return self._reader.cached(offset, nbytes)

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        self._reader.read_into(offset, into, cached=cached)
        self._on_read(into.nbytes)

    def close(self) -> None:
        self._reader.close()
