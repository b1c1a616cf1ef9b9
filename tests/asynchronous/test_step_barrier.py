"""The hook before an optimizer's step: put once, idle unless a save needs it, and in nobody's way."""

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import shardkeep as sk
from shardkeep.engine import snapshot
from shardkeep.engine.snapshot import StepBarrier, StepBarriers, step_barriers
from tests.asynchronous.scene import PATIENCE_S, held
from tests.engine.samples import bits


def trained(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


def hooks_of(optimizer):
    return len(optimizer._optimizer_step_pre_hooks)


def stepping(model, optimizer):
    thread = threading.Thread(target=step, args=(model, optimizer))
    thread.start()
    return thread


def test_a_step_waits_for_its_gates():
    """The step goes on when the copies of all saves are queued, the next does not wait again, another optimizer never."""
    gates, first, second = StepBarriers(), StepBarrier(), StepBarrier()
    model, optimizer = trained()
    for gate in (first, second):
        gates.put(gate, [optimizer])
    assert hooks_of(optimizer) == 1
    step(*trained(torch.optim.SGD))
    before = bits(model.state_dict())
    thread = stepping(model, optimizer)
    for gate in (first, second):
        thread.join(0.1)
        assert thread.is_alive()
        assert bits(model.state_dict()) == before
        gate.open({})
    thread.join(PATIENCE_S)
    assert bits(model.state_dict()) != before
    step(model, optimizer)
    first.open({})


def test_the_hook_is_put_once_and_taken_away():
    """However many saves there are, there is one hook; when it is taken away nothing holds a step back."""
    gates = StepBarriers()
    model, optimizer = trained()
    for _ in range(5):
        gate = StepBarrier()
        gates.put(gate, [optimizer])
        gate.open({})
        step(model, optimizer)
        assert hooks_of(optimizer) == 1
    gates.put(StepBarrier(), [optimizer])
    gates.remove()
    assert hooks_of(optimizer) == 0
    step(model, optimizer)
    gate = StepBarrier()
    gates.put(gate, [optimizer])
    assert hooks_of(optimizer) == 1
    gate.open({})
    step(model, optimizer)


def test_finish_saves_takes_hooks_away():
    """After `finish_saves` an optimizer is as it was; a gate that was opened before it was put holds nothing back."""
    model, optimizer = trained()
    gate = StepBarrier()
    gate.open({})
    gate.open({})
    step_barriers().put(gate, [optimizer])
    step(model, optimizer)
    assert hooks_of(optimizer) == 1
    sk.finish_saves()
    assert hooks_of(optimizer) == 0


def test_a_state_in_host_memory_needs_no_barrier():
    """Its hook only notes when a step was made, and goes with `finish_saves`."""
    model, optimizer = trained()
    sk.async_save({"model": model, "optimizer": optimizer}, sk.MemoryStore()).result(PATIENCE_S)
    assert hooks_of(optimizer) == 1
    assert step_barriers()._barriers[optimizer] == []
    sk.finish_saves()
    assert hooks_of(optimizer) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_of_an_optimizer_are_free(copied):
    """An optimizer with a gate before its step is copied and pickled as ever; the copy has neither hook nor gate."""
    gates, gate = StepBarriers(), StepBarrier()
    _, optimizer = trained()
    plain = bits(copied(optimizer).state_dict())
    gates.put(gate, [optimizer])
    other = copied(optimizer)
    assert bits(other.state_dict()) == plain
    for group in other.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    other.step()
    gate.open({})


def test_closures_scalers_and_schedulers():
    """Steps with a closure, by a GradScaler and with a scheduler work with the hook, and give what they gave."""
    found = []
    for gated in (False, True):
        gates, gate = StepBarriers(), StepBarrier()
        model, optimizer = trained(torch.optim.SGD)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu")
        gate.open({})

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            return loss

        if gated:
            gates.put(gate, [optimizer])
        loss = optimizer.step(closure)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        found.append((loss.item(), bits(model.state_dict()), scheduler.get_last_lr()))
    assert found[0] == found[1]


def test_optimizers_are_not_kept_alive():
    gates = StepBarriers()
    model, optimizer = trained()
    gates.put(StepBarrier(), [optimizer])
    ref = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert ref() is None
    gates.remove()


def test_a_report_estimates_what_a_save_cost_training(monkeypatch):
    """By the steps beside it, against those between saves; one slow step between saves, or none beside it, says nothing."""
    now = [0.0]
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    model, optimizer = trained()

    def steps(*intervals):
        for interval in intervals:
            now[0] += interval
            step(model, optimizer)

    def lost_s(*intervals):
        where = held()
        handle = sk.async_save({"model": model, "optimizer": optimizer}, where)
        steps(*intervals)
        where.release.set()
        return handle.result(PATIENCE_S).lost_s

    assert lost_s(1.0, 1.0) is None  # no step was seen before
    steps(1.0, 1.0, 9.0, 1.0, 1.0)
    assert lost_s() is None
    assert lost_s(1.5, 1.25, 1.0) == pytest.approx(0.75)
    assert lost_s(1.5) == pytest.approx(0.5)  # what is usual is known
    steps(*[2.0] * 10)
    assert lost_s(1.0, 1.0) == 0.0
    assert sk.save({"model": model}, sk.MemoryStore()).lost_s is None
