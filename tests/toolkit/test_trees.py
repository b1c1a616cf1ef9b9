"""Flattening and traversal by torch's rules, on trees of all sorts."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _state_dict_utils as theirs
from torch.distributed.checkpoint import _nested_dict as their_nested
from torch.distributed.checkpoint import _traverse as their_traverse
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import _nested_dict as our_nested
from shardkeep.dcp import _state_dict_utils as ours
from shardkeep.dcp import _traverse as our_traverse
from shardkeep.errors import KeyCollision, StateError
from shardkeep.state.flatten import flatten_state_dict_v_2_3
from tests.toolkit.samples import in_chunks, mesh_of, numbered, seen, spread_out

# Keys without dots, so that most trees have no two paths of one name; clashes have a test of their own.
KEYS = st.one_of(st.text("abc", min_size=1, max_size=2), st.integers(0, 3))
LEAVES = st.one_of(
    st.integers(0, 3), st.text("x", max_size=2), st.none(), st.builds(numbered, st.integers(0, 2)), st.just((1, 2))
)


def containers(children):
    return st.one_of(
        st.dictionaries(KEYS, children, max_size=3),
        st.lists(children, max_size=3),
        st.lists(children, max_size=2).map(tuple),
        st.dictionaries(KEYS, children, max_size=2).map(OrderedDict),
    )


TREES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=8), max_size=4)


def outcome(func, *args):
    try:
        made = func(*args)
    except ValueError:
        return "ValueError"
    return seen(made)


@pytest.mark.parametrize(
    ("mine", "its", "prefix"),
    [(our_nested, their_nested, ""), (ours, theirs, "_")],
    ids=["_nested_dict", "_state_dict_utils"],
)
@settings(deadline=None)
@given(tree=TREES)
def test_flattening_is_that_of_torch(mine, its, prefix, tree):
    our_flatten, their_flatten = (getattr(module, f"{prefix}flatten_state_dict") for module in (mine, its))
    our_unflatten, their_unflatten = (getattr(module, f"{prefix}unflatten_state_dict") for module in (mine, its))
    before = seen(tree)
    found = outcome(our_flatten, tree)
    assert found == outcome(their_flatten, tree)
    assert seen(tree) == before
    if found != "ValueError":
        flat, mapping = our_flatten(tree)
        assert list(flat) == list(mapping) == list(their_flatten(tree)[0])
        assert seen(our_unflatten(flat, mapping)) == seen(their_unflatten(flat, mapping))


# What every set of rules goes into and leaves a trace of: dicts by name, and lists that hold tensors.
PLAIN = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(
        st.one_of(st.integers(), st.none(), st.builds(numbered, st.just(2))),
        lambda children: st.one_of(
            st.dictionaries(st.text("abc", min_size=1, max_size=2), children, min_size=1, max_size=3),
            st.lists(st.builds(numbered, st.just(2)), min_size=1, max_size=3),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(tree=PLAIN)
def test_there_and_back_is_the_same_tree(tree):
    for flatten in (our_nested.flatten_state_dict, flatten_state_dict_v_2_3, ours._flatten_state_dict):
        flat, mapping = flatten(tree)
        assert seen(our_nested.unflatten_state_dict(flat, mapping)) == seen(tree)
        assert all(our_traverse.get_element(tree, mapping[name]) is value for name, value in flat.items())


def visits(traverse, tree, *more):
    met = []
    traverse(tree, lambda path, value: met.append((path, seen(value))), *more)
    return met


@settings(deadline=None)
@given(tree=TREES)
def test_traversals_are_those_of_torch(tree):
    pairs = [
        (our_traverse.traverse_state_dict, their_traverse.traverse_state_dict),
        (our_traverse.traverse_state_dict_v_2_3, their_traverse.traverse_state_dict_v_2_3),
    ]
    for our_way, their_way in pairs:
        assert visits(our_way, tree) == visits(their_way, tree)
        strings = (lambda value: isinstance(value, str),)
        assert visits(our_way, tree, *strings) == visits(their_way, tree, *strings)
    assert visits(ours._traverse_state_dict, tree) == visits(theirs._traverse_state_dict, tree)


def test_which_rules_a_name_stands_for():
    """The two modules of torch have functions of one name and different rules; here is where they differ."""
    tree = {"numbers": [1, 2], "pair": (torch.ones(1), 2), "in": {"x": 1}, "none": {}, "deep": [[torch.ones(1)], 3]}
    assert list(our_nested.flatten_state_dict(tree)[0]) == ["numbers", "pair", "in.x", "deep.0.0", "deep.1"]
    assert list(ours._flatten_state_dict(tree)[0]) == [
        *("numbers.0", "numbers.1", "pair.0", "pair.1", "in.x", "deep.0.0", "deep.1")
    ]
    assert list(flatten_state_dict_v_2_3(tree)[0]) == ["numbers", "pair", "in", "none", "deep.0.0", "deep.1"]


@pytest.mark.parametrize("flatten", [our_nested.flatten_state_dict, ours._flatten_state_dict, flatten_state_dict_v_2_3])
@pytest.mark.parametrize("tree", [{"a.b": numbered(1), "a": {"b": numbered(1)}}, {1: numbered(1), "1": numbered(1)}])
def test_two_paths_of_one_name_are_an_error(flatten, tree):
    with pytest.raises(KeyCollision, match=r"duplicated flatten key .*both \(.*\) and \("):
        flatten(tree)


@pytest.mark.parametrize("module", ["_traverse", "_state_dict_utils"])
@pytest.mark.parametrize(
    "path", [("a",), ("a", "b"), ("l", 2), ("l", 0, "x"), ("l", 1, 1, 1), ("new", 1, "x", 0), ("a", "new", "er")]
)
def test_elements_are_set_as_torch_does(module, path):
    set_ours = our_traverse.set_element if module == "_traverse" else ours._set_element
    set_theirs = their_traverse.set_element if module == "_traverse" else theirs._set_element
    trees = [{"a": {"b": 1}, "l": [None]} for _ in range(2)]
    set_ours(trees[0], path, 5)
    set_theirs(trees[1], path, 5)
    assert trees[0] == trees[1]
    assert our_traverse.get_element(trees[0], path) == 5


@pytest.mark.parametrize(
    ("path", "held"), [(("a", "b"), "int"), (("l", "x"), "list"), (("n", 0), "NoneType"), ((), "")]
)
def test_a_value_in_the_way_is_an_error(path, held):
    tree = {"a": 1, "l": [1], "n": None}
    with pytest.raises(StateError, match=held or "path"):
        our_traverse.set_element(tree, path, 5)
    assert tree == {"a": 1, "l": [1], "n": None}


def test_elements_that_are_not_there_are_the_default():
    """Missing keys, wrong kinds, and an index just past the end, at which torch's raises IndexError."""
    tree = {"a": {"b": [1, 2]}}
    found = [our_traverse.get_element(tree, path, "none") for path in [("a", "b", 1), ("a", "b", 2), ("a", "b", 3)]]
    assert found == [2, "none", "none"]
    assert our_traverse.get_element(tree, ("x",)) is None
    assert our_traverse.get_element(tree, ("a", 0), "none") == "none"
    assert our_traverse.get_element(tree, ("a", "b", "c"), "none") == "none"


def printed_both():
    tree = {
        "d": spread_out(numbered(5, 2), mesh_of(dist.get_world_size()), Cut(0)),
        "s": in_chunks(numbered(3, 2)),
        "t": [numbered(2)],
        "n": 3,
    }
    said = []
    for module in (our_traverse, their_traverse):
        lines = []
        module.traverse_state_dict(tree, lambda path, value: module.print_tensor(path, value, lines.append))  # noqa: B023
        said.append(lines)
    return said[0] == said[1], len(said[0])


def test_printing_is_that_of_torch(rank_pool):
    assert rank_pool.run(2, printed_both) == [(True, 6)] * 2


def test_traverse_obj_goes_into_everything():
    """`_traverse_obj`, inside of a function in torch, is a function of its own."""
    met = []
    ours._traverse_obj(("a",), {"b": (1, [2])}, lambda path, value: met.append((path, value)))
    assert met == [(("a", "b", 0), 1), (("a", "b", 1, 0), 2)]
