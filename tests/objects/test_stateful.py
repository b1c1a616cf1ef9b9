"""Schedulers, loaders, generators and other objects with a state dict, straight in a state."""
# ruff: noqa: NPY002 - the global generator is what is tested

import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import shardkeep as sk
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.samples import bits

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the plain kind is meant


class Stateful:
    """Whatever a user writes: `state` is what it returns, and then what it was given."""

    def __init__(self, state=None, **more):
        self.state = more if state is None else state
        self.loads = 0

    def state_dict(self):
        return self.state() if callable(self.state) else self.state

    def load_state_dict(self, state):
        self.state = state
        self.loads += 1


class Loader(Stateful):
    """One that knows what to do on another number of ranks."""

    def load_rank_states(self, states, rank, world_size):
        self.state = {"positions": [s["position"] for s in states.values()], "rank": rank, "of": world_size}


def saved(ranks, where, make):
    run_thread_ranks(ranks, lambda world: sk.save(make(world), where, group=world))


def loading(where, make, **how):
    def load(world):
        state = make(world)
        sk.load(state, where, group=world, **how)
        return state

    return load


def test_an_object_is_given_what_it_returned(tmp_path):
    state = {
        "z": 1,
        "a": {"list": [1, 2, {"deep": torch.arange(3)}], "tuple": (torch.ones(2), "x"), "none": None},
        "empty": {},
        "nothing": [],
        "ordered": OrderedDict(b=1, a=2),
        "array": np.arange(4, dtype=np.uint16),
        7: "int key",
    }
    sk.save({"thing": Stateful(state), "other": 1}, tmp_path / "c")
    fresh = Stateful(something="else", a=[1])
    report = sk.load({"thing": fresh, "other": 0}, tmp_path / "c")
    assert report.missing == report.unexpected == []
    assert fresh.loads == 1
    assert list(fresh.state) == list(state)
    assert bits(fresh.state) == bits(state)


def test_objects_in_lists_and_below_other_keys(tmp_path):
    things = [Stateful(n=1), Stateful(n=2)]
    sk.save({"app": {"list": things, "tuple": (Stateful(n=3), 5), "step": 1}}, tmp_path / "c")
    fresh = {"app": {"list": [Stateful(), Stateful()], "tuple": (Stateful(), 0), "step": 0}}
    first = fresh["app"]["list"][0]
    sk.load(fresh, tmp_path / "c")
    assert [thing.state for thing in fresh["app"]["list"]] == [{"n": 1}, {"n": 2}]
    assert fresh["app"]["list"][0] is first
    assert fresh["app"]["tuple"][0].state == {"n": 3}
    assert fresh["app"]["tuple"][1] == 5
    assert fresh["app"]["step"] == 1


def test_an_object_the_checkpoint_lacks_is_missing(tmp_path):
    sk.save({"a": Stateful(n=1)}, tmp_path / "c")
    state = {"a": Stateful(), "new": Stateful(n=5)}
    with pytest.raises(sk.StateMismatch, match="new"):
        sk.load(state, tmp_path / "c")
    assert state["a"].loads == 0
    report = sk.load(state, tmp_path / "c", strict=False)
    assert report.missing == ["new"]
    assert state["new"].loads == 0
    assert state["a"].state == {"n": 1}


def test_an_object_that_nothing_asks_for_is_unexpected(tmp_path):
    sk.save({"a": Stateful(n=1), "b": Stateful(n=2)}, tmp_path / "c")
    with pytest.raises(sk.StateMismatch, match=r"b\.n"):
        sk.load({"a": Stateful()}, tmp_path / "c")


def test_selection_and_renaming_reach_objects(tmp_path):
    sk.save({"a": Stateful(x=1, y=2), "b": Stateful(n=2)}, tmp_path / "c")
    state = {"a": Stateful(), "b": Stateful()}
    sk.load(state, tmp_path / "c", exclude="b")
    assert (state["a"].state, state["b"].loads) == ({"x": 1, "y": 2}, 0)
    state = {"a": Stateful(), "b": Stateful()}
    sk.load(state, tmp_path / "c", include="a.x")
    assert (state["a"].state, state["b"].loads) == ({"x": 1}, 0)
    state = {"first": Stateful(), "b": Stateful()}
    sk.load(state, tmp_path / "c", rename={"a": "first"})
    assert state["first"].state == {"x": 1, "y": 2}


def test_a_state_dict_that_is_no_mapping_is_refused(tmp_path):
    with pytest.raises(sk.UnsupportedLeaf, match="'odd'"):
        sk.save({"odd": Stateful([1, 2])}, tmp_path / "c")


