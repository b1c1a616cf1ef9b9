"""Helpers for tests of Checkpointers."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.errors import StorageError, StorageFull
from shardkeep.manage.schedule import Clock
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import Fault, FaultyStore

QUICK = Clock(sleep=lambda _: None, interval_s=0.0)
"""Never sleeps, and exchanges decisions at every step."""
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=16 << 20, timeout_s=20.0)


def state_at(step: int, world: World | None = None) -> dict[str, Any]:
    """Make a state whose numbers depend on the step."""
    return {"w": torch.arange(64.0) + 1000 * step, "step": step}


def empty_state() -> dict[str, Any]:
    return {"w": torch.zeros(64), "step": 0}


def checkpointer(root: Any, *, clock: Clock = QUICK, **more: Any) -> sk.Checkpointer:
    class Timed(sk.Checkpointer):
        _clock = clock

    return Timed(root, **{"options": OPTIONS, **more})


def train(ckpt: sk.Checkpointer, steps: range, **more: Any) -> list[int]:
    """Run steps, and return those that were saved."""
    return [step for step in steps if ckpt.step(step, state_at(step), **more) is not None]


def damage(place: Path) -> None:
    """Flip a bit in the data of a checkpoint."""
    [file] = place.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def tear(place: Path) -> None:
    """Delete the commit record, as if the writer had died before the commit."""
    os.unlink(place / "shardkeep.json")


def until(what: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.01)


class Overriding:
    """A store or root that passes everything on, except for the given verbs."""

    def __init__(self, inner: Any, **verbs: Any) -> None:
        self._inner, self._verbs, self.url = inner, verbs, inner.url

    def __getattr__(self, verb: str) -> Any:
        return self._verbs[verb] if verb in self._verbs else getattr(self._inner, verb)


class Hooked:
    """Calls a function before each operation on a store or root, with where, the verb and what it was given."""

    def __init__(self, inner: Any, before: Callable[..., object]) -> None:
        self._inner, self._before, self.url = inner, before, inner.url

    def __getattr__(self, verb: str) -> Any:
        work = getattr(self._inner, verb)
        if not callable(work):
            return work

        def call(*args: Any, **more: Any) -> Any:
            self._before(self.url.rsplit("/", 1)[-1], verb, *args)
            done = work(*args, **more)
            return Hooked(done, self._before) if verb == "place" else done

        return call


class FarRoot:
    """A root, in memory by default, whose places call a function before each operation, with the verb and the name."""

    def __init__(self, before: Callable[[str, str], object] | None = None, inner: Any = None) -> None:
        self.inner = inner or MemoryStore()
        self.url = self.inner.url
        self.before = before
        self.seen: list[str] = []
        """The operations on its places, and what changed it: "verb name"."""

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb)

    def put(self, name: str, data: bytes, **how: Any) -> None:
        self.seen.append(f"put {name}")
        self.inner.put(name, data, **how)

    def remove(self, name: str) -> None:
        self.seen.append(f"remove {name}")
        self.inner.remove(name)

    def place(self, name: str) -> Any:
        return _Place(self, self.inner.place(name))

    def count(self, verb: str, start: str = "") -> int:
        """Count operations on blobs whose names start with `start`."""
        return sum(each.startswith(f"{verb} {start}") for each in self.seen)

    def names(self, place: str) -> list[str]:
        """Return the names of the blobs of a place."""
        return [info.name for info in self.inner.place(place).list()]


class _Place(FaultyStore):
    def __init__(self, root: FarRoot, inner: Any) -> None:
        super().__init__(inner)
        self._root = root

    def begin(self, verb: str, name: str) -> Fault | None:
        self._root.seen.append(f"{verb} {name}")
        if self._root.before is not None:
            self._root.before(verb, name)
        return super().begin(verb, name)


class Broken:
    """Fails a verb on names that start with `start`."""

    def __init__(self, verb: str = "", start: str = "", code: int = errno.EACCES, times: float = math.inf) -> None:
        self.verb, self.start, self.code, self.times = verb, start, code, times

    def __call__(self, verb: str, name: str) -> None:
        if verb == self.verb and name.startswith(self.start) and self.times > 0:
            self.times -= 1
            kind = StorageFull if self.code == errno.ENOSPC else StorageError
            raise kind(f"injected: {verb} {name}", errno=self.code, name=name)


def far_root(before: Callable[[str, str], object] | None = None, inner: Any = None) -> Any:
    """Make a FarRoot, typed as any root."""
    return FarRoot(before, inner)
