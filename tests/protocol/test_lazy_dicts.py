"""Dicts whose values are made when they are asked for: they are told from plain ones only by what they have made."""

from __future__ import annotations

import copy
import json
import operator
import pickle
import threading
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils._pytree as pytree

from shardkeep.layouts.lazy_dicts import LazyItems, LazyValues

PLAIN = {"b": [1], "a": [2], "": [3], "é": [4]}
KINDS = ("values", "items", "uncounted")


def lazy(kind: str, made: list[int] | None = None) -> Any:
    """The dict above, in one kind; `made` gets the rows that were made."""
    keys, rows = list(PLAIN), made if made is not None else []

    def make(row: int) -> Any:
        rows.append(int(row))
        return [row + 1]

    if kind == "values":
        return LazyValues.of(keys, make)

    class Maker:
        def count(self) -> int | None:
            return len(keys) if kind == "items" else None

        def has(self, key: Any) -> bool:
            return key in keys

        def one(self, key: str) -> Any:
            return make(keys.index(key))

        def every(self) -> Any:
            return [(key, make(row)) for row, key in enumerate(keys)]

    return LazyItems.of(Maker())


def outcome(act: Callable[[Any], Any], subject: Any) -> Any:
    """What an act gives or raises, and what the dict is afterwards."""
    try:
        result = act(subject)
    except (KeyError, TypeError) as error:
        result = type(error)
    return result, list(subject.items())


ACTS: dict[str, Callable[[Any], Any]] = {
    "len": len,
    "bool": bool,
    "in": lambda d: ("a" in d, "z" in d, 5 in d),
    "get": lambda d: (d.get("a"), d.get("z"), d.get("z", 7)),
    "getitem": lambda d: d["é"],
    "getitem missing": lambda d: d["z"],
    "getitem unhashable": lambda d: d[[]],
    "iter": list,
    "reversed": lambda d: list(reversed(d)),
    "keys": lambda d: list(d.keys()),
    "keys as a set": lambda d: (d.keys() - {"a"}, d.keys() & {"a", "z"}, {"a"} <= d.keys()),
    "values": lambda d: list(d.values()),
    "items": lambda d: list(d.items()),
    "dict": dict,
    "dict of changed": lambda d: (d.update(z=1), dict(d))[1],
    "double star": lambda d: {**d, "z": 1},
    "keywords": lambda d: dict(**d),
    "update another": lambda d: (e := {"z": 0}, e.update(d), e)[2],
    "or": lambda d: d | {"a": 0},
    "ror": lambda d: {"a": 0, "z": 0} | d,
    "ior": lambda d: d.__ior__({"a": 0}) is d,
    "or itself": lambda d: d | d,
    "eq": lambda d: (d == PLAIN, d == {}, d != PLAIN, d != {}, d == 5),
    "eq from the other side": lambda d: (operator.eq(PLAIN, d), operator.eq({}, d), operator.ne(PLAIN, d)),
    "copy": lambda d: (d.copy(), type(d.copy())),
    "copied": lambda d: (copy.copy(d), type(copy.copy(d)), copy.deepcopy(d), type(copy.deepcopy(d))),
    "pickled": lambda d: (pickle.loads(pickle.dumps(d)), type(pickle.loads(pickle.dumps(d)))),
    "pickled by Python": lambda d: pickle.loads(pickle._dumps(d)),  # type: ignore[attr-defined]
    "json": json.dumps,
    "repr": repr,
    "format": lambda d: f"{d}",
    "hash": hash,
    "set": lambda d: d.__setitem__("a", 0),
    "set new": lambda d: d.__setitem__("z", 0),
    "del": lambda d: d.__delitem__("a"),
    "del missing": lambda d: d.__delitem__("z"),
    "pop": lambda d: d.pop("a"),
    "pop missing": lambda d: d.pop("z"),
    "pop default": lambda d: d.pop("z", 5),
    "popitem": lambda d: d.popitem(),
    "setdefault": lambda d: (d.setdefault("a", 5), d.setdefault("z", 6)),
    "update": lambda d: d.update({"a": 0}, z=1),
    "clear": lambda d: d.clear(),
    "fromkeys": lambda d: dict(type(d).fromkeys("ab", 1)),
    "of its own class": lambda d: type(d)((key, value) for key, value in d.items()) == d,
    "chained": lambda d: dict(ChainMap(d, {"z": 1})),
    "sorted": sorted,
    "identity": lambda d: (d["a"] is d["a"], d["a"] is dict(d)["a"], d["a"] is d.copy()["a"]),
    "changed value": lambda d: (d["a"].append(5), d["a"])[1],
    "a row as a value": lambda d: (d.__setitem__("a", 2), d["a"])[1],
    "instance": lambda d: isinstance(d, dict),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ACTS)
