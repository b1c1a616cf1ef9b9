"""Schedulers, loaders, generators and other objects with a state dict, straight in a state."""
# ruff: noqa: NPY002 - the global generator is what is tested

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes


class Counter:
    """Whatever a user writes."""

    def __init__(self, **state):
        self.state = state
        self.loads = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.loads += 1


class Loader(Counter):
    """One that knows what to do on another number of ranks."""

    def load_rank_states(self, states, rank, world_size):
        self.state = {"position": min(s["position"] for s in states.values()), "rank": rank, "of": world_size}


def test_an_object_is_given_what_it_returned(tmp_path):
    """
    Nesting, order, empties, tensors, arrays: `load_state_dict` gets what `state_dict` gave, whatever is there now.
    """
    state = {
        "z": 1,
        "a": {"list": [1, 2, {"deep": torch.arange(3)}], "tuple": (torch.ones(2), "x"), "none": None},
        "empty": {},
        "nothing": [],
        "ordered": OrderedDict(b=1, a=2),
        "array": np.arange(4, dtype=np.uint16),
        7: "int key",
    }
    sk.save({"thing": Counter(), "other": 1} | {"thing": _of(state)}, tmp_path / "c")

    fresh = Counter(something="else", a=[1])
    report = sk.load({"thing": fresh, "other": 0}, tmp_path / "c")

    assert report.missing == report.unexpected == []
    assert fresh.loads == 1
    assert list(fresh.state) == list(state)
    assert torch.equal(fresh.state["a"]["list"][2].pop("deep"), torch.arange(3))
    assert torch.equal(fresh.state["a"]["tuple"][0], torch.ones(2))
    assert fresh.state["a"]["tuple"][1] == "x"
    assert fresh.state["a"]["list"] == [1, 2, {}]
    assert fresh.state["a"]["none"] is None
    assert fresh.state["empty"] == {}
    assert fresh.state["nothing"] == []
    assert fresh.state["ordered"] == OrderedDict(b=1, a=2)
    assert isinstance(fresh.state["ordered"], OrderedDict)
    assert np.array_equal(fresh.state["array"], np.arange(4, dtype=np.uint16))
    assert fresh.state["array"].dtype == np.uint16
    assert fresh.state[7] == "int key"


def _of(state):
    thing = Counter()
    thing.state = state
    return thing


def test_objects_in_lists_and_below_other_keys(tmp_path):
    """
    An object is found wherever it stands, and its neighbours are loaded as ever.
    """
    things = [Counter(n=1), Counter(n=2)]
    sk.save({"app": {"list": things, "tuple": (Counter(n=3), 5), "step": 1}}, tmp_path / "c")
    fresh = {"app": {"list": [Counter(), Counter()], "tuple": (Counter(), 0), "step": 0}}
    first = fresh["app"]["list"][0]
    sk.load(fresh, tmp_path / "c")
    assert [thing.state for thing in fresh["app"]["list"]] == [{"n": 1}, {"n": 2}]
    assert fresh["app"]["list"][0] is first
    assert fresh["app"]["tuple"][0].state == {"n": 3}
    assert fresh["app"]["tuple"][1] == 5
    assert fresh["app"]["step"] == 1


def test_an_object_the_checkpoint_lacks_is_missing(tmp_path):
    """
    Strict: an error that names it. Otherwise it is reported, and not touched.
    """
    sk.save({"a": Counter(n=1)}, tmp_path / "c")
    state = {"a": Counter(), "new": Counter(n=5)}
    with pytest.raises(sk.StateMismatch, match="new"):
        sk.load(state, tmp_path / "c")
    assert state["a"].loads == 0
    report = sk.load(state, tmp_path / "c", strict=False)
    assert report.missing == ["new"]
    assert state["new"].loads == 0
    assert state["a"].state == {"n": 1}


def test_an_object_that_nothing_asks_for_is_unexpected(tmp_path):
    """
    What was saved of an object is not dropped in silence.
    """
    sk.save({"a": Counter(n=1), "b": Counter(n=2)}, tmp_path / "c")
    with pytest.raises(sk.StateMismatch, match=r"b\.n"):
        sk.load({"a": Counter()}, tmp_path / "c")


def test_selection_and_renaming_reach_objects(tmp_path):
    """
    `include`, `exclude` and `rename` mean the names inside objects too.
    """
    sk.save({"a": Counter(x=1, y=2), "b": Counter(n=2)}, tmp_path / "c")
    state = {"a": Counter(), "b": Counter()}
    sk.load(state, tmp_path / "c", exclude="b")
    assert (state["a"].state, state["b"].loads) == ({"x": 1, "y": 2}, 0)
    state = {"a": Counter(), "b": Counter()}
    sk.load(state, tmp_path / "c", include="a.x")
    assert (state["a"].state, state["b"].loads) == ({"x": 1}, 0)
    state = {"first": Counter(), "b": Counter()}
    sk.load(state, tmp_path / "c", rename={"a": "first"})
    assert state["first"].state == {"x": 1, "y": 2}


