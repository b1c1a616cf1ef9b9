"""Helpers for tests of Checkpointers."""

import errno
import math
import os
import time

import torch

import shardkeep as sk
from shardkeep.errors import StorageError, StorageFull
from shardkeep.manage.schedule import Clock
from shardkeep.storage.memory import MemoryStore
from tests.support.stores import BeforeStore

QUICK = Clock(sleep=lambda _: None, interval_s=0.0)
"""Never sleeps, and exchanges decisions at every step."""
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=16 << 20, timeout_s=20.0)


def state_at(step, world=None):
    return {"w": torch.arange(64.0) + 1000 * step, "step": step}


def empty_state():
    return {"w": torch.zeros(64), "step": 0}


def checkpointer(root, *, clock=QUICK, **more):
    class Timed(sk.Checkpointer):
        _clock = clock

    return Timed(root, **{"options": OPTIONS, **more})


def train(ckpt, steps, **more):
    return [step for step in steps if ckpt.step(step, state_at(step), **more) is not None]


def damage(place):
    [file] = place.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def tear(place):
    """Delete the commit record, as if the writer had died before the commit."""
    os.unlink(place / "shardkeep.json")


def until(what, seconds=30.0):
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.01)


class Overriding:
    """A store or root that passes everything on, except for the given verbs."""

    def __init__(self, inner, **verbs):
        self._inner, self._verbs, self.url = inner, verbs, inner.url

    def __getattr__(self, verb):
        return self._verbs[verb] if verb in self._verbs else getattr(self._inner, verb)


class Hooked:
    """Calls a function before each operation on a store or root, with where, the verb and what it was given."""

    def __init__(self, inner, before):
        self._inner, self._before, self.url = inner, before, inner.url

    def __getattr__(self, verb):
        work = getattr(self._inner, verb)
        if not callable(work):
            return work

        def call(*args, **more):
            self._before(self.url.rsplit("/", 1)[-1], verb, *args)
            done = work(*args, **more)
            return Hooked(done, self._before) if verb == "place" else done

        return call


class FarRoot:
    """A root, in memory by default, whose places call a function before each operation, with the verb and the name."""

    def __init__(self, before=None, inner=None):
        self.inner = inner or MemoryStore()
        self.url = self.inner.url
        self.before = before
        self.seen = []
        """The operations on its places, and what changed it: "verb name"."""

    def __getattr__(self, verb):
        return getattr(self.inner, verb)

    def put(self, name, data, **how):
        self.seen.append(f"put {name}")
        self.inner.put(name, data, **how)

    def remove(self, name):
        self.seen.append(f"remove {name}")
        self.inner.remove(name)

    def place(self, name):
        return BeforeStore(self.inner.place(name), self._begins)

    def _begins(self, verb, name):
        self.seen.append(f"{verb} {name}")
        if self.before is not None:
            self.before(verb, name)

    def count(self, verb, start=""):
        return sum(each.startswith(f"{verb} {start}") for each in self.seen)

    def names(self, place):
        return [info.name for info in self.inner.place(place).list()]


class Broken:
    """Fails a verb on names that start with `start`."""

    def __init__(self, verb="", start="", code=errno.EACCES, times=math.inf):
        self.verb, self.start, self.code, self.times = verb, start, code, times

    def __call__(self, verb, name):
        if verb == self.verb and name.startswith(self.start) and self.times > 0:
            self.times -= 1
            kind = StorageFull if self.code == errno.ENOSPC else StorageError
            raise kind(f"injected: {verb} {name}", errno=self.code, name=name)
