"""Loads that must be refused before anything changes, and requests that must be met exactly."""

import types

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.state import leaves as devices
from shardkeep.testing.thread_ranks import run_thread_ranks, thread_outcomes
from tests.engine.samples import bits


@pytest.fixture
def saved(tmp_path):
    state = {"model": {"a": torch.arange(8.0).reshape(2, 4), "b": torch.ones(2, 4)}, "step": 7, "name": "run"}
    sk.save(state, tmp_path / "ck")
    return tmp_path / "ck"


def zeros():
    return {"model": {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}, "step": 0, "name": ""}


def test_tied_meta_tensors_are_what_each_asked_for(tmp_path):
    """Tied in the checkpoint, two templates become one object only if they ask for the same."""
    weight = torch.randn(3)
    sk.save(dict.fromkeys("abcde", weight), tmp_path / "ck")
    meta = torch.empty(3, device="meta")
    state = {
        "a": meta,
        "b": torch.empty(3, dtype=torch.bfloat16, device="meta"),
        "c": torch.nn.Parameter(meta),
        "d": torch.nn.Parameter(meta, requires_grad=False),
        "e": torch.empty(3, device="meta"),
    }

    sk.load(state, tmp_path / "ck", cast="b")

    assert state["a"] is state["e"]
    assert state["b"].dtype == torch.bfloat16
    assert type(state["a"]) is torch.Tensor
    assert isinstance(state["c"], torch.nn.Parameter)
    assert [state[key].requires_grad for key in "acd"] == [False, True, False]
    assert all(torch.equal(state[key].detach(), weight.to(state[key].dtype)) for key in "abcde")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("cast", torch.float32),
        ("cast", np.float32),
        ("include", 5),
        ("exclude", ["step", 5]),
        ("rename", "x"),
        ("rename", 5),
        ("rename", {"model": 5}),
        ("rename", [("(", "x")]),
        ("rename", [("step", r"\9")]),
        ("rename", [("a", "b", "c")]),
        ("rename", lambda _: 5),
    ],
)
def test_arguments_that_make_no_sense_are_named(saved, argument, value):
    state = zeros()
    with pytest.raises(sk.StateError, match=argument):
        sk.load(state, saved, **{argument: value})
    assert state["step"] == 0


@pytest.mark.parametrize(
    "wrong",
    [{"io_threads": 0}, {"io_threads": "4"}, {"timeout_s": "5m"}, {"timeout_s": -1}, {"timeout_s": float("nan")}],
)
def test_options_that_make_no_sense_are_named(wrong):
    """Where they are made, and not by the rank that waits with them later."""
    [(name, value)] = wrong.items()
    with pytest.raises(sk.StateError, match=f"{name}={value!r}"):
        sk.Options(**wrong)


def test_patterns_that_can_be_gone_through_once_hold_to_the_end(saved):
    """A generator of names selects the same names in every step of a load; None is no permission to convert."""
    assert sk.load(zeros(), saved, include=(name for name in ["step", "name"])).unexpected == []
    state = zeros()
    state["model"]["a"] = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(sk.StateMismatch, match="float64 in the state"):
        sk.load(state, saved, cast=None)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.zeros(5).unfold(0, 4, 1),
        lambda: torch.zeros(9)[1:].as_strided((2, 4), (1, 1), 1),
        lambda: torch.zeros(4).expand(2, 4),
        lambda: np.lib.stride_tricks.sliding_window_view(np.zeros(5, np.float32), 4, writeable=True),
    ],
)
def test_views_that_overlap_themselves_are_refused(tmp_path, view):
    sk.save({"x": torch.arange(8.0).reshape(2, 4)}, tmp_path / "ck")
    with pytest.raises(sk.StateError, match="share memory"):
        sk.load({"x": view()}, tmp_path / "ck")


def overlapping():
    buffer = torch.arange(16.0).reshape(4, 4)
    return [buffer], {"buffer": buffer, "rows": buffer[1:3], "turned": buffer.t()}


def interleaved():
    columns, vector = torch.arange(12.0).reshape(3, 4), torch.arange(10.0)
    state = {f"c{i}": column for i, column in enumerate(columns.unbind(1))}
    return [columns, vector], state | {"even": vector[::2], "odd": vector[1::2], "tied": vector[::2]}


@pytest.mark.parametrize("views", [overlapping, interleaved])
def test_a_state_of_views_of_one_memory_loads_what_it_saved(tmp_path, views):
    """A buffer, its rows and its transpose, and views that only interleave, are saved each by itself, and filled again."""
    memory, state = views()
    sk.save(state, tmp_path / "ck")
    expected = bits(memory)
    for each in memory:
        each.zero_()
    sk.load(state, tmp_path / "ck")
    assert bits(memory) == expected


@pytest.mark.parametrize(
    "leaf",
    [torch.zeros(1, 4).expand(2, 4), torch.zeros(2, 4).to_sparse(), torch.zeros(4).unfold(0, 2, 1)],
    ids=["expanded", "sparse", "overlapping"],
)
def test_excluded_leaves_may_be_anything(saved, leaf):
    """What is not to be loaded is not looked at; `exclude` wins over `include`."""
    state = zeros()
    state["model"]["a"] = leaf
    sk.load(state, saved, include="model", exclude="model.a")
    assert state["model"]["a"] is leaf
    assert state["model"]["b"].all()


def test_a_pattern_for_one_rank_is_no_error_on_the_others(tmp_path):
    sk.save({"x": torch.ones(2)}, tmp_path / "ck")

    def load(world):
        state = {"x": torch.zeros(2)} | ({"mine": 1} if world.rank == 1 else {})
        sk.load(state, tmp_path / "ck", exclude="mine", group=world)
        return bool(state["x"].all())

    assert run_thread_ranks(2, load) == [True, True]