def test_a_state_dict_that_is_no_mapping_is_refused(tmp_path):
    """
    The error names the object's key.
    """
    thing = Counter()
    thing.state = [1, 2]
    with pytest.raises(sk.UnsupportedLeaf, match="'odd'"):
        sk.save({"odd": thing}, tmp_path / "c")


def test_state_that_differs_between_ranks_is_each_ranks_own(tmp_path):
    """
    A loader's position is stored for every rank, a scheduler's once, and nobody has to say which is which.
    """

    def save(world):
        state = {"loader": Counter(position=world.rank, seed=torch.tensor([world.rank])), "sched": Counter(lr=0.5)}
        return sk.save(state, tmp_path / "c", group=world)

    def load(world):
        state = {"loader": Counter(), "sched": Counter()}
        sk.load(state, tmp_path / "c", group=world)
        return state["loader"].state["position"], state["loader"].state["seed"].item(), state["sched"].state

    run_thread_ranks(3, save)
    assert run_thread_ranks(3, load) == [(rank, rank, {"lr": 0.5}) for rank in range(3)]
    names = list(sk.open(tmp_path / "c").keys())
    assert "sched.lr" in names
    assert "loader.@2.position" in names


def test_on_another_number_of_ranks_the_object_decides(tmp_path):
    """
    `load_rank_states` gets what all ranks saved; an object without it is an error that names it, and can be left out.
    """

    def save(world):
        return sk.save({"loader": Counter(position=10 + world.rank), "n": 1}, tmp_path / "c", group=world)

    def load(kind, **arguments):
        def run(world):
            state = {"loader": kind(), "n": 0}
            sk.load(state, tmp_path / "c", group=world, **arguments)
            return state["loader"].state

        return run

    run_thread_ranks(3, save)
    assert run_thread_ranks(2, load(Loader)) == [{"position": 10, "rank": r, "of": 2} for r in range(2)]
    for outcome in thread_outcomes(2, load(Counter)):
        assert isinstance(outcome, sk.StateMismatch)
        assert "load_rank_states" in str(outcome)
        assert "'loader' was saved per rank by 3 ranks" in str(outcome)
    assert run_thread_ranks(2, load(Counter, exclude="loader")) == [{}, {}]


def test_a_failing_object_fails_on_every_rank(tmp_path):
    """
    `state_dict` raises on one rank: all ranks hear of it, and nothing is committed.
    """

    class Broken(Counter):
        def state_dict(self):
            raise ValueError("no state today")

    def save(world):
        return sk.save({"thing": Broken() if world.rank else Counter(n=1)}, tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, save):
        assert "no state today" in str(outcome)
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(tmp_path / "c")


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_go_on_as_they_would_have(tmp_path):
    """
    Python, NumPy and torch draw the same numbers after a load as they drew after the save.
    """
    random.gauss(0, 1)
    np.random.standard_normal()
    sk.save({"rng": sk.RNG()}, tmp_path / "c")
    expected = [*draws(), random.gauss(0, 1), np.random.standard_normal()]
    draws()
    sk.load({"rng": sk.RNG()}, tmp_path / "c")
    assert [*draws(), random.gauss(0, 1), np.random.standard_normal()] == expected


def rng_of_rank(rank):
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def save_rng(where):
    rng_of_rank(torch.distributed.get_rank())
    sk.save({"rng": sk.RNG()}, where)


def load_rng(where):
    sk.load({"rng": sk.RNG()}, where)
    return draws()


def test_each_rank_gets_its_own_generators_back(rank_pool, tmp_path):
    """
    On as many ranks, the same; on more, the new ones get numbers of their own, the same on every resume.
    """
    where = str(tmp_path / "c")
    rank_pool.run(2, save_rng, where)
    expected = []
    for rank in range(2):
        rng_of_rank(rank)
        expected.append(draws())
    assert rank_pool.run(2, load_rng, where) == expected
    more = rank_pool.run(4, load_rng, where)
    assert more[:2] == expected
    assert len(set(more)) == 4
    assert rank_pool.run(4, load_rng, where) == more
    assert rank_pool.run(1, load_rng, where) == expected[:1]


def test_large_tensors_that_differ_are_noticed(tmp_path):
    """
    Two megabytes that differ in one half: each rank gets its own; equal ones are stored once.
    """

    def tensor(rank):
        data = torch.zeros(1 << 19)
        data[1 << 18 :] = rank
        return data

    def save(world):
        state = {"own": Counter(t=tensor(world.rank)), "same": Counter(t=tensor(7))}
        return sk.save(state, tmp_path / "c", group=world)

    def load(world):
        state = {"own": Counter(), "same": Counter()}
        sk.load(state, tmp_path / "c", group=world)
        return torch.equal(state["own"].state["t"], tensor(world.rank)) and torch.equal(
            state["same"].state["t"], tensor(7)
        )

    run_thread_ranks(2, save)
    assert "same.t" in list(sk.open(tmp_path / "c").keys())
    assert run_thread_ranks(2, load) == [True, True]
