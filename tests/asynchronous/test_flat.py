"""What a hundred saves leave in the process: nothing that grows, and nothing of the state."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.pools import staging_memory
from tests.asynchronous.scene import PATIENCE_S, broken, held, says


def vitals():
    with open("/proc/self/statm", encoding="ascii") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = sorted(thread.name for thread in threading.enumerate())
    return rss, len(threads), len(os.listdir("/proc/self/fd")), staging_memory().arenas.nbytes


@pytest.mark.parametrize("most", [1, 3])
def test_a_hundred_saves(place, most):
    """Memory, threads, descriptors and arenas are the same after a hundred saves as after the first few."""
    state = {"w": torch.zeros(1 << 20), "few": [torch.zeros(3)]}
    stages, handles = [], []
    sk.finish_saves()
    before = staging_memory().arenas.nbytes
    for step in range(100):
        state["w"].fill_(step)
        state["few"][0].fill_(step)
        if step >= 4:  # one that began earlier may end later, and it saves to the same place
            handles[step - 4].result(PATIENCE_S)
        handles.append(sk.async_save(state, f"{place}-{step % 4}", overwrite=True, max_in_flight=most))
        if step in (19, 99):
            settled()
            gc.collect()
            stages.append(vitals())
    settled()
    assert says(f"{place}-3") == {99}
    (rss, threads, *others), (rss_later, threads_later, *others_later) = stages
    assert others_later == others
    assert threads_later - threads <= most + 1  # that many may just be ending as the next save begins
    assert rss_later - rss < 8 << 20
    assert staging_memory().arenas.nbytes - before <= most * (5 << 20)


def settled():
    """Wait for what is in flight, and leave threads and memory as they are."""
    where = sk.MemoryStore()
    sk.async_save({"a": torch.zeros(3)}, where, max_in_flight=1).result(PATIENCE_S)
    deadline = time.monotonic() + 5
    while sum(t.name.startswith("shardkeep-ranks") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)


def test_finish_gives_all_back(place):
    """After `finish_saves` no thread is left, and no memory."""
    sk.finish_saves()
    before = staging_memory().arenas.nbytes
    others = set(threading.enumerate())  # lanes of `dcp.async_save` in other tests of this process
    for n in range(3):
        sk.async_save({"w": torch.zeros(1 << 20)}, f"{place}-{n}", max_in_flight=3)
    assert staging_memory().arenas.nbytes >= before + (4 << 20)
    sk.finish_saves()
    memory = staging_memory()
    assert (memory.arenas.nbytes, memory.windows.nbytes, memory.ring.nbytes) == (before, 0, 0)
    assert [each.name for each in set(threading.enumerate()) - others if each.name.startswith("shardkeep")] == []


def watched():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    model.zero_grad()
    tensor = torch.ones(1000)
    watching = [weakref.ref(each) for each in (tensor, model, model.weight, optimizer)]
    return {"w": tensor, "model": model, "optimizer": optimizer}, watching


def ways_to_end():
    taken = sk.MemoryStore()
    sk.save({"w": torch.zeros(1)}, taken)
    stores = {"well": sk.MemoryStore(), "described": sk.MemoryStore()}
    return {**stores, "written": broken(), "planned": taken, "cancelled": held()}


@pytest.mark.parametrize("way", ["well", "described", "written", "planned", "cancelled"])
def test_the_state_is_let_go(way):
    """However a save ends, with its handle and its error still held, nothing of the state is."""
    where = ways_to_end()[way]
    state, watching = watched()
    if way == "described":
        with pytest.raises(sk.UnsupportedLeaf):
            sk.async_save({**state, "bad": object()}, where)
    else:
        handle = sk.async_save(state, where)
        if way == "cancelled":
            assert where.reached.wait(PATIENCE_S)
            del state
            gc.collect()
            alive = [ref() for ref in watching]  # not while a slow disk takes it, either
            handle.cancel()
            where.release.set()
            assert alive == [None] * 4
        error = handle.exception(PATIENCE_S)
        assert (error is None) == (way == "well")
    state = None
    gc.collect()
    assert [ref() for ref in watching] == [None] * 4