def test_state_that_differs_between_ranks_is_each_ranks_own(tmp_path):
    """A loader's position is stored for every rank, a scheduler's once, without being marked."""

    def state(world):
        return {"loader": Stateful(position=world.rank, seed=torch.tensor([world.rank])), "sched": Stateful(lr=0.5)}

    saved(3, tmp_path / "c", state)
    load = loading(tmp_path / "c", lambda _: {"loader": Stateful(), "sched": Stateful()})
    for rank, found in enumerate(run_thread_ranks(3, load)):
        assert found["loader"].state == {"position": rank, "seed": torch.tensor([rank])}
        assert found["sched"].state == {"lr": 0.5}
    names = list(sk.open(tmp_path / "c").keys())
    assert "sched.lr" in names
    assert "loader.@2.position" in names


def test_on_another_number_of_ranks_the_object_decides(tmp_path):
    """`load_rank_states` gets what all ranks saved; an object without it is an error that names it."""
    where = tmp_path / "c"
    saved(3, where, lambda world: {"loader": Stateful(position=10 + world.rank), "n": 1})
    for rank, found in enumerate(run_thread_ranks(2, loading(where, lambda _: {"loader": Loader(), "n": 0}))):
        assert found["loader"].state == {"positions": [10, 11, 12], "rank": rank, "of": 2}
    for outcome in thread_outcomes(2, loading(where, lambda _: {"loader": Stateful(), "n": 0})):
        assert isinstance(outcome, sk.StateMismatch)
        assert "load_rank_states" in str(outcome)
        assert "'loader' was saved per rank by 3 ranks" in str(outcome)
    left_out = loading(where, lambda _: {"loader": Stateful(), "n": 0}, exclude="loader")
    assert [found["loader"].state for found in run_thread_ranks(2, left_out)] == [{}, {}]


def test_what_other_ranks_saved_is_not_this_ranks(tmp_path):
    """As many ranks saved a part that is still there as load it, but others: rank 1 of two, and now rank 0 alone."""
    saved(2, tmp_path / "c", lambda world: {"o": Stateful(n=world.rank)})
    sk.convert(tmp_path / "c", tmp_path / "d", "native", drop="o.@0")
    with pytest.raises(sk.StateMismatch, match="'o' was saved per rank by 1 rank; this is rank 0 of 1"):
        sk.load({"o": Stateful(n=0)}, tmp_path / "d")


def test_a_failing_object_fails_on_every_rank(tmp_path):
    class Broken(Stateful):
        def state_dict(self):
            raise ValueError("no state today")

    def save(world):
        return sk.save({"thing": Broken() if world.rank else Stateful(n=1)}, tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, save):
        assert "no state today" in str(outcome)
    with pytest.raises(sk.CheckpointNotFound):
        sk.open(tmp_path / "c")


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_go_on_as_they_would_have(tmp_path):
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
    """On as many ranks, the same; on more, the new ones get numbers of their own, the same on every resume."""
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
    """Two megabytes that differ in one half: each rank gets its own; equal ones are stored once."""

    def tensor(rank):
        data = torch.zeros(1 << 19)
        data[1 << 18 :] = rank
        return data

    saved(2, tmp_path / "c", lambda world: {"own": Stateful(t=tensor(world.rank)), "same": Stateful(t=tensor(7))})
    assert "same.t" in list(sk.open(tmp_path / "c").keys())
    load = loading(tmp_path / "c", lambda _: {"own": Stateful(), "same": Stateful()})
    for rank, found in enumerate(run_thread_ranks(2, load)):
        assert torch.equal(found["own"].state["t"], tensor(rank))
        assert torch.equal(found["same"].state["t"], tensor(7))


def test_what_an_object_shows_is_never_written_to(tmp_path):
    """An average that shows the model's own tensors until its first update is given new ones; the model stays."""
    model = nn.Linear(2, 2)
    sk.save({"e": Stateful({"w": torch.zeros(2, 2), "row": torch.full((2,), 7.0)}), "m": model}, tmp_path / "c")
    before = bits(model.weight)
    average = Stateful({"w": model.weight.detach(), "row": model.weight.detach()[0]})
    sk.load({"e": average, "m": model}, tmp_path / "c", include="e")
    assert bits(model.weight) == before
    assert torch.equal(average.state["w"], torch.zeros(2, 2))
    assert torch.equal(average.state["row"], torch.full((2,), 7.0))


def test_an_object_that_cannot_show_its_state_yet_is_loaded(tmp_path):
    """`state_dict` is asked at load only for layouts; one that raises before a start is no hindrance."""

    def not_started():
        raise RuntimeError("not started")

    sk.save({"s": Stateful({"a": 5})}, tmp_path / "c")
    fresh = Stateful(not_started)
    sk.load({"s": fresh}, tmp_path / "c")
    assert fresh.state == {"a": 5}


