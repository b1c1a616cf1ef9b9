"""Taking a nested state apart and putting new leaves back in place."""

import collections
import itertools
import random
import types
import typing
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import KeyCollision, StateError, UnsupportedLeaf
from shardkeep.format.values import decode_tree, encode_tree, leaf_keys, unflatten
from shardkeep.state.flatten import flatten, refill
from shardkeep.state.leaves import PerRank


class Tensor:
    """Stands for a tensor: equal only to itself."""


class Pair(typing.NamedTuple):
    left: object
    right: object


class TensorTuple(tuple):
    __slots__ = ()


class Frozen(Mapping):
    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


def is_tensor(value):
    return isinstance(value, Tensor | TensorTuple | torch.Tensor)


def flat(state, rank=0):
    found = flatten(state, rank=rank, is_tensor=is_tensor)
    assert found.classes == set(map(type, found.leaves))
    return found.by_name(), found.tree


def fill(state, leaves, rank=0):
    refill(state, leaves, rank=rank, is_tensor=is_tensor)


def training_state():
    t = [Tensor() for _ in range(6)]
    return t, {
        "model": collections.OrderedDict([("layer.0.weight", t[0]), ("layer.0.bias", t[1])]),
        "optim": {
            "state": {0: {"step": t[2], "exp_avg": t[3]}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "rng": PerRank({"python": random.Random(0).getstate(), "cuda": [t[4]]}),
        "extra": (t[5], Pair({"a": 1}, None)),
        "empty": {},
        "none": [],
        "step": 10,
    }


def test_a_training_state():
    """Mappings and lists of dicts or tensors are walked, lists of numbers are one leaf, empty containers stay."""
    t, state = training_state()
    leaves, tree = flat(state, rank=3)

    assert {
        "model.layer.0.weight": t[0],
        "model.layer.0.bias": t[1],
        "optim.state.0.step": t[2],
        "optim.state.0.exp_avg": t[3],
        "optim.param_groups.0.lr": 0.1,
        "optim.param_groups.0.betas": (0.9, 0.99),
        "optim.param_groups.0.params": [0, 1],
        "rng.@3.python": random.Random(0).getstate(),
        "rng.@3.cuda.0": t[4],
        "extra.0": t[5],
        "extra.1.0.a": 1,
        "extra.1.1": None,
        "none": [],
        "step": 10,
    } == leaves
    assert list(leaves) == list(leaf_keys(tree))

    nested = unflatten(decode_tree(encode_tree(tree)), leaves.__getitem__)
    assert list(nested) == list(state)
    assert type(nested["model"]) is collections.OrderedDict
    assert (nested["empty"], nested["none"]) == ({}, [])
    assert {3: {"python": random.Random(0).getstate(), "cuda": [t[4]]}} == nested["rng"]
    assert (t[5], ({"a": 1}, None)) == nested["extra"]


def test_what_is_walked():
    """A list is walked only for a tensor, a mapping or a PerRank at some depth; some tuples are always leaves."""
    size, tensor = torch.Size([2, 3]), Tensor()
    plain = [[1, 2], (None, "a", [b"x"]), size, {1}]
    state = {
        "plain": plain, "size": size, "sizes": [size], "deep": [[[tensor]]], "map": [[], [{}]], "rank": ([PerRank(1)],),
        "framework": TensorTuple((1, {})), "frozen": Frozen(a=1), "default": collections.defaultdict(int, b=2),
        "proxy": types.MappingProxyType({"c": 3}), "array": np.zeros(3), "set": {1}, "named": Pair(1, 2),
    }  # fmt: skip
    leaves, tree = flat(state)

    expected = [
        "plain", "size", "sizes", "deep.0.0.0", "map.0", "rank.0.0.@0", "framework", "frozen.a", "default.b", "proxy.c",
        "array", "set", "named",
    ]  # fmt: skip
    assert expected == list(leaves)
    assert leaves["plain"] is plain
    kinds = {part: node.kind for part, node in tree.children if node is not None}
    assert kinds == {
        "deep": "list", "map": "list", "rank": "tuple", "frozen": "dict", "default": "dict", "proxy": "dict",
    }  # fmt: skip


def test_per_rank_around_a_leaf():
    assert flat({"seed": PerRank(5)}, rank=7)[0] == {"seed.@7": 5}
    assert flat({"seed": PerRank([1, 2])}, rank=7)[0] == {"seed.@7": [1, 2]}


@pytest.mark.parametrize("inner", [PerRank(1), {"a": PerRank(1)}, [0, PerRank(1)]], ids=repr)
def test_per_rank_does_not_nest(inner):
    with pytest.raises(UnsupportedLeaf, match=r"'x\.@0.*' is a PerRank inside a PerRank"):
        flat({"x": PerRank(inner)})


@pytest.mark.parametrize(
    ("state", "name", "first", "second"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "a.b", ["a.b"], ["a", "b"]),
        ({"a": {1: 1, "1": 2}}, "a.1", ["a", 1], ["a", "1"]),
        ({"a": {None: 1}, "a.None": 2}, "a.None", ["a", None], ["a.None"]),
        ({"r": PerRank(1), "r.@0": 2}, "r.@0", ["r", 0], ["r.@0"]),
        ({"": {"": 1}, ".": 2}, ".", ["", ""], ["."]),
    ],
)
def test_collisions_name_both_paths(state, name, first, second):
    with pytest.raises(KeyCollision) as caught:
        flat(state)
    assert f"{name!r}: {first!r} and {second!r}" in caught.value.message


@pytest.mark.parametrize("key", [frozenset(), 1j, 2**64, np.int64(1), (1, 1j), torch.float32, "\ud800"], ids=repr)
def test_keys_that_cannot_be_stored(key):
    with pytest.raises(UnsupportedLeaf, match=r"'a\.b' has a key "):
        flat({"a": {"b": {key: 1}}})
    with pytest.raises(UnsupportedLeaf, match="the state has a key "):
        flat({key: 1})


def test_every_storable_key():
    state = {key: Tensor() for key in ["", "é", 1, -1, 2.5, None, b"x", (1, ("a",)), False]}
    leaves, tree = flat(state)
    assert state == unflatten(decode_tree(encode_tree(tree)), leaves.__getitem__)
    assert [repr(key) for key in state] == [repr(part) for part, _ in decode_tree(encode_tree(tree)).children]


def test_cycles_are_refused():
    by_dict = {"a": {}}
    by_dict["a"]["b"] = by_dict
    by_list = {"a": [{}]}
    by_list["a"].append(by_list["a"])
    by_rank = {"a": PerRank({})}
    by_rank["a"].value["b"] = by_rank
    only_lists = {"a": [1]}
    only_lists["a"].append(only_lists["a"])
    for state in (by_dict, by_list, by_rank, only_lists):
        with pytest.raises(UnsupportedLeaf, match="contains itself, as 'a"):
            flat(state)
        with pytest.raises(UnsupportedLeaf, match="contains itself"):
            fill(state, {})
    shared = {"x": Tensor()}
    assert list(flat({"a": shared, "b": shared})[0]) == ["a.x", "b.x"]


def test_depth_is_limited():
    state = {}
    for _ in range(100):
        state = {"a": state}
    with pytest.raises(UnsupportedLeaf, match="100 levels"):
        flat(state)
    assert flat(state["a"])[0] == {}
    deep = [1]
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsupportedLeaf, match="100 levels"):
        flat({"a": deep})


