"""Plans that are kept from save to save: sent and made once for states that stay alike, and given up when anything differs."""

import logging
import os
import tempfile
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardkeep as sk
from shardkeep import dcp
from shardkeep.dist import rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.save_session import KeptPlans, kept_plans
from shardkeep.testing.thread_ranks import run_thread_ranks

TENSORS = 300
RANKS = 3
MESSAGES_NBYTES = 1500
"""More than a rank sends in a save whose plan is kept, and less than in one that is planned."""


@pytest.fixture(autouse=True)
def _nothing_is_kept():
    sk.finish_saves()
    yield
    sk.finish_saves()


class CountingStore:
    def __init__(self, store):
        self._store = store
        self.nbytes = 0

    def __getattr__(self, name):
        def call(*arguments):
            for values in arguments[1:]:
                self.nbytes += sum(map(len, values)) if isinstance(values, list) else len(values or b"")
            return getattr(self._store, name)(*arguments)

        return call if name in ("set", "multi_set", "append") else getattr(self._store, name)


def state_of(rank, step, *, tensors=TENSORS, dtype=torch.float32):
    """Rows of shared tensors, and replicas, which change with every step."""
    rows = {
        f"shard.{n}": sk.ShardedBox(
            torch.full((2, 3), float(100 * step + rank), dtype=dtype), offsets=(2 * rank, 0), shape=(2 * RANKS, 3)
        )
        for n in range(tensors)
    }
    return {"model": rows, "bias": torch.full((5,), float(step)), "step": step}


def check(where, step, *, tensors=TENSORS, dtype=torch.float32):
    ck = sk.open(where)
    ck.verify()
    wanted = torch.cat([torch.full((2, 3), float(100 * step + rank), dtype=dtype) for rank in range(RANKS)])
    found = ck.to_dict()
    assert (found["step"], found["bias"].tolist(), len(found["model"])) == (step, [float(step)] * 5, tensors)
    assert all(torch.equal(each, wanted) and each.dtype == dtype for each in found["model"].values())


def saves(where, states):
    """Save these states one after the other, on threads as ranks; return the bytes that ranks sent in each save."""
    sent = [[0] * RANKS for _ in states]

    def rank_main(world):
        counting = CountingStore(world.store)
        mine = World(world.rank, world.size, counting, world.timeout_s)
        for number, state in enumerate(states):
            before = counting.nbytes
            sk.save(state(world.rank), f"{where}/{number}", group=mine)
            sent[number][world.rank] = counting.nbytes - before

    run_thread_ranks(RANKS, rank_main)
    return [max(each) for each in sent]