def test_objects_that_decide_are_asked_even_if_ranks_agreed(tmp_path):
    """Equal positions, or those of one rank: `load_rank_states` is still called if the number of ranks changes."""
    saved(4, tmp_path / "c", lambda _: {"l": Loader({"position": 100})})
    for rank, found in enumerate(run_thread_ranks(2, loading(tmp_path / "c", lambda _: {"l": Loader()}))):
        assert found["l"].state == {"positions": [100] * 4, "rank": rank, "of": 2}


def test_what_differs_beside_spread_tensors_is_refused_or_wrapped(tmp_path):
    """An object with shards cannot be per rank as a whole: what differs in it is named, and PerRank works."""

    def shard(world):
        return sk.ShardedBox(torch.full((2,), float(world.rank)), offsets=(2 * world.rank,), shape=(4,))

    def save(wrap):
        def run(world):
            noise = torch.tensor([world.rank])
            sk.save({"s": Stateful({"w": shard(world), "noise": wrap(noise)})}, tmp_path / "c", group=world)

        return run

    def load(world):
        thing = Stateful({"w": shard(world), "noise": sk.PerRank(torch.zeros(1, dtype=torch.int64))})
        sk.load({"s": thing}, tmp_path / "c", group=world)
        return thing.state["noise"].value.item()

    for outcome in thread_outcomes(2, save(lambda noise: noise)):
        assert isinstance(outcome, sk.ReplicasDiffer)
        assert "'s.noise'" in str(outcome)
    run_thread_ranks(2, save(sk.PerRank))
    assert run_thread_ranks(2, load) == [0, 1]


def test_an_object_is_not_replaced_by_a_value(tmp_path):
    for saved in (3, torch.ones(2)):
        sk.save({"s": saved}, tmp_path / "c", overwrite=True)
        state = {"s": Stateful()}
        with pytest.raises(sk.StateMismatch, match="single value"):
            sk.load(state, tmp_path / "c")
        assert isinstance(state["s"], Stateful)


def test_per_rank_inside_and_around_objects(tmp_path):
    """A state dict may hold PerRank; PerRank may hold objects, modules and RNG; an optimizer outside it is refused."""

    def save(world):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, world.rank)
        state = {"t": Stateful({"p": sk.PerRank(world.rank)}), "r": sk.PerRank(sk.RNG()), "m": sk.PerRank(model)}
        sk.save(state, tmp_path / "c", group=world)
        sk.save({"m": sk.PerRank(model), "o": torch.optim.SGD(model.parameters())}, tmp_path / "d", group=world)

    def load(world):
        model, thing = nn.Linear(1, 1), Stateful()
        sk.load({"t": thing, "r": sk.PerRank(sk.RNG()), "m": sk.PerRank(model)}, tmp_path / "c", group=world)
        return thing.state["p"].value, model.weight.item()

    for outcome in thread_outcomes(2, save):
        assert isinstance(outcome, sk.StateError)
        assert "put the optimizer into a PerRank too" in str(outcome)
    assert run_thread_ranks(2, load) == [(0, 0.0), (1, 1.0)]


def test_containers_keep_their_classes(tmp_path):
    shows = {"c": Counter({3: 2}), "d": defaultdict(int, a=1), "t": Pair(torch.ones(1), 2)}
    sk.save({"s": Stateful(shows)}, tmp_path / "c")
    fresh = Stateful({"c": Counter(), "d": defaultdict(int), "t": Pair(0, 0)})
    sk.load({"s": fresh}, tmp_path / "c")
    assert [type(value) for value in fresh.state.values()] == [Counter, defaultdict, Pair]
    assert fresh.state["c"] == shows["c"]


def test_the_order_of_keys_is_no_difference(tmp_path):
    items = [("a", 1), ("b", 2)]
    saved(2, tmp_path / "c", lambda world: {"s": Stateful(dict(items if world.rank else items[::-1]))})
    assert sorted(sk.open(tmp_path / "c").keys()) == ["s.a", "s.b"]


def test_objects_on_some_ranks_only_are_refused(tmp_path):
    sk.save({"s": Stateful({"a": 1}), "w": torch.ones(2)}, tmp_path / "c")
    tensors = [torch.zeros(2), torch.zeros(2)]

    def load(world):
        sk.load({"w": tensors[world.rank]} | ({} if world.rank else {"s": Stateful()}), tmp_path / "c", group=world)

    for outcome in thread_outcomes(2, load):
        assert isinstance(outcome, sk.RanksDisagree)
        assert "'s'" in str(outcome)
    assert not any(tensor.any() for tensor in tensors)