@pytest.mark.parametrize("state", [[1], None, Tensor(), PerRank({})], ids=lambda s: type(s).__name__)
def test_the_top_must_be_a_mapping(state):
    for call in (flat, lambda s: fill(s, {})):
        with pytest.raises(UnsupportedLeaf, match=f"is a {type(state).__name__}, expected a mapping") as caught:
            call(state)
        assert "pass a dict" in caught.value.hint
        assert isinstance(caught.value, TypeError)


# Refilling


def test_refill_replaces_every_leaf_in_place():
    _, state = training_state()
    held = [state["model"], state["optim"]["state"][0], state["optim"]["param_groups"], state["rng"]]
    held.append(state["rng"].value["cuda"])
    leaves, tree = flat(state, rank=2)
    new = {name: Tensor() for name in leaves}
    fill(state, new, rank=2)
    again, same_tree = flat(state, rank=2)
    assert new == again
    assert tree == same_tree
    now = [state["model"], state["optim"]["state"][0], state["optim"]["param_groups"], state["rng"]]
    now.append(state["rng"].value["cuda"])
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert type(state["extra"][1]) is Pair


class Watched(dict):
    def __init__(self, items):
        super().__init__(items)
        self.assigned = []

    def __setitem__(self, key, value):
        self.assigned.append(key)
        super().__setitem__(key, value)


def test_refill_touches_only_what_changed():
    a, b, pair = Tensor(), Tensor(), (Tensor(), {})
    state = Watched({"a": a, "b": b, "pair": pair, "n": 1, "inner": Watched({"x": 1})})
    fill(state, {"a": a, "n": 2, "elsewhere": 3, "pair.0": pair[0]})
    assert state.assigned == ["n"]
    assert state["inner"].assigned == []
    assert state["pair"] is pair
    assert {"a": a, "b": b, "pair": pair, "n": 2, "inner": {"x": 1}} == state


