"""What runs in the processes that are killed, and what it leaves on disk."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import thread_outcomes
from tests.faults.calls import CHANGING, strike_at
from tests.support.stores import BeforeStore

ROWS = 240
TIMEOUT_S = 2.0
"""How long ranks wait for each other before they give up."""
OPTIONS = sk.Options(io_threads=1, host_budget_bytes=2 << 20, timeout_s=TIMEOUT_S)


def level_state(k, rank=0, size=1):
    """A state that says `k` in every element: half a megabyte, in two files a rank."""
    share = ROWS // size
    mine = torch.full((share, 512), float(k))
    return {
        "model": {"w": sk.ShardedBox(mine, offsets=(rank * share, 0), shape=(ROWS, 512)), "b": torch.full((999,), k)},
        "optim": {"m": torch.full((64, 64), float(k), dtype=torch.float64).t()},
        "step": k,
    }


def level_at(place):
    """Read and verify the whole checkpoint in a directory; say which `k` every element of it is."""
    ck = sk.open(place, options=OPTIONS)
    ck.verify()
    tree = ck.to_dict()
    k = tree["step"]
    assert ck.step == k
    assert tree["model"]["w"].shape == (ROWS, 512)
    for tensor in (tree["model"]["w"], tree["model"]["b"], tree["optim"]["m"]):
        assert tensor.eq(k).all(), f"step {k}, but {tensor.unique().tolist()}"
    return k


def save_level(place, k, world=None):
    """Save it, as the only process or as a rank of a world or of the default group."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    if world is None and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    sk.save(level_state(k, rank, size), place, step=k, overwrite=True, group=world, options=OPTIONS)


def save_levels(place, k, ranks):
    """Save it on ranks that are threads; return what each returned or raised."""
    return thread_outcomes(ranks, lambda world: save_level(place, k, world))


def save_and_die_at(pipe, place, ranks, k, n):
    """Save state `k`, and be killed in the place of the n-th call that changes anything."""

    def die(name, _):
        pipe.send(name)
        os.kill(os.getpid(), signal.SIGKILL)

    with strike_at(n, die, CHANGING):
        save_levels(place, k, ranks)


def save_for_ever(pipe, place, k):
    """Overwrite one checkpoint by the next; say each number once it is saved."""
    pipe.send("ready")
    while True:
        save_level(place, k)
        pipe.send(k)
        k += 1


def save_for_ever_as_rank(pipe, rank, size, port, place, k):
    """Do the same as one of several ranks; `port` 0 opens the store the ranks talk through, and says its port."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RES_OPTIONS="timeout:1 attempts:1")
    store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send("ready")
    while True:
        began = time.monotonic()
        try:
            save_level(place, k)
        except BaseException as exc:  # noqa: BLE001 - told to the test
            pipe.send((type(exc).__name__, str(exc), getattr(exc, "ranks", None), time.monotonic() - began))
            os._exit(0)  # a gloo group with a dead member is not worth taking down in order
        pipe.send(k)
        k += 1


def save_with_a_rank_killed(place, k, victim, n):
    """On every rank of a pool: save state `k`; one of them is killed at the n-th operation on its files."""
    save_level(SelfDestruct(LocalStore(place), at=n) if dist.get_rank() == victim else place, k)


class SelfDestruct(FaultyStore):
    """At operation `at`, the process is killed."""

    def begin(self, verb, name):
        if len(self.operations) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.operations.append(f"{verb} {name}")


def compete(pipe, place, k):
    """Save again and again until told to stop; say which were saved, and which errors stood in the way."""
    done, kinds = set(), set()
    while not pipe.poll():
        k += 1
        try:
            save_level(place, k)
            done.add(k)
        except sk.CheckpointError as exc:
            kinds.add(type(exc).__name__)
    pipe.send((done, kinds))


def hold_a_save(pipe, place, k):
    """Save, but stop before the index until told to go on; say which process this is."""

    def hold(verb, name):
        if name.startswith("index-") and verb == "put":
            pipe.send(os.getpid())
            pipe.recv()

    sk.save(level_state(k), BeforeStore(LocalStore(place), hold), step=k, overwrite=True)
