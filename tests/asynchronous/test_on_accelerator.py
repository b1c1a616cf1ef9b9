"""Asynchronous saves of what is on an accelerator: the checkpoint holds what was there at the call."""

import copy
import gc
import random
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import shardkeep as sk
from shardkeep.engine import snapshot
from shardkeep.engine.pools import WINDOW_NBYTES, staging_memory
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import PATIENCE_S, HeldStore, broken, held, saved_in
from tests.engine.samples import all_dtypes, bits, random_tensor

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
WAYS = ["auto", "overlap", "device", "host"]
ROUNDS = 50


def delay(rng):
    """Keep the current stream busy, so that what is queued next has not happened when the host goes on."""
    busy = torch.ones(2000, 2000, device=DEVICE)
    for _ in range(rng.randrange(12)):
        busy = busy @ busy * 1e-4
    return busy


def fresh_state():
    whole = torch.zeros(3000, 1000, device=DEVICE)
    tied = torch.zeros(77, device=DEVICE)
    return {
        "whole": whole,
        "row": whole[5],
        "columns": torch.zeros(3000, 500, device=DEVICE)[:, 3:5],
        "transposed": torch.zeros(300, 200, device=DEVICE).t(),
        "half": torch.zeros(100_000, dtype=torch.bfloat16, device=DEVICE),
        "eighth": torch.zeros(1000, device=DEVICE).to(torch.float8_e4m3fn),
        "flags": torch.zeros(1000, dtype=torch.bool, device=DEVICE),
        "complex": torch.zeros(100, dtype=torch.complex64, device=DEVICE),
        "scalar": torch.zeros((), device=DEVICE),
        "empty": torch.zeros(0, 4, device=DEVICE),
        "tied": [tied, tied],
        "host": torch.zeros(1000),
        "small": [torch.zeros(10, device=DEVICE) for _ in range(50)],
    }


def tensors_of(state):
    return [t for each in state.values() for t in (each if isinstance(each, list) else [each])]


def fill(state, value):
    for tensor in tensors_of(state):
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(value)
        else:
            tensor.fill_(value % 2 if tensor.dtype == torch.bool else value)


def values(tree):
    found = set()
    for tensor in tensors_of(tree):
        if tensor.numel() and tensor.dtype not in (torch.bool, torch.complex64):
            plain = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            found |= {plain.min().item(), plain.max().item()}
    return found