def test_it_is_the_dict_it_stands_for(kind: str, name: str) -> None:
    """
    Whatever is done with it, also after some of it was made, gives what the plain dict gives and leaves the same.
    """
    for first in (None, "é"):
        subject = lazy(kind)
        if first is not None:
            assert subject[first] == PLAIN[first]
        assert outcome(ACTS[name], subject) == outcome(ACTS[name], copy.deepcopy(PLAIN))


@pytest.mark.parametrize("kind", ["values", "items"])
def test_only_what_is_asked_for_is_made(kind: str) -> None:
    """
    Asking for one value makes one, once; asking whether a key is there, or how many there are, makes none.
    """
    made: list[int] = []
    subject = lazy(kind, made)
    assert (len(subject), "a" in subject, "z" in subject, subject.get("z"), bool(subject)) == (
        4,
        True,
        False,
        None,
        True,
    )
    assert made == []
    assert subject["a"] is subject["a"] is subject.get("a")
    assert made == [1]


def test_keys_that_are_known_make_no_values() -> None:
    """
    Walking the keys, deleting and replacing make nothing where keys are known.
    """
    made: list[int] = []
    subject = lazy("values", made)
    assert list(subject) == list(subject.keys()) == list(PLAIN)
    del subject["b"]
    subject["a"] = [0]
    assert made == []
    assert subject == {"a": [0], "": [3], "é": [4]}
    assert sorted(made) == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_there_while_another_thread_makes_all(kind: str) -> None:
    """
    Whoever is in the midst of making a value when another thread makes all of them gets the one that all see.
    """
    subject = lazy(kind)
    inside, settled = threading.Event(), threading.Event()
    found: list[Any] = []

    def waits(make: Any) -> Any:
        def made(key: Any) -> Any:
            if threading.current_thread() is reader:
                inside.set()
                assert settled.wait(60)
            return make(key)

        return made

    def read() -> None:
        found.append(subject["a"])

    reader = threading.Thread(target=read)
    if kind == "values":
        subject._make = waits(subject._make)
    else:
        subject._maker.one = waits(subject._maker.one)
    reader.start()
    assert inside.wait(60)
    everything = dict(subject)
    settled.set()
    reader.join()
    assert everything == PLAIN
    assert [each is subject["a"] for each in found] == [True]


def test_a_row_seen_before_all_was_made_is_no_missing_key() -> None:
    """
    A thread that saw that a value is not made, and goes on once another has made all, finds it.
    """
    subject = lazy("values")
    row = dict.__getitem__(subject, "a")
    subject.settle()
    assert subject._made("a", row) is subject["a"]


def test_what_is_put_there_while_a_value_is_made_stays() -> None:
    """
    A value that was set while another thread made the old one is not replaced by it.
    """
    subject = LazyValues.of(["a"], lambda row: (subject.__setitem__("a", "new"), row)[1])
    assert subject["a"] == subject["a"] == "new"


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_trees_take_it_for_a_dict(kind: str) -> None:
    """
    Torch's functions for nested containers see its values, with their keys, and give a plain dict back.
    """
    doubled = pytree.tree_map(lambda n: n * 2, lazy(kind))
    assert (type(doubled), doubled) == (dict, {key: [value * 2] for key, [value] in PLAIN.items()})
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(lazy(kind))[0]]
    assert paths == [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(PLAIN)[0]]