class Odd(tuple):
    __slots__ = ()

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


@pytest.mark.parametrize(
    ("plain", "odd"),
    [
        (lambda tensor: {"w": tensor}, lambda tensor: types.MappingProxyType({"w": tensor})),
        (lambda tensor: (tensor, 1), lambda tensor: Odd(tensor, 1)),
    ],
    ids=["mapping", "tuple"],
)
def test_containers_that_cannot_change_are_found_before_anything_does(tmp_path, plain, odd):
    sk.save({"x": torch.ones(2), "o": plain(torch.ones(2))}, tmp_path / "ck")
    states = {}

    def load(world):
        inner = (odd if world.rank == 1 else plain)(torch.empty(2, device="meta"))
        states[world.rank] = {"x": torch.zeros(2), "o": inner}
        sk.load(states[world.rank], tmp_path / "ck", group=world)

    errors = thread_outcomes(2, load)
    assert all(isinstance(error, sk.StateError) for error in errors), errors
    assert not any(state["x"].any() for state in states.values())


@pytest.mark.parametrize(
    ("stored", "mine", "line"),
    [
        (3, "adam", "v: a str in the state, an int in the checkpoint"),
        ("adam", 3, "v: an int in the state, a str in the checkpoint"),
        (b"x", "x", "v: a str in the state, a bytes in the checkpoint"),
        (1.5, [1, 2], "v: a list in the state, a float in the checkpoint"),
        ({1}, [1], "v: a list in the state, a set in the checkpoint"),
    ],
)
def test_a_value_of_another_kind_is_a_mismatch(tmp_path, stored, mine, line):
    sk.save({"v": stored}, tmp_path / "ck")
    state = {"v": mine}
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load(state, tmp_path / "ck")
    assert caught.value.mismatched == [line]
    assert "strict=False" in str(caught.value)
    assert state["v"] == mine
    sk.load(state, tmp_path / "ck", strict=False)
    assert state["v"] == stored


@pytest.mark.parametrize(
    ("stored", "mine"),
    [("x", None), (None, "x"), (1, 2.0), (True, 0), (np.float32(1), 0), (0, np.bool_(1)), ([1], (1, 2))],
)
def test_values_of_one_kind_replace_each_other(tmp_path, stored, mine):
    """Numbers are numbers, lists and tuples sequences, and None goes with anything."""
    sk.save({"v": stored}, tmp_path / "ck")
    state = {"v": mine}
    sk.load(state, tmp_path / "ck")
    assert state["v"] == stored


def test_keys_spelt_like_ranks_are_keys(tmp_path):
    """A dict with the keys "@0" and "@1" is no per-rank state: what nothing asks for is unexpected."""
    sk.save({"x": {"@0": torch.ones(1), "@1": torch.ones(1)}}, tmp_path / "ck")
    with pytest.raises(sk.StateMismatch) as caught:
        sk.load({"x": {"@0": torch.zeros(1)}}, tmp_path / "ck")
    assert caught.value.unexpected == ["x.@1"]


def test_state_of_ranks_that_are_gone_is_left_over_under_any_name(tmp_path):
    """Per-rank state of ranks no longer there is not unexpected, deep inside and renamed as well."""
    run_thread_ranks(
        3, lambda w: sk.save({"r": sk.PerRank({"a": {"n": w.rank}, "b": torch.ones(1)})}, tmp_path / "ck", group=w)
    )
    state = {"s": sk.PerRank({"a": {"n": None}, "b": torch.zeros(1)})}
    report = sk.load(state, tmp_path / "ck", rename={"r": "s"})
    assert report.unexpected == []
    assert state["s"].value["a"]["n"] == 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"local": [1, 2]}, "local"),
        ({"offsets": 0}, "offsets"),
        ({"offsets": (0.0,)}, "offsets"),
        ({"shape": (2.5,)}, "shape"),
    ],
)
def test_a_box_is_checked_when_it_is_made(changed, named):
    right = {"local": torch.ones(2), "offsets": (0,), "shape": (2,)}
    assert sk.ShardedBox(**right).shape == (2,)
    with pytest.raises(sk.StateError, match=named):
        sk.ShardedBox(**right | changed)


def test_each_accelerator_is_waited_for_once(monkeypatch):
    class Fake:
        def __init__(self, device):
            self.device = torch.device(device)

    waited = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    devices.synchronize_devices(map(Fake, ["cpu", "cuda:0", "meta", "cuda:1", "cuda:0"]))
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def test_devices_are_settled_before_and_after_the_read(saved, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "shardkeep.engine.load_session.synchronize_devices", lambda into: seen.append([bool(t.any()) for t in into])
    )
    sk.load(zeros(), saved)
    assert seen == [[False, False], [True, True]]


def test_a_state_in_host_memory_asks_no_accelerator(monkeypatch):
    """torch refuses CUDA to whatever is forked after the first question, be it only whether there is a device."""

    def refuse(*_, **__):
        raise AssertionError("an accelerator was asked")

    for name in ("is_available", "device_count", "current_device_index", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    state = {"w": torch.arange(1000.0), "columns": torch.arange(12).view(3, 4).t(), "step": 1}
    places = [sk.MemoryStore(), sk.MemoryStore()]
    sk.save(state, places[0])
    sk.async_save(state, places[1]).result(60)
    for place in places:
        found = {"w": torch.zeros(1000), "columns": torch.zeros(4, 3, dtype=torch.int64), "step": 0}
        sk.load(found, place)
        assert bits(found) == bits(state)