@pytest.mark.parametrize("way", WAYS)
def test_everything_is_changed_right_after_staged(way):
    """Fifty saves with work queued before and after; without an optimizer, only "overlap" copies after the call."""
    rng = random.Random(way)
    state = fresh_state()
    for step in range(1, ROUNDS + 1):
        delay(rng)
        fill(state, step)
        where = sk.MemoryStore()
        handle = sk.async_save(state, where, staging=way)
        assert way == "overlap" or handle.staged.done()
        if rng.random() < 0.3:
            delay(rng)
        handle.staged.wait(PATIENCE_S)
        fill(state, 99)
        handle.result(PATIENCE_S)
        assert values(saved_in(where)) == {step}, way


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512))
        self.head = nn.Linear(512, 512)
        self.head.weight = self.body[3].weight
        self.register_buffer("seen", torch.zeros(300_000))

    def forward(self, x):
        self.seen.add_(1)
        return self.head(self.body(x))


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", ["auto", "overlap"])
def test_training_goes_on_without_a_wait(way, kind):
    """Real steps follow each call, with buffers that forward changes and unguarded tensors: old values are saved."""
    rng = random.Random(f"{way} {kind}")
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = OPTIMIZERS[kind](model.parameters())
    free = torch.zeros(200_000, device=DEVICE)
    for step in range(ROUNDS // 2):
        train(model, optimizer)
        free.fill_(step)
        wanted = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        delay(rng)
        where = sk.MemoryStore()
        handle = sk.async_save({"model": model, "optimizer": optimizer, "free": free}, where, staging=way)
        free.fill_(-1)
        train(model, optimizer, 3)
        handle.result(PATIENCE_S)
        model2 = Net().to(DEVICE)
        optimizer2 = OPTIMIZERS[kind](model2.parameters())
        into = {"model": model2, "optimizer": optimizer2, "free": torch.zeros_like(free)}
        sk.load(into, where)
        assert bits(model2.state_dict()) == bits(wanted[0])
        assert bits(optimizer2.state_dict()) == bits(wanted[1])
        assert into["free"].eq(step).all()


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_where_there_is_room_for_a_part(monkeypatch, place, writer):
    """What finds room is copied on the device, what is written first on the way, and steps that follow at once change neither."""
    monkeypatch.setattr(snapshot, "_free_nbytes", lambda *_: room)
    model = Net().to(DEVICE)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    train(model, optimizer)
    guarded = 3 * sum(each.nbytes for each in model.parameters())
    chosen = []
    for step in range(20):
        room = 2 * (model.seen.nbytes + (64 << 10) + guarded * step // 25)  # half of it is used
        train(model, optimizer)
        wanted = bits(copy.deepcopy(model.state_dict())), bits(copy.deepcopy(optimizer.state_dict()))
        handle = sk.async_save({"model": model, "optimizer": optimizer}, f"{place}-{step}", writer=writer)
        train(model, optimizer, 3)
        chosen.append(handle.result(PATIENCE_S).staging)
        model2 = Net().to(DEVICE)
        optimizer2 = OPTIMIZERS["fused"](model2.parameters())
        sk.load({"model": model2, "optimizer": optimizer2}, f"{place}-{step}")
        assert (bits(model2.state_dict()), bits(optimizer2.state_dict())) == wanted
    assert all(each.startswith("overlap") and "to the host" in each for each in chosen), chosen
    assert len(set(chosen)) > 10


def test_what_the_last_copies_left_in_the_cache_of_torch_is_room(monkeypatch):
    """The choice stays the same from save to save, although torch keeps the memory of the first copies."""
    module = torch.get_device_module(DEVICE)
    gc.collect()
    module.empty_cache()
    state = {"w": torch.ones(50 << 20, device=DEVICE)}  # 200 MiB
    free = 500 << 20
    taken = module.memory_reserved(DEVICE)
    monkeypatch.setattr(module, "mem_get_info", lambda _: (free - (module.memory_reserved(DEVICE) - taken), 1 << 40))
    for step in range(4):
        state["w"].fill_(step)
        where = sk.MemoryStore()
        report = sk.async_save(state, where).result(PATIENCE_S)
        assert report.staging.startswith("device: ")
        assert saved_in(where)["w"].eq(step).all()


def test_a_step_waits_for_a_save_that_is_held():
    """In overlap mode the copies do not wait for the disk, nor does the step once they are queued."""
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    wanted = bits(copy.deepcopy(model.state_dict()))
    where = held()
    handle = sk.async_save({"model": model, "optimizer": optimizer}, where, staging="overlap")
    train(model, optimizer)
    handle.staged.wait(PATIENCE_S)
    where.release.set()
    handle.result(PATIENCE_S)
    model2 = Net().to(DEVICE)
    sk.load({"model": model2, "optimizer": torch.optim.AdamW(model2.parameters())}, where.inner)
    assert bits(model2.state_dict()) == wanted
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    sk.finish_saves()
    assert len(optimizer._optimizer_step_pre_hooks) == 0


def test_steps_are_free_after_a_failure():
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    for _ in range(5):
        handle = sk.async_save(state, broken(), staging="overlap")
        train(model, optimizer)
        assert isinstance(handle.exception(PATIENCE_S), sk.StorageError)
        where = held()
        handle = sk.async_save(state, where, staging="overlap")
        handle.cancel()
        where.release.set()
        train(model, optimizer)
        assert isinstance(handle.exception(PATIENCE_S), sk.SaveCancelled)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype(dtype):
    state = {
        "plain": random_tensor((400, 12), dtype, seed=1).to(DEVICE),
        "scalar": random_tensor((1,), dtype, seed=3)[0].to(DEVICE),
        "empty": random_tensor((0, 2), dtype).to(DEVICE),
    }
    for way in WAYS:
        where = sk.MemoryStore()
        sk.async_save(state, where, staging=way).result(PATIENCE_S)
        assert bits(saved_in(where)) == bits({key: tensor.cpu() for key, tensor in state.items()}), way


def small_budgets(count=6):
    return sk.Options(pinned_bytes=WINDOW_NBYTES, staging_bytes=count * WINDOW_NBYTES, io_threads=4)


def test_budgets_smaller_than_the_state(caplog):
    """200 MB through one pinned buffer and a few windows to a slow disk: right, within the budgets, and logged if training waits."""
    sk.finish_saves()
    state = {f"t{n}": torch.full((5 << 20,), float(n), device=DEVICE) for n in range(10)}
    for way in WAYS:
        where = FaultyStore(sk.MemoryStore(), "slow", at=2, verbs=["write_at"], delay_s=0.3)
        handle = sk.async_save(state, where, staging=way, options=small_budgets())
        report = handle.result(PATIENCE_S)
        assert report.staging.startswith(way if way != "auto" else "device")
        assert handle.progress.staging_waits == (way in ("overlap", "host"))  # else the copies stay on the device
        assert ("staging waits for the disk" in caplog.text) == handle.progress.staging_waits
        caplog.clear()
        assert all(tensor.eq(int(key[1:])).all() for key, tensor in saved_in(where.inner).items())
        assert staging_memory().ring.nbytes <= WINDOW_NBYTES
        assert staging_memory().windows.nbytes <= 6 * WINDOW_NBYTES


def test_several_in_flight():
    state = {f"t{n}": torch.zeros(2 << 20, device=DEVICE) for n in range(8)}
    stores, handles = [], []
    for step in range(12):
        for tensor in state.values():
            tensor.fill_(step)
        stores.append(sk.MemoryStore())
        handles.append(sk.async_save(state, stores[-1], staging="device", max_in_flight=3, options=small_budgets(4)))
    for step, (where, handle) in enumerate(zip(stores, handles, strict=True)):
        handle.result(PATIENCE_S)
        assert {tensor.min().item() for tensor in saved_in(where).values()} == {step}
        assert {tensor.max().item() for tensor in saved_in(where).values()} == {step}


def test_a_row_is_staged_alone():
    """A row of a large storage takes its own bytes on the device and on the way."""
    large = torch.zeros(1000, 1 << 20, dtype=torch.uint8, device=DEVICE)
    before = torch.accelerator.memory_allocated() if hasattr(torch.accelerator, "memory_allocated") else None
    where = HeldStore(sk.MemoryStore(), "list")
    handle = sk.async_save({"row": large[3]}, where, staging="device")
    if before is not None:
        assert torch.accelerator.memory_allocated() - before < 4 << 20
    where.release.set()
    assert handle.result(PATIENCE_S).bytes_total == 1 << 20


def test_device_memory_is_given_back():
    module = torch.get_device_module(DEVICE)
    state = {"w": torch.ones(50 << 20, device=DEVICE)}
    for way in ("overlap", "device"):
        gc.collect()
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        sk.async_save(state, sk.MemoryStore(), staging=way).result(PATIENCE_S)
        peak = module.max_memory_allocated() - before
        assert peak < (1 << 20) if way == "overlap" else peak >= 200 << 20
        assert module.memory_allocated() == before


def test_a_state_that_is_dropped_right_after_the_call():
    """Nobody but the save holds the tensors: their memory is not used again before they are copied."""
    for step in range(20):
        where = sk.MemoryStore()
        state = {"w": torch.full((20 << 20,), float(step), device=DEVICE)}
        handle = sk.async_save(state, where, staging="overlap")
        del state
        rubbish = torch.full((20 << 20,), -1.0, device=DEVICE)
        handle.result(PATIENCE_S)
        assert saved_in(where)["w"].eq(step).all()
        del rubbish


@pytest.mark.parametrize("where", [broken, sk.MemoryStore])
def test_the_state_is_let_go(where):
    module = torch.get_device_module(DEVICE)
    gc.collect()
    before = module.memory_allocated()
    for way in WAYS:
        tensor = torch.ones(1 << 20, device=DEVICE)
        handle = sk.async_save({"w": tensor}, where(), staging=way)
        error = handle.exception(PATIENCE_S)
        assert (error is None) == (where is sk.MemoryStore)
        watching = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert watching() is None
        assert module.memory_allocated() == before


def test_work_on_another_stream():
    rng = random.Random(1)
    w = torch.zeros(4 << 20, device=DEVICE)
    for step in range(1, 11):
        stream = torch.Stream(DEVICE)
        stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            delay(rng)
            w.fill_(step)
            handle = sk.async_save({"w": w}, where := sk.MemoryStore(), staging=rng.choice(["auto", "device"]))
            w.fill_(-1)
        torch.accelerator.current_stream().wait_event(stream.record_event())
        handle.result(PATIENCE_S)
        assert saved_in(where)["w"].eq(step).all()


def test_a_hundred_saves():
    module = torch.get_device_module(DEVICE)
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for step in range(100):
        train(model, optimizer)
        sk.async_save({"model": model, "optimizer": optimizer, "step": step}, sk.MemoryStore())
        if step in (19, 99):
            optimizer.zero_grad()
            sk.async_save({"step": step}, sk.MemoryStore()).result(PATIENCE_S)
            gc.collect()
            memory = staging_memory()
            threads = sum(thread.name.startswith("shardkeep") for thread in threading.enumerate())
            held_bytes = memory.ring.nbytes, memory.windows.nbytes, memory.arenas.nbytes
            seen.append((module.memory_allocated(), threads, held_bytes))
    assert seen[1] == seen[0]


def test_ctrl_c_while_the_call_waits():
    """Interrupted while it waits for the copies, a call cancels its save, because the state may change now."""
    store = HeldStore(sk.MemoryStore(), "list")
    state = {"w": torch.ones(1000, device=DEVICE)}

    def press():
        store.reached.wait(PATIENCE_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        store.release.set()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sk.async_save(state, store, staging="host")
    thread.join()
    sk.finish_saves()
    assert list(store.inner.list()) == []