def test_manifests_and_plans_are_sent_once(tmp_path, monkeypatch):
    """From the second save on, ranks send values and samples, and rank 0 a go-ahead, until all is released."""
    monkeypatch.setattr(rendezvous, "NOTE_S", 60)  # a rank that is slow in a phase notes it, which is no part of a plan
    sent = {}
    for tensors in (TENSORS // 3, TENSORS):
        where = tmp_path / str(tensors)
        first, *later = saves(
            where, [lambda rank, step=step, n=tensors: state_of(rank, step, tensors=n) for step in range(3)]
        )
        sent[tensors] = later
        for step in range(3):
            check(where / str(step), step, tensors=tensors)
    assert sent[TENSORS] == sent[TENSORS // 3]
    assert first > MESSAGES_NBYTES > max(later)
    sk.finish_saves()
    assert saves(tmp_path / "later", [lambda rank: state_of(rank, 3)])[0] > MESSAGES_NBYTES
    check(tmp_path / "later/0", 3)


def test_large_plans_are_kept_as_far_as_there_is_room():
    """A plan takes 12 bytes for each chunk, so that 16 million fit; the oldest of several goes, and a larger one is not kept."""
    store = sk.MemoryStore()
    run_thread_ranks(RANKS, lambda world: sk.save(state_of(world.rank, 0), store, group=world))
    [plan] = kept_plans().plans.values()
    assert plan.nbytes <= 12 * (RANKS * TENSORS + 1)
    plans = KeptPlans()
    chunks = [16_384_000, 1000, 7_000_000, 30_000_000]
    names = [plans.keep_plan(SimpleNamespace(nbytes=12 * each)) for each in chunks]
    assert [name in plans.plans for name in names] == [False, True, True, False]


def test_what_ranks_have_in_common_is_sent_once(tmp_path):
    """Of ranks with tensors of the same names and sizes, each sends its offsets, and all get one answer."""
    [few] = saves(tmp_path / "few", [lambda rank: state_of(rank, 0, tensors=TENSORS // 3)])
    [many] = saves(tmp_path / "many", [lambda rank: state_of(rank, 0)])
    assert (many - few) / (TENSORS - TENSORS // 3) < 20  # bytes for each tensor, of which its name alone has nine
    check(tmp_path / "many/0", 0)


def test_ranks_with_tensors_of_their_own(tmp_path):
    """As with pipeline parallelism, no two ranks have the same names; long names are asked for, short ones are not."""
    for count in (1, TENSORS):
        states = [lambda rank, n=count: {f"layer.{rank}.{i}": torch.full((3,), float(rank + i)) for i in range(n)}]
        saves(tmp_path / str(count), states)
        ck = sk.open(tmp_path / f"{count}/0")
        assert len(ck) == RANKS * count
        assert all(ck[f"layer.{rank}.{i}"][:].tolist() == [rank + i] * 3 for rank in range(RANKS) for i in range(count))


CHANGES = {
    "a tensor more": {"tensors": TENSORS + 1},
    "a tensor less": {"tensors": TENSORS - 1},
    "another dtype": {"dtype": torch.float64},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_on_all_ranks_is_planned(tmp_path, change):
    plans = [{}, {}, change, change, {}]
    saves(tmp_path, [lambda rank, step=step, how=how: state_of(rank, step, **how) for step, how in enumerate(plans)])
    for step, how in enumerate(plans):
        check(tmp_path / str(step), step, **how)


@pytest.mark.parametrize("changed", range(RANKS))
def test_a_change_on_one_rank_is_planned(tmp_path, changed):
    def state(rank, step):
        extra = {"extra": torch.full((4,), float(step))} if rank == changed and step == 2 else {}
        return state_of(rank, step) | extra

    sent = saves(tmp_path, [lambda rank, step=step: state(rank, step) for step in range(5)])
    for step in (0, 1, 3, 4):
        check(tmp_path / str(step), step)
    found = sk.open(tmp_path / "2").to_dict()
    assert (found["extra"].tolist(), found["step"]) == ([2.0] * 4, 2)
    assert sent[4] < MESSAGES_NBYTES < sent[2]


def test_a_tensor_that_moves_to_another_rank_is_planned(tmp_path):
    def state(rank, step):
        place = (rank + step // 2) % RANKS
        box = sk.ShardedBox(torch.full((2,), float(10 * step + place)), offsets=(2 * place,), shape=(2 * RANKS,))
        return {"w": box}

    saves(tmp_path, [lambda rank, step=step: state(rank, step) for step in range(6)])
    for step in range(6):
        ck = sk.open(tmp_path / str(step))
        assert ck["w"][:].tolist() == [10.0 * step + place for place in range(RANKS) for _ in range(2)]
        ck.verify()


def test_tensors_that_become_tied_are_planned(tmp_path):
    def state(rank, step):
        first = torch.full((4,), float(step))
        return {"a": first, "b": first if step == 2 else first + 1}

    saves(tmp_path, [lambda rank, step=step: state(rank, step) for step in range(4)])
    for step in range(4):
        found = sk.open(tmp_path / str(step)).to_dict()
        assert (found["a"].tolist(), found["b"].tolist()) == ([step] * 4, [step + (step != 2)] * 4)
        assert (found["a"].data_ptr() == found["b"].data_ptr()) == (step == 2)


def test_replicas_that_are_compared_keep_their_plan():
    """All elements are compared in every save, by the plan of the first one."""

    def save(step, odd=None):
        def on_rank(world):
            state = {"w": torch.full((30_000,), float(step))}
            if world.rank == odd:
                state["w"][12_345] += 1
            sk.save(state, store, overwrite=True, check_replicas=True, group=world)

        run_thread_ranks(RANKS, on_rank)

    store = sk.MemoryStore()
    save(0)
    kept = dict(kept_plans().plans)
    save(1)
    assert len(kept) == 1
    assert kept_plans().plans == kept
    with pytest.raises(sk.ReplicasDiffer, match="'w': ranks 0 and 2 hold different bytes"):
        save(2, odd=2)
    assert sk.open(store)["w"][:].unique().tolist() == [1.0]


def test_replicas_that_diverge_later_are_reported(tmp_path, caplog):
    """Samples are compared in every save, and the lowest rank's tensor is saved."""

    def state(rank, step):
        return {"w": torch.full((30_000,), float(step if step < 2 else step + rank))}

    with caplog.at_level(logging.WARNING, "shardkeep"):
        saves(tmp_path, [lambda rank, step=step: state(rank, step) for step in range(2)])
        assert "not the same on all ranks" not in caplog.text
        saves(tmp_path / "diverged", [lambda rank: state(rank, 2)])
    assert "'w': ranks 0 and 1 hold different bytes" in caplog.text
    assert sk.open(tmp_path / "diverged/0")["w"][:].tolist() == [2.0] * 30_000


def test_values_that_differ_later_are_refused(tmp_path):
    def state(rank, step):
        return {"w": torch.ones(3), "epoch": step if step < 2 else step + rank}

    with pytest.raises(sk.ReplicasDiffer, match="'epoch' is not the same on all ranks"):
        saves(tmp_path, [lambda rank, step=step: state(rank, step) for step in range(3)])
    assert sk.open(tmp_path / "1")["epoch"] == 1
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(tmp_path / "2")


def test_codecs_are_planned_anew(tmp_path):
    state = {"w": torch.arange(1000.0)}
    for number, codecs in enumerate([None, ["zstd"], None, None]):
        sk.save(state, tmp_path / str(number), codecs=codecs)
        ck = sk.open(tmp_path / str(number))
        assert torch.equal(ck["w"][:], state["w"])
        names = sorted(os.listdir(tmp_path / str(number)))
        assert any(name.endswith(".safetensors") for name in names) == (codecs is None)


def test_a_place_that_is_taken_is_refused_as_ever(tmp_path):
    state = {"w": torch.ones(3)}
    for number in range(2):
        sk.save(state, tmp_path / str(number))
    with pytest.raises(sk.CheckpointExists):
        sk.save(state, tmp_path / "1")
    sk.save({"w": torch.zeros(3)}, tmp_path / "1", overwrite=True)
    assert sk.open(tmp_path / "1")["w"][:].tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from(["sk", "dcp", "async"])), min_size=2, max_size=5
    )
)
def test_any_order_of_states_and_saves(plan):
    with tempfile.TemporaryDirectory() as where:
        for number, (shape, more, how) in enumerate(plan):
            state = {f"t{n}": torch.full((shape, 2 + n), float(number)) for n in range(2 + more)} | {"number": number}
            place = f"{where}/{number}"
            if how == "dcp":
                dcp.save(state, checkpoint_id=place, no_dist=True)
            elif how == "sk":
                sk.save(state, place)
            else:
                sk.async_save(state, place).result()
            found = sk.open(place).to_dict()
            assert found.pop("number") == state.pop("number")
            assert {name: each.tolist() for name, each in found.items()} == {
                name: each.tolist() for name, each in state.items()
            }


class Renamed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


def swap_modules(model, optimizer):
    model.a, model.b = model.b, model.a


def swap_parameters(model, optimizer):
    model.a.weight, model.b.weight = model.b.weight, model.a.weight


def rename(model, optimizer):
    model.c = model._modules.pop("b")


def tie(model, optimizer):
    model.first = model.a.weight


def wrap(model, optimizer):
    model.a = checkpoint_wrapper(model.a)


def add_group(model, optimizer):
    model.extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.extra], "lr": 0.5})


def reorder(model, optimizer):
    optimizer.param_groups[0]["params"].reverse()


def hide(model, optimizer):
    model._fqn_modifiers = lambda: {"weight": "a"}


@pytest.mark.parametrize("change", [swap_modules, swap_parameters, rename, tie, wrap, add_group, reorder, hide])
def test_names_of_parameters_follow_the_modules(tmp_path, change):
    """A save after a change says the same as one of a process that has kept nothing."""
    model = Renamed()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    sk.save(state, tmp_path / "before")
    change(model, optimizer)
    sk.save(state, tmp_path / "kept")
    sk.finish_saves()
    sk.save(state, tmp_path / "new")
    kept, new = (sk.open(tmp_path / name).to_dict() for name in ("kept", "new"))
    assert list(kept["optim"]["state"]) == list(new["optim"]["state"])
    assert kept["optim"]["param_groups"] == new["optim"]["param_groups"]
    for name, each in new["optim"]["state"].items():
        assert all(torch.equal(value, kept["optim"]["state"][name][key]) for key, value in each.items())
