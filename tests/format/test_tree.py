"""The skeleton of a state: it comes back exactly, merges over ranks, and no byte string does harm."""

import collections
import functools
import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import CheckpointError, InvalidShards, KeyCollision, MalformedFile, PickleRefused, UnsupportedLeaf
from shardkeep.format.values import (
    MAX_TREE_DEPTH,
    Container,
    decode_tree,
    encode_tree,
    encode_value,
    is_part,
    leaf_keys,
    merge_trees,
    refuse_collisions,
    unflatten,
)


def box(kind, *children):
    """A container; lists and tuples take nodes alone, the others (part, node)."""
    return Container(kind, tuple(enumerate(children) if kind in ("list", "tuple") else children))


STATE = box(
    "dict",
    ("model", box("odict", ("layer.0.weight", None), ("layer.0.bias", None))),
    ("optim", box("dict", ("state", box("dict", (0, box("dict", ("step", None))))), ("groups", box("list", None)))),
    ("odd", box("dict", (None, None), (b"x", None), (1.5, None), (True, None), ((1, ("a",)), None), ("", None))),
    ("rng", box("ranks", (0, None), (3, box("tuple", None, box("dict"))))),
    ("empty", box("dict")),
    ("step", None),
)


def simple_parts():
    return st.one_of(st.text(), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.floats(), st.none(), st.binary())


parts = st.recursive(simple_parts(), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)


def containers(inner):
    def keyed(kind, keys):
        return st.dictionaries(keys, inner, max_size=4).map(lambda d: Container(kind, tuple(d.items())))

    def indexed(kind):
        return st.lists(inner, max_size=4).map(lambda nodes: Container(kind, tuple(enumerate(nodes))))

    return st.one_of(
        keyed("dict", parts),
        keyed("odict", parts),
        keyed("ranks", st.integers(0, 2**40)),
        indexed("list"),
        indexed("tuple"),
    )


trees = st.recursive(st.none(), containers, max_leaves=12)
# Keys that never collide as flat names, as those of one real program.
plain_trees = st.recursive(
    st.none(),
    lambda inner: st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4).map(
        lambda d: Container("dict", tuple(d.items()))
    ),
    max_leaves=10,
).filter(lambda node: node is not None)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_comes_back(tree):
    assert repr(tree) == repr(decode_tree(encode_tree(tree)))


def test_flat_names_are_parts_joined_by_dots():
    """Leaves come in the order of the state; ranks show as @."""
    expected = [
        "model.layer.0.weight", "model.layer.0.bias", "optim.state.0.step", "optim.groups.0", "odd.None", "odd.b'x'",
        "odd.1.5", "odd.True", "odd.(1, ('a',))", "odd.", "rng.@0", "rng.@3.0", "step",
    ]  # fmt: skip
    assert expected == list(leaf_keys(STATE))
    assert expected == list(leaf_keys(decode_tree(encode_tree(STATE))))
    assert list(leaf_keys(box("dict", ("", None), (".", None), ("", box("dict", (".a", None)))))) == ["", ".", "..a"]


def test_unflatten_builds_the_real_containers():
    """The nested state has the kinds, order and keys of the skeleton; ranks become a dict; a leaf or list is no state."""
    state = unflatten(STATE, str.upper)
    assert state == {
        "model": {"layer.0.weight": "MODEL.LAYER.0.WEIGHT", "layer.0.bias": "MODEL.LAYER.0.BIAS"},
        "optim": {"state": {0: {"step": "OPTIM.STATE.0.STEP"}}, "groups": ["OPTIM.GROUPS.0"]},
        "odd": {
            None: "ODD.NONE", b"x": "ODD.B'X'", 1.5: "ODD.1.5", True: "ODD.TRUE", (1, ("a",)): "ODD.(1, ('A',))", "": "ODD.",
        },
        "rng": {0: "RNG.@0", 3: ("RNG.@3.0", {})},
        "empty": {},
        "step": "STEP",
    }  # fmt: skip
    assert type(state["model"]) is collections.OrderedDict
    assert type(state["optim"]) is dict
    assert list(state) == [part for part, _ in STATE.children]
    for node in (None, box("list", None)):
        with pytest.raises(MalformedFile, match="root"):
            unflatten(node, str)


