"""
States in host memory with less room to copy them than they take: what fits is copied in the call, writers read the rest
from the caller's memory, and nobody may change that before they have.
"""

import copy
import gc
import os
import random
import resource
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import shardkeep as sk
from shardkeep.engine.pools import staging_memory
from shardkeep.engine.process.client import writer_manager
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.thread_ranks import run_thread_ranks
from tests.asynchronous.scene import PATIENCE_S, HeldStore, saved_in
from tests.engine.samples import bits
from tests.support.stores import BeforeStore

MIB = 1 << 20
WAITS = "staging waits for the disk"


def options(room):
    """Room for so many bytes of copies, and windows of 1 MiB."""
    return sk.Options(staging_bytes=room, io_threads=2, host_budget_bytes=4 * MIB, timeout_s=20)


def mixed(rng):
    """Some 4 MiB in tensors of many sizes, some of which do not lie in order, overlap, or are the same."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    sizes = [rng.choice([1, 7, 1000, 40_000, 300_000]) for _ in range(rng.randrange(1, 12))]
    state = {f"t{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    wide = torch.randn(400, 1000, generator=generator)
    return state | {"wide": wide.t(), "rows": wide[10:300], "columns": wide[:, ::3], "same": wide.t(), "none": wide[:0]}


def delay(verb, name):
    if verb == "write_at":
        time.sleep(random.random() * 0.004)


def test_what_other_saves_stage_through_is_no_room_for_copies():
    """Windows that a save before this one still has count: both together take no more than there is room for."""
    sk.finish_saves()
    windows = staging_memory().windows
    windows.most_nbytes = windows.buffer_nbytes
    taken = windows.take()
    state = {str(n): torch.full((MIB,), n, dtype=torch.uint8) for n in range(12)}
    try:
        where = sk.MemoryStore()
        sk.async_save(state, where, options=options(windows.buffer_nbytes + 5 * MIB)).result(PATIENCE_S)
        assert 4 * MIB <= staging_memory().arenas.nbytes <= 5 * MIB
        assert bits(saved_in(where)) == bits(state)
    finally:
        windows.give(taken)
        sk.finish_saves()


def test_what_changes_right_after_staged_is_not_saved():
    """Forty states, with room for none, some or nearly all of each, are saved as they were at the call."""
    rng = random.Random(11)
    for round_ in range(40):
        sk.finish_saves()
        state = mixed(rng)
        room = rng.choice([1, 100_000, 2 * MIB, 4 * MIB])
        wanted = bits(copy.deepcopy(state))
        where = BeforeStore(sk.MemoryStore(), delay)
        handle = sk.async_save(state, where, step=round_, options=options(room))
        assert handle.staged.done()  # the call has waited: nothing else keeps these from changing
        assert staging_memory().arenas.nbytes <= room
        for tensor in state.values():
            tensor.fill_(rng.random())
        handle.result(PATIENCE_S)
        assert bits(saved_in(where.inner)) == wanted
    assert staging_memory().windows.nbytes == 0


@pytest.mark.parametrize("room", [0, 20 * MIB])
def test_the_process_that_writes_gets_the_rest_through_windows(room, place):
    """With a writer of its own too, what does not fit goes through a few shared windows, and is saved as it was."""
    windows = 64 * MIB
    state = {f"t{n}": torch.randn(1000 + n * 999) for n in range(20)}
    state["large"] = torch.randn(18 * MIB)
    wanted = bits(copy.deepcopy(state))
    handle = sk.async_save(state, place, options=options(windows + room), writer="process")
    for tensor in state.values():
        tensor.fill_(1)
    handle.result(PATIENCE_S)
    memory = writer_manager().memory()
    assert 80_000 <= memory.arenas.nbytes <= max(room, windows // 16)  # small tensors always have some
    assert memory.windows.nbytes <= windows
    assert handle.progress.staging_waits
    assert bits(saved_in(place)) == wanted


def trained(width=300):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def bits_of(model, optimizer):
    return bits(copy.deepcopy(model.state_dict())), bits(copy.deepcopy(optimizer.state_dict()))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, model[0].in_features)).square().mean().backward()
    optimizer.step()


def loaded_from(where):
    model, optimizer = trained()
    sk.load({"model": model, "optimizer": optimizer}, where)
    return bits_of(model, optimizer)


def waited_for(state, where, room, staging):
    """Save, and see that the call returns only when the store takes bytes, with all of the state read."""
    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(sk.async_save, state, where, options=options(room), staging=staging)
        assert where.reached.wait(PATIENCE_S)
        assert not calling.done()
        where.release.set()
        handle = calling.result(PATIENCE_S)
    assert handle.staged.done()
    return handle


def test_the_step_of_an_optimizer_waits():
    model, optimizer = trained()
    wanted = bits_of(model, optimizer)
    where = HeldStore(sk.MemoryStore())
    state = {"model": model, "optimizer": optimizer}
    handle = sk.async_save(state, where, options=options(100_000), staging="overlap")
    assert handle.progress.staging_waits
    assert where.reached.wait(PATIENCE_S)
    assert not handle.staged.done()
    with ThreadPoolExecutor(1) as thread:
        stepping = thread.submit(step, model, optimizer)
        with pytest.raises(TimeoutError):
            handle.staged.wait(0.1)
        assert not stepping.done()
        where.release.set()
        stepping.result(PATIENCE_S)
    handle.result(PATIENCE_S)
    assert loaded_from(where.inner) == wanted


def test_a_fork_steps_on_its_own():
    model = nn.Linear(3, 3)
    model(torch.ones(3)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    where = HeldStore(sk.MemoryStore())
    handle = sk.async_save({"model": model, "optimizer": optimizer}, where, options=options(1), staging="overlap")
    assert not handle.staged.done()
    assert where.reached.wait(PATIENCE_S)
    if (pid := os.fork()) == 0:
        optimizer.step()
        os._exit(7)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(os.waitpid, pid, 0)
        try:
            assert os.waitstatus_to_exitcode(ended.result(PATIENCE_S)[1]) == 7
        finally:
            if not ended.done():
                os.kill(pid, signal.SIGKILL)
            where.release.set()
    handle.result(PATIENCE_S)


def test_what_only_shares_a_storage_with_a_parameter_is_not_guarded():
    """Memory beside a parameter, and around it, changes when it likes: the call waits for it."""
    flat = torch.ones(400, 300)
    model = nn.Linear(300, 100, bias=False)
    model.weight = nn.Parameter(flat[:100])
    optimizer = torch.optim.SGD(model.parameters())
    state = {"model": model, "beside": flat[100:200], "around": flat[:300], "optimizer": optimizer}
    where = HeldStore(sk.MemoryStore())
    handle = waited_for(state, where, 1, "overlap")
    with torch.no_grad():
        flat.zero_()
    handle.result(PATIENCE_S)
    assert all(each.eq(1).all() for each in saved_in(where.inner).values() if isinstance(each, torch.Tensor))


def test_real_steps_with_no_wait_in_between():
    """Training goes on after each of several calls, to disks of any speed: what is saved is the state at the call."""
    rng = random.Random(3)
    model, optimizer = trained()
    for _ in range(6):
        wanted = bits_of(model, optimizer)
        where = BeforeStore(sk.MemoryStore(), delay)
        room = rng.choice([20_000, 400_000, 800_000])
        staging = rng.choice(["auto", "overlap"])
        state = {"model": model, "optimizer": optimizer}
        handle = sk.async_save(state, where, options=options(room), staging=staging)
        for _ in range(rng.randrange(1, 4)):
            step(model, optimizer)
        handle.result(PATIENCE_S)
        assert handle.progress.staging_waits
        assert loaded_from(where.inner) == wanted


@pytest.mark.parametrize(
    ("staging", "room"), [("host", 100_000), ("device", 100_000), ("auto", 100_000), ("overlap", 1)]
)
def test_the_call_waits_where_nothing_else_does(staging, room):
    """If the state may change at once, or unguarded tensors find no room, the call returns when all has been read."""
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    wanted = bits_of(model, optimizer)
    where = HeldStore(sk.MemoryStore())
    handle = waited_for(state, where, room, staging)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0)
    handle.result(PATIENCE_S)
    assert loaded_from(where.inner) == wanted


def test_memory_that_the_caller_lets_go_of_is_kept_until_it_is_read():
    """Model and optimizer may be dropped after the call: what was not copied lives until it is read, and no longer."""
    model, optimizer = trained()
    wanted = bits_of(model, optimizer)
    where = HeldStore(sk.MemoryStore())
    state = {"model": model, "optimizer": optimizer}
    handle = sk.async_save(state, where, options=options(100_000), staging="overlap")
    del state
    storages = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    model[0].weight.data = torch.zeros(3)
    del model, optimizer
    gc.collect()
    filler = [torch.full((300, 300), 9.0) for _ in range(20)]
    where.release.set()
    handle.result(PATIENCE_S)
    assert loaded_from(where.inner) == wanted
    del filler
    gc.collect()
    assert [ref() for ref in storages] == [None] * len(storages)


def test_saves_in_flight_share_the_room():
    sk.finish_saves()
    wheres = [HeldStore(sk.MemoryStore(), "list"), HeldStore(sk.MemoryStore(), "list")]
    tensors = {f"t{n}": torch.full((100_000,), 1.0) for n in range(10)}
    wheres[1].release.set()
    first = sk.async_save(dict(list(tensors.items())[:6]), wheres[0], options=options(3 * MIB), max_in_flight=2)
    assert first.staged.done()
    assert not first.progress.staging_waits
    for tensor in tensors.values():
        tensor.fill_(2.0)
    second = sk.async_save(tensors, wheres[1], options=options(3 * MIB), max_in_flight=2)
    assert second.progress.staging_waits
    assert staging_memory().arenas.nbytes <= 3 * MIB
    for tensor in tensors.values():
        tensor.fill_(3.0)
    wheres[0].release.set()
    for number, (handle, where) in enumerate(zip((first, second), wheres, strict=True), 1):
        handle.result(PATIENCE_S)
        assert {value for tensor in saved_in(where.inner).values() for value in tensor.unique().tolist()} == {number}


def test_ranks_that_write_parts_of_what_all_have():
    where = sk.MemoryStore()

    def save(world):
        state = {"w": torch.arange(900_000.0), "v": torch.arange(50_000)}
        handle = sk.async_save(state, where, group=world, options=options(1000), max_in_flight=2)
        for tensor in state.values():
            tensor.fill_(0)
        return handle.result(PATIENCE_S)

    run_thread_ranks(2, save)
    found = saved_in(where)
    assert torch.equal(found["w"], torch.arange(900_000.0))
    assert torch.equal(found["v"], torch.arange(50_000))


def test_no_memory_at_all(caplog, place):
    """Where the system has no memory for a copy, all is read by the writers, and the log says why."""
    sk.finish_saves()
    state = {"w": torch.arange(32 * MIB, dtype=torch.int32)}
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 96 * MIB, before[1]))
    try:
        handle = sk.async_save(state, place, options=options(1 << 40))
        state["w"].neg_()
        handle.result(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "no memory for a copy of 134 MB of the state" in caplog.text
    assert WAITS in caplog.text
    assert handle.progress.staging_waits
    assert staging_memory().arenas.nbytes == 0
    assert torch.equal(saved_in(place)["w"], state["w"].neg_())


@pytest.mark.parametrize("how", ["write", "cancel"])
def test_a_save_that_fails_gives_all_back(how):
    sk.finish_saves()
    model, optimizer = trained()
    inner = sk.MemoryStore()
    where = HeldStore(FaultyStore(inner, at=1 if how == "write" else None, verbs=["write_at"]))
    state = {"model": model, "optimizer": optimizer}
    handle = sk.async_save(state, where, options=options(100_000), staging="overlap")
    del state
    assert where.reached.wait(PATIENCE_S)
    if how == "cancel":
        handle.cancel()
    where.release.set()
    step(model, optimizer)
    assert isinstance(handle.exception(PATIENCE_S), sk.SaveCancelled if how == "cancel" else sk.StorageError)
    assert staging_memory().arenas.nbytes_in_use == 0
    assert list(inner.list()) == []
    storage = weakref.ref(model[0].weight.untyped_storage())
    wanted = bits(copy.deepcopy(model.state_dict()))
    sk.async_save({"model": model, "optimizer": optimizer}, inner, options=options(100_000)).result(PATIENCE_S)
    assert loaded_from(inner)[0] == wanted
    del model, optimizer
    gc.collect()
    assert storage() is None