def test_refill_rebuilds_tuples_inside_their_parents():
    best = torch.max(torch.tensor([[1.0, 2.0]]), dim=1)
    state = {"a": [(Tensor(), Pair(Tensor(), (Tensor(), 5)))], "best": best}
    new = {"a.0.1.1.0": "new", "best.0": "values"}
    fill(state, new)
    assert state["a"][0][1].right[0] == "new"
    assert state["a"][0][1].right[1] == 5
    assert type(state["a"][0][1]) is Pair
    assert type(state["best"]) is type(best)
    assert state["best"].values == "values"
    assert state["best"].indices is best.indices


def test_refill_of_a_per_rank_leaf():
    state = {"seed": PerRank(5), "list": PerRank([1])}
    fill(state, {"seed.@0": 6, "seed.@1": 7, "list.@1": [2]}, rank=1)
    assert (state["seed"].value, state["list"].value) == (7, [2])


class Strict(tuple):
    """A tuple whose constructor takes no sequence."""

    __slots__ = ()

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


def test_refill_says_what_cannot_be_changed():
    state = {"a": {"f": Frozen(x=1)}, "s": Strict(Tensor(), 1)}
    fill(state, {"a.f.x": state["a"]["f"]["x"]})
    with pytest.raises(StateError, match=r"'a\.f' is a Frozen, which cannot be changed, and 'x' in it must be"):
        fill(state, {"a.f.x": 2})
    with pytest.raises(StateError, match="'s' is a Strict, a tuple that cannot be built"):
        fill(state, {"s.1": 2})


names = st.text(st.characters(codec="utf-8", exclude_characters="."), max_size=3)
leaf_values = st.builds(Tensor) | st.integers() | st.text() | st.none() | st.lists(st.integers())
states = st.dictionaries(
    names,
    st.recursive(
        leaf_values,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=4),
            st.dictionaries(names, inner, max_size=4).map(collections.OrderedDict),
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=12,
    ),
    max_size=4,
)


def as_plain(value):
    if isinstance(value, Mapping):
        return type(value)((key, as_plain(item)) for key, item in value.items())
    if isinstance(value, tuple):
        return tuple(map(as_plain, value))
    return [as_plain(item) for item in value] if isinstance(value, list) else value


def changed(value, number, draw):
    """A copy of a state in which the child that `number` reaches first is changed: a value, a key, an order or a kind."""
    if next(number) == 0:
        items = list(value.items()) if isinstance(value, Mapping) else []
        keys = st.sampled_from([False, True, 0, 1, 0.0, "a", b"", None])
        return draw(
            st.sampled_from([Tensor(), {}, [], [1], [Tensor()], {"a": Tensor()}, PerRank({"a": 1}), 1, True])
            | st.just(dict(items))
            | st.just(collections.OrderedDict(items[::-1]))
            | keys.map(lambda key: dict([*items[:-1], *((key, child) for _, child in items[-1:])]))
        )
    if isinstance(value, Mapping):
        return type(value)((key, changed(child, number, draw)) for key, child in value.items())
    if isinstance(value, PerRank):
        return PerRank(changed(value.value, number, draw))
    if isinstance(value, tuple | list):
        return getattr(type(value), "_make", type(value))([changed(child, number, draw) for child in value])
    return value


def flat_or_error(state, **kept):
    try:
        found = flatten(state, rank=0, is_tensor=is_tensor, **kept)
    except (UnsupportedLeaf, KeyCollision) as exc:
        return str(exc)
    return found.names, list(map(id, found.leaves)), found.classes, encode_tree(found.tree)


@settings(max_examples=100, deadline=None)
@given(states, st.data())
def test_a_state_that_has_changed_is_flattened_as_if_no_form_was_kept(state, data):
    """Whatever changes in keys, values and kinds of containers, and however little, is noticed."""
    forms, instead = [], {"training": training_state()[1]}
    state = {**state, **instead}
    for _ in range(4):
        for each in ({}, instead):
            assert flat_or_error(state, in_place_of=each, kept=forms) == flat_or_error(state, in_place_of=each)
        numbers = [itertools.count(-data.draw(st.integers(1, 30))) for _ in range(2)]
        state, instead = (
            changed(each, number, data.draw) for each, number in zip((state, instead), numbers, strict=True)
        )


@settings(max_examples=100, deadline=None)
@given(states)
def test_random_states_come_back(state):
    """Flatten, encode, decode, unflatten is the identity (namedtuples become tuples); refill takes every new leaf."""
    leaves, tree = flat(state)
    rebuilt = unflatten(decode_tree(encode_tree(tree)), leaves.__getitem__)
    assert as_plain(state) == as_plain(rebuilt)
    assert repr(as_plain(state)) == repr(as_plain(rebuilt))
    new = {name: Tensor() for name in leaves}
    fill(state, new)
    # A plain list that became a tensor changes nothing else: the skeleton is the same.
    assert (new, tree) == flat(state)