# Merging


@settings(max_examples=150, deadline=None)
@given(st.lists(plain_trees, min_size=1, max_size=4))
def test_merge_is_the_union_in_order(nodes):
    """Merged leaves are the union of all, the first tree's own order is kept; or the kinds clash."""
    names = [list(leaf_keys(node)) for node in nodes]
    try:
        merged = merge_trees(nodes)
    except InvalidShards:
        return
    got = list(leaf_keys(merged))
    assert set().union(*names) == set(got)
    assert names[0] == [name for name in got if name in set(names[0])]
    assert merged == merge_trees([merged, *nodes])


def test_merge_collects_the_ranks():
    """Each rank's own child joins, equal parts stay one, and children that only later trees have come behind."""
    ranks = [box("dict", ("m", box("dict", ("w", None))), ("rng", box("ranks", (r, None)))) for r in range(4)]
    expected = box("dict", ("m", box("dict", ("w", None))), ("rng", box("ranks", *[(r, None) for r in range(4)])))
    assert expected == merge_trees(ranks)
    assert box("dict") == merge_trees([])
    assert box("list", None, None) == merge_trees([box("list", None), box("list", None, None)])
    first = box("dict", ("b", None), ("x", box("dict", ("q", None))))
    second = box("dict", ("z", None), ("x", box("dict", ("p", None), ("q", None))), ("a", None))
    expected = box("dict", ("b", None), ("x", box("dict", ("q", None), ("p", None))), ("z", None), ("a", None))
    assert expected == merge_trees([first, second])


@pytest.mark.parametrize("other", [None, box("list"), box("odict"), box("ranks")], ids=str)
def test_merge_refuses_kinds_that_differ(other):
    trees = [box("dict", ("a", box("dict", ("b", node)))) for node in (box("dict"), other)]
    kind = "leaf" if other is None else other.kind
    with pytest.raises(
        InvalidShards, match=rf"'a\.b' is not the same kind .*: (dict and {kind}|{kind} and dict)\n"
    ) as e:
        merge_trees(trees)
    assert "PerRank" in e.value.hint


def test_collisions_name_both_paths():
    dotted, nested = ("a.b", None), ("a", box("dict", ("b", None)))
    expected = r"flat name 'a\.b': \['a\.b'\] and \['a', 'b'\]"
    with pytest.raises(KeyCollision, match=expected):
        refuse_collisions(box("dict", dotted, nested))
    with pytest.raises(KeyCollision, match=expected):
        merge_trees([box("dict", dotted), box("dict", nested)])
    with pytest.raises(KeyCollision, match=r"\['1'\] and \[1\]"):
        merge_trees([box("dict", ("1", None)), box("dict", (1, None))])


# Hostile input


def columns(marks, counts, keys):
    return encode_value([bytes(marks), counts, keys], key="k")


def chain(depth):
    return functools.reduce(lambda inner, _: box("dict", ("a", inner)), range(depth), None)


