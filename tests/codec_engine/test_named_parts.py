"""Names of parts of a state, against a plain reading of what they mean."""

from hypothesis import given
from hypothesis import strategies as st

from shardkeep.engine.codecs import closest_patterns
from shardkeep.format.tree import Container, leaf_keys

PARTS = st.sampled_from(["a", "b", "ab", "a.b", "*", "", "x\ny"])
NODES = st.recursive(
    st.none(),
    lambda below: st.dictionaries(PARTS, below, max_size=3).map(lambda made: Container("dict", tuple(made.items()))),
    max_leaves=8,
)
TREES = st.dictionaries(PARTS, NODES, min_size=1, max_size=4).map(lambda made: Container("dict", tuple(made.items())))
NAMES = st.lists(st.lists(PARTS, min_size=1, max_size=3).map(".".join), max_size=5, unique=True)


def fits(name: str, leaf: str) -> bool:
    cuts = [at for at, char in enumerate(leaf) if char == "."]
    return any(matches(name, leaf[:cut]) for cut in [*cuts, len(leaf)])


def matches(name: str, text: str) -> bool:
    """Of a pattern with stars and a text, character by character."""
    if not name:
        return not text
    if name[0] == "*":
        return any(matches(name[1:], text[at:]) for at in range(len(text) + 1))
    return bool(text) and text[0] == name[0] and matches(name[1:], text[1:])


def closer(name: str) -> tuple[int, int]:
    return name.count("."), -sum("*" in part for part in name.split("."))


@given(TREES, NAMES)
def test_the_closest_name_counts(tree, names):
    """
    Of those that fit a leaf, one with the most parts, then with the fewest wildcards, then the first.
    """
    by_leaf, unfit = closest_patterns(names, tree)
    assert list(by_leaf) == list(dict.fromkeys(leaf_keys(tree)))
    for leaf, number in by_leaf.items():
        fitting = [name for name in names if fits(name, leaf)]
        assert (None if number is None else names[number]) == max(fitting, key=closer, default=None)
    assert not {number for number in by_leaf.values() if number is not None}.intersection(unfit)
    assert not [names[number] for number in unfit if any(fits(names[number], leaf) for leaf in by_leaf)]


def test_what_is_empty_may_be_named():
    """
    An optimizer that has not stepped yet has no state, and what will be in it may be named; what is beside it may not.
    """
    tree = Container("dict", (("optim", Container("dict", (("state", Container("dict", ())),))), ("w", None)))
    names = ["optim.state", "optim", "*.state", "optim.state.*.exp_avg", "optim.state.x.y", "w"]
    wrong = [
        "optim.stat",
        "optim.stat.x",
        "optim.states.x",
        "w.x",
        "state",
        "ww",
        "*.wieght",
        "opt*.exp_avg",
        "optim.*.x",
    ]
    assert [[*names, *wrong][number] for number in closest_patterns([*names, *wrong], tree)[1]] == wrong
