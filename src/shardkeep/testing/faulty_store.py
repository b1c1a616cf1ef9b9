"""
A store that fails on purpose, at one chosen operation.

Wrap any store, and choose a fault and the number of the operation that it strikes; all others pass through. Run the same
code with `at` = 0, 1, 2, … to test every point where storage can fail.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

from shardkeep.errors import StorageError, StorageFull
from shardkeep.storage.base import BlobReader, BlobWriter, Store, Version
from shardkeep.storage.buffers import flat
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper, WriterWrapper

T = TypeVar("T")
Fault = Literal["error", "full", "short", "slow", "crash", "truncate", "flip"]
"""
error: fails with EIO. full: fails with ENOSPC. short: moves half of the data, then fails with EIO.
slow: sleeps `delay_s`, then works. crash: raises `InjectedCrash`, now and in every later operation.
truncate: drops the second half of what is written, and reports success. flip: flips one bit, written or read.
"""
VERBS = ("create", "write_at", "finish", "open", "read_into", "put", "get", "list", "delete", "version")


class InjectedCrash(BaseException):
    """Simulates the death of the process. Not an Exception, so that nothing handles it and goes on."""


class FaultyStore(StoreWrapper):
    """
    Passes everything on to `inner`, and strikes at operation `at` (from 0) of those in `verbs`.

    `operations` lists all operations, as "verb name", in order. `abandon` is not counted: it cannot fail, but after a
    crash it does nothing, because a dead process cleans up nothing.
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
        """`lasting`: strike every later operation of that verb on that blob as well, so that a retry fails too."""
        super().__init__(inner)
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

    def wrap_reader(self, reader: BlobReader, name: str) -> BlobReader:
        return _FaultyReader(reader, self, name)

    def wrap_writer(self, writer: BlobWriter, name: str) -> BlobWriter:
        return _FaultyWriter(writer, self, name)

    def call(self, verb: str, name: str, work: Callable[[], T]) -> T:
        self.begin(verb, name)
        return work()

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        fault = self.begin("put", name)
        self.inner_put(name, bytes(_damaged(memoryview(data), fault)), replace=replace, over=over)

    def get(self, name: str, *, limit: int) -> bytes:
        fault = self.begin("get", name)
        data = self.inner.get(name, limit=limit)
        return bytes(_damaged(memoryview(data), "flip")) if fault == "flip" else data

    def delete_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.delete(name)

    def free_nbytes(self) -> None:
        """Not known, so that a full disk is only found by writing."""


def _damaged(data: memoryview, fault: Fault | None) -> memoryview:
    """What a lying disk keeps of the data."""
    if fault in {"short", "truncate"}:
        return data[: len(data) // 2]
    if fault == "flip" and data:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        return memoryview(flipped)
    return data


class _FaultyWriter(WriterWrapper):
    def write_at(self, offset: int, data: memoryview) -> None:
        fault = self.store.begin("write_at", self.name)
        super().write_at(offset, _damaged(flat(data), fault))
        if fault == "short":
            raise self.store.broken("write_at", self.name)

    def finish(self, nbytes: int | None = None) -> None:
        self.store.begin("finish", self.name)
        super().finish(nbytes)

    def abandon(self) -> None:
        if not self.store.crashed:
            super().abandon()


class _FaultyReader(ReaderWrapper):
    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        fault = self.store.begin("read_into", self.name)
        view = flat(into)
        if fault == "short":
            super().read_into(offset, view[: len(view) // 2])
            raise self.store.broken("read_into", self.name)
        super().read_into(offset, view, cached=cached)
        if fault == "flip" and view:
            view[len(view) // 2] ^= 0x10