HOSTILE = {
    "nothing": b"",
    "a number": b"\x05",
    "two columns": encode_value([b"\0", []], key="k"),
    "columns of other types": encode_value([[], [], []], key="k"),
    "no root": columns([], [], []),
    "unknown kind": columns([6], [0], []),
    "a container without count": columns([1], [], []),
    "a count without container": columns([0], [0], []),
    "a container below a leaf": columns([0, 2], [1], []),
    "a container below a leaf, with a key": columns([0, 1], [1], ["a"]),
    "a child too few": columns([1], [1], ["a"]),
    "a child too many": columns([1, 0, 0], [1], ["a"]),
    "a huge count": columns([1, 0], [2**62], ["a"]),
    "a negative count": columns([1, 1, 0], [2, -1], ["a", "b"]),
    "a count of true": columns([1, 0], [True], ["a"]),
    "a count of text": columns([1, 0], ["1"], ["a"]),
    "its own parent": columns([1, 1], [0, 1], ["a"]),
    "a key too few": columns([1, 0, 0], [2], ["a"]),
    "a key too many": columns([1, 0], [1], ["a", "b"]),
    "keys for a list": columns([3, 0], [1], ["a"]),
    "equal keys": columns([1, 0, 0], [2], ["a", "a"]),
    "equal keys, 1 and true": columns([1, 0, 0], [2], [1, True]),
    "a list as key": columns([1, 0], [1], [["a"]]),
    "a set as key": columns([1, 0], [1], [{1}]),
    "a tuple of lists as key": columns([1, 0], [1], [([],)]),
    "a huge int as key": columns([1, 0], [1], [1 << 20_000]),
    "a negative rank": columns([5, 0], [1], [-1]),
    "a rank of text": columns([5, 0], [1], ["0"]),
    "a rank of true": columns([5, 0], [1], [True]),
    "too deep": columns([1] * (MAX_TREE_DEPTH + 1), [1] * MAX_TREE_DEPTH + [0], ["a"] * MAX_TREE_DEPTH),
    "far too deep": columns([3] * 200_000, [1] * 199_999 + [0], []),
    "declared, not there": b"\x93\xc6\xff\xff\xff\xff",
    "a pickled key": columns([1, 0], [1], [0]).replace(b"\x91\x00", b"\x91" + b"\xd4\x7f\x00"),
    "keys of one hash": columns([1] + [0] * 1024, [1024], list(itertools.product((-1, -2), repeat=10))),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_malformed_trees_are_refused(data):
    began = time.process_time()
    expected = PickleRefused if data is HOSTILE["a pickled key"] else MalformedFile
    with pytest.raises(expected, match="tree"):
        decode_tree(data)
    assert time.process_time() - began < 5


def test_depth_is_the_same_on_both_sides():
    """What is as deep as allowed comes back; one more is refused when written."""
    assert chain(MAX_TREE_DEPTH) == decode_tree(encode_tree(chain(MAX_TREE_DEPTH)))
    with pytest.raises(UnsupportedLeaf, match="100 levels"):
        encode_tree(chain(MAX_TREE_DEPTH + 1))


def test_mutated_trees_raise_only_our_errors():
    rng = random.Random(20260730)
    seeds = [encode_tree(STATE), encode_tree(box("list", None, box("tuple", None))), encode_tree(chain(20))]
    refused = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[at] = rng.randrange(256)
            else:
                data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        try:
            tree = decode_tree(bytes(data))
        except CheckpointError:
            refused += 1
        else:
            list(leaf_keys(tree))
            assert repr(tree) == repr(decode_tree(encode_tree(tree)))

    assert refused > 5_000


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(
        st.lists(st.integers(0, 6), max_size=8).map(bytes),
        st.lists(st.integers(-1, 5), max_size=6),
        st.lists(simple_parts() | st.sampled_from("ab"), max_size=8),
    )
)
def test_random_columns_raise_only_our_errors(found):
    try:
        tree = decode_tree(encode_value(list(found), key="k"))
    except MalformedFile:
        return
    assert repr(tree) == repr(decode_tree(encode_tree(tree)))


def test_what_is_a_key():
    good = ["", 0, -(2**63), 2**64 - 1, True, 1.5, None, b"", (), (1, ("a", None))]
    bad = [2**64, -(2**63) - 1, [], {}, frozenset(), ..., 1j, (1, [2]), msgspec.UNSET, (2**64,)]
    assert [True] * len(good) == [is_part(part) for part in good]
    assert [False] * len(bad) == [is_part(part) for part in bad]
