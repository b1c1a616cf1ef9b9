"""A root whose disk fails now and then, or whose process dies in the middle of an operation; and clocks that jump."""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from shardkeep.errors import StorageError, StorageFull
from shardkeep.layouts import native, orphans
from shardkeep.storage.base import BlobInfo, Store
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import Fault, FaultyStore

_BURST = 8
"""Operations that fail one after the other: more than are tried again."""


class Luck:
    """Decides, by a seed, what becomes of each operation. Used by several threads."""

    def __init__(self, seed: str, *, rate: float, dies_at: int | None, on_fault: Callable[[str], None]) -> None:
        """Let a rate of operations fail, and kill this process in operation number `dies_at`."""
        self._random = random.Random(seed)
        self._rate = rate
        self._dies_at = dies_at
        self._on_fault = on_fault
        self._count = 0
        self._burst = 0
        self._lock = threading.Lock()

    def rest(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            self._rate, self._burst, self._dies_at = 0.0, 0, None

    def strike(self, verb: str) -> str:
        """Count an operation, and say what goes wrong with it: nothing, "error", "full", "short" or "late"."""
        with self._lock:
            if self._count == self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self._count += 1
            if self._burst:
                self._burst -= 1
                kind = "error"
            elif self._random.random() < self._rate:
                kind = self._random.choice(["error", "error", "burst", "full", "short", "late"])
                if kind == "burst":
                    self._burst, kind = _BURST, "error"
            else:
                return ""
        self._on_fault(f"{kind} {verb}")
        return kind


class RoughStore(FaultyStore):
    """A place on a disk that fails by luck."""

    def __init__(self, inner: Store, luck: Luck) -> None:
        super().__init__(inner)
        self._luck = luck

    def begin(self, verb: str, name: str) -> Fault | None:
        """Fail by luck; a part of a write is left to the caller."""
        kind = self._luck.strike(verb)
        if kind == "short" and verb in ("write_at", "read_into"):
            return "short"
        if kind == "full":
            raise StorageFull(f"{self.url}/{name}: soak: no space left", name=name, errno=errno.ENOSPC)
        if kind in ("error", "short"):
            raise self.broken(verb, name)
        return None

    def put(self, name: str, data: bytes, **how: Any) -> None:
        """Put, and perhaps fail after it is done, so that the caller cannot know."""
        kind = self._luck.strike("put")
        if kind in ("error", "short"):
            raise self.broken("put", name)
        if kind != "full":
            self.inner.put(name, data, **how)
        if kind in ("full", "late"):
            late = " after it was done" if kind == "late" else ""
            raise StorageFull(f"{self.url}/{name}: soak: no space left{late}", name=name, errno=errno.ENOSPC)


class RoughRoot(LocalStore):
    """A root on such a disk."""

    def __init__(self, path: str, luck: Luck) -> None:
        super().__init__(path)
        self._luck = luck

    def place(self, name: str) -> Any:
        return RoughStore(super().place(name), self._luck)

    def put(self, name: str, data: bytes, **how: Any) -> None:
        self._strike("put", name)
        super().put(name, data, **how)

    def get(self, name: str, *, limit: int) -> bytes:
        self._strike("get", name)
        return super().get(name, limit=limit)

    def list(self) -> Iterator[BlobInfo]:
        self._strike("list", "")
        return super().list()

    def delete(self, name: str) -> None:
        self._strike("delete", name)
        super().delete(name)

    def remove(self, name: str) -> None:
        self._strike("remove", name)
        super().remove(name)

    def _strike(self, verb: str, name: str) -> None:
        if kind := self._luck.strike(f"root {verb}"):
            code = errno.ENOSPC if kind == "full" else errno.EIO
            raise StorageError(f"{self.url}/{name}: soak: {verb}: {os.strerror(code)}", name=name, errno=code)


class JumpyClock:
    """The time of day, which is wrong by up to a year, each time by something else. Monotonic time is as it is."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._off_s = 0.0

    def off_s(self) -> float:
        """Say by how much it is wrong now."""
        if self._random.random() < 0.25:
            self._off_s = self._random.choice([-1, 1]) * self._random.choice([0, 60, 3600, 30 * 3600, 400 * 24 * 3600])
        return self._off_s

    def time(self) -> float:
        return time.time() + self.off_s()

    def time_ns(self) -> int:
        return time.time_ns() + int(self.off_s() * 1e9)

    def now(self, zone: timezone | None = None) -> datetime:
        return datetime.now(zone or timezone.utc) + timedelta(seconds=self.off_s())

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextmanager
def wrong_clock(clock: JumpyClock | None) -> Iterator[None]:
    """Have everything that asks for the time of day about checkpoints ask a clock, inside."""
    if clock is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "time", clock)
        patch.setattr(native, "datetime", clock)
        patch.setattr(orphans, "time", clock)
        yield
