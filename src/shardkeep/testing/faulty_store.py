"""
A store that goes wrong on purpose, at one chosen operation.

Wrap any store, name a fault and the number of the operation it strikes; the rest passes through untouched. Run the
same code with `at` = 0, 1, 2, … and every point where a disk can fail has been tried.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, Literal

from shardkeep.errors import StorageError, StorageFull
from shardkeep.storage.base import (
    BlobInfo,
    BlobReader,
    BlobWriter,
    Store,
    Version,
    is_sequential,
    preferred_requests,
)
from shardkeep.storage.buffers import flat

Fault = Literal["error", "full", "short", "slow", "crash", "truncate", "flip"]
"""
error: fails with EIO. full: fails with ENOSPC. short: moves half of the data, then fails with EIO.
slow: sleeps `delay_s`, then works. crash: raises `InjectedCrash`, now and in every later operation.
truncate: drops the second half of what is written, and says all is well. flip: flips one bit, written or read.
"""
VERBS = ("create", "write_at", "finish", "open", "read_into", "put", "get", "list", "delete", "version")


class InjectedCrash(BaseException):
    """The process has died here, as far as the store can tell. Not an Exception: nothing may handle it and go on."""


class FaultyStore:
    """
    Pass everything on to `inner`, but strike at operation `at` (from 0) of those in `verbs`.

    `operations` lists what was asked for, as "verb name", in order. `abandon` is not counted: it cannot fail, but
    after a crash it does nothing, like a process that is no longer there to clean up.
    """

    def __init__(
        self,
        inner: Store,
        fault: Fault = "error",
        *,
        at: int | None = None,
        verbs: Collection[str] = VERBS,
        delay_s: float = 0.0,
        lasting: bool = False,
    ) -> None:
        """`lasting`: every later operation of that verb on that blob is struck too, as what is read again is."""
        self.inner = inner
        self.url = inner.url
        self.operations: list[str] = []
        self.crashed = False
        self._fault: Fault = fault
        self._at = at
        self._verbs = frozenset(verbs)
        self._delay_s = delay_s
        self._lasting = lasting
        self._struck: str | None = None
        self._seen = 0
        self._lock = threading.Lock()

    def begin(self, verb: str, name: str) -> Fault | None:
        """Count one operation, and fail if it is its turn; a fault in the data is left to the caller."""
        with self._lock:
            if self.crashed:
                raise InjectedCrash(f"{verb} {name}: after the crash")
            what = f"{verb} {name}".rstrip()
            self.operations.append(what)
            turn = what == self._struck or (verb in self._verbs and self._seen == self._at)
            self._seen += verb in self._verbs
            if turn and self._lasting:
                self._struck = what
            self.crashed = turn and self._fault == "crash"
        if not turn:
            return None
        if self._fault == "crash":
            raise InjectedCrash(f"{verb} {name}")
        if self._fault == "full":
            raise StorageFull(f"{self.url}/{name}: injected: No space left on device", name=name, errno=errno.ENOSPC)
        # Half of a step that is atomic, or moves no data, is nothing.
        if self._fault == "error" or (self._fault == "short" and verb not in {"write_at", "read_into"}):
            raise self.broken(verb, name)
        if self._fault == "slow":
            time.sleep(self._delay_s)
        return self._fault

    def broken(self, verb: str, name: str) -> StorageError:
        return StorageError(f"{self.url}/{name}: injected: {verb}: Input/output error", name=name, errno=errno.EIO)

    def create(self, name: str, nbytes: int) -> BlobWriter:
        self.begin("create", name)
        return _FaultyWriter(self, self.inner.create(name, nbytes), name)

    def open(self, name: str) -> BlobReader:
        self.begin("open", name)
        return _FaultyReader(self, self.inner.open(name), name)

    @property
    def sequential(self) -> bool:
        """Say what the inner store says."""
        return is_sequential(self.inner)

    @property
    def requests(self) -> int:
        """Say what the inner store says; 0 where it does not mind."""
        return preferred_requests(self.inner, 0)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        fault = self.begin("put", name)
        how: dict[str, Any] = {"replace": replace} if over is None else {"replace": replace, "over": over}
        self.inner.put(name, bytes(_damaged(memoryview(data), fault)), **how)

    def get(self, name: str, *, limit: int) -> bytes:
        fault = self.begin("get", name)
        data = self.inner.get(name, limit=limit)
        return bytes(_damaged(memoryview(data), "flip")) if fault == "flip" else data

    def version(self, name: str) -> Version | None:
        self.begin("version", name)
        return self.inner.version(name)

    def list(self) -> Iterator[BlobInfo]:
        self.begin("list", "")
        return self.inner.list()

    def delete(self, name: str) -> None:
        self.begin("delete", name)
        self.inner.delete(name)


def _damaged(data: memoryview, fault: Fault | None) -> memoryview:
    """What a lying disk keeps of the data."""
    if fault in {"short", "truncate"}:
        return data[: len(data) // 2]
    if fault == "flip" and data:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        return memoryview(flipped)
    return data


class _FaultyWriter:
    def __init__(self, store: FaultyStore, inner: BlobWriter, name: str) -> None:
        self._store = store
        self._inner = inner
        self._name = name

    def write_at(self, offset: int, data: memoryview) -> None:
        fault = self._store.begin("write_at", self._name)
        self._inner.write_at(offset, _damaged(flat(data), fault))
        if fault == "short":
            raise self._store.broken("write_at", self._name)

    def finish(self, nbytes: int | None = None) -> None:
        self._store.begin("finish", self._name)
        self._inner.finish(nbytes)

    def abandon(self) -> None:
        if not self._store.crashed:
            self._inner.abandon()


class _FaultyReader:
    def __init__(self, store: FaultyStore, inner: BlobReader, name: str) -> None:
        self._store = store
        self._inner = inner
        self._name = name

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        return self._inner.cached(offset, nbytes)

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        fault = self._store.begin("read_into", self._name)
        view = flat(into)
        if fault == "short":
            self._inner.read_into(offset, view[: len(view) // 2])
            raise self._store.broken("read_into", self._name)
        self._inner.read_into(offset, view, cached=cached)
        if fault == "flip" and view:
            view[len(view) // 2] ^= 0x10

    def close(self) -> None:
        self._inner.close()
