"""
What every test here plays with: numbered states for one or three ranks, the one on disk, and what must not be left.

State `k` is random bits seeded by `k`, so that no two states share a byte by chance and `step` says which one it is.
"""

import contextlib
import functools
import json
import os
import subprocess
import threading
import time

import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.storage.base import Store
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.engine.samples import bits

Where = str | Store
FAULTS = ("error", "full", "short")
"""Ways in which an operation fails and says so."""
RANKS_AND_FAULTS = [(1, FAULTS[:1]), (1, FAULTS[1:2]), (1, FAULTS[2:]), (3, FAULTS)]
"""On one rank each of them at every operation; on three, where that takes long, they take turns."""
OPTIONS = sk.Options(io_threads=2, host_budget_bytes=4 << 20)
"""Two threads and windows of 1 MiB: the least there is, so that a small state has several."""
IN_ORDER = sk.Options(io_threads=1, host_budget_bytes=2 << 20)
"""For one rank: the same operations in the same order every time, so that counting through them misses none."""
ROWS = 1152
"""Of `model.w`, 1.1 MB: two windows in one file."""


@functools.lru_cache(maxsize=4)
def whole(k):
    gen = torch.Generator().manual_seed(k)
    return {
        "w": torch.randn(ROWS, 256, generator=gen),
        "b": torch.randn(4099, generator=gen),
        "m": torch.randn(150, 100, generator=gen).t(),
    }


def state_of(k, world=None):
    """State `k`, or this rank's part of it: rows of one tensor, all of two others, a value of its own."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    tensors = whole(k)
    share = ROWS // size
    mine = tensors["w"][rank * share : (rank + 1) * share]
    return {
        "model": {"w": sk.ShardedBox(mine, offsets=(rank * share, 0), shape=(ROWS, 256)), "b": tensors["b"]},
        "optim": {"m": tensors["m"], "lr": 0.5 + k},
        "step": k,
        "rng": sk.PerRank([k, rank]),
    }


def blank_of(world=None):
    """Somewhere to load this rank's part into; holds nothing of any state."""
    state = state_of(-1, world)
    [(mine, offsets)] = state["model"]["w"].pieces
    state["model"]["w"] = sk.ShardedBox(torch.full_like(mine, 7.0), offsets=offsets, shape=(ROWS, 256))
    state["model"]["b"] = torch.full_like(state["model"]["b"], 7.0)
    state["optim"] = {"m": torch.full((100, 150), 7.0), "lr": None}
    return state


def facts(state):
    [(mine, offsets)] = state["model"]["w"].pieces
    return bits({**state, "model": {"w": mine, "at": offsets, "b": state["model"]["b"]}})


def save_all(ranks, where, k, *, timeout_s=20.0):
    """Save state `k` on some ranks, to one place or to each rank's own; return what each returned or raised."""

    def main(world):
        mine = where[world.rank] if isinstance(where, list) else where
        return sk.save(
            state_of(k, world), mine, step=k, overwrite=True, group=world, options=IN_ORDER if ranks == 1 else OPTIONS
        )

    return thread_outcomes(ranks, main, timeout_s=timeout_s)


def load_all(ranks, where, *, timeout_s=20.0):
    """Load on some ranks; return what each returned or raised, and what is now in their states."""
    states = {}

    def main(world):
        states[world.rank] = blank_of(world)
        mine = where[world.rank] if isinstance(where, list) else where
        return sk.load(states[world.rank], mine, group=world, options=IN_ORDER if ranks == 1 else OPTIONS)

    outcomes = thread_outcomes(ranks, main, timeout_s=timeout_s)
    return outcomes, [states[rank] for rank in range(ranks)]


def assert_saved(outcomes, why=""):
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == [], why


def checkpoint_at(place):
    """Verify and load the checkpoint in a directory; say which state it is, to the last bit."""
    ck = sk.open(place, options=IN_ORDER)
    ck.verify()
    tensors = whole(ck.step)
    found = {
        "model": {"w": torch.full((ROWS, 256), 7.0), "b": torch.full((4099,), 7.0)},
        "optim": {"m": torch.full((100, 150), 7.0), "lr": None},
        "step": None,
    }
    sk.load(found, place, exclude="rng.*", group=World(0, 1), options=IN_ORDER)
    wanted = {
        "model": {"w": tensors["w"], "b": tensors["b"]},
        "optim": {"m": tensors["m"], "lr": 0.5 + ck.step},
        "step": ck.step,
    }
    assert bits(found) == bits(wanted)
    ranks = range(ck.record.world_size)
    assert [ck[f"rng.@{rank}"] for rank in ranks] == [[ck.step, rank] for rank in ranks]
    return ck.step


def files_of_checkpoint(place):
    """The names a directory must have for its checkpoint, and no others unless something was left behind."""
    record = native.read_record(LocalStore(place))
    return {RECORD_NAME, record.index.name, *(file.name for file in record.files)}


def names_in(place):
    return set(os.listdir(place))


def bury_claims(place):
    """Make the claims in a directory those of a process that is no more; return how many there were."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    claims = [name for name in os.listdir(place) if name.startswith("claim-")]
    for name in claims:
        path = os.path.join(place, name)
        with open(path, encoding="utf-8") as file:
            claim = json.load(file)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**claim, "pid": ended.pid}, file)
    return len(claims)


@contextlib.contextmanager
def no_leaks(*, crashing=False):
    """Whatever happens inside, our threads end and every file descriptor is closed; a process that dies closes none."""
    before, threads = _open_fds(), _our_threads()
    yield
    deadline = time.monotonic() + 5
    # A thread that has handed over its result may need a moment to end.
    while (_our_threads() - threads or _open_fds() > before) and time.monotonic() < deadline and not crashing:
        time.sleep(0.001)
    assert not _our_threads() - threads
    assert crashing or _open_fds() <= before


def _open_fds():
    return len(os.listdir("/proc/self/fd"))


def _our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardkeep")}


class DyingStore(FaultyStore):
    """From operation `since` on, every operation fails with EIO: the disk is gone, the process lives."""

    def __init__(self, inner, *, since):
        super().__init__(inner)
        self._since = since

    def begin(self, verb, name):
        super().begin(verb, name)
        if len(self.operations) > self._since:
            raise self.broken(verb, name)


class InterruptedStore(FaultyStore):
    def __init__(self, inner, *, when):
        super().__init__(inner)
        self._when = when

    def begin(self, verb, name):
        super().begin(verb, name)
        if len(self.operations) == self._when + 1:
            raise KeyboardInterrupt
