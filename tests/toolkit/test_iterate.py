"""One walk over a state dict: functions by kind, companions, and what does not fit."""

import io
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _state_dict_utils as theirs
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as Cut

from shardkeep.errors import BadValue, CompanionMismatch
from shardkeep.state.collectives import distribute_state_dict
from shardkeep.state.offload import _identity_func, iterate_state_dict
from tests.toolkit.samples import CPU, in_chunks, mesh_of, numbered, seen, sharded_tensor, sharded_tree, spread_out


class Pair(NamedTuple):
    first: Any
    second: Any


def labelled(kind):
    def func(obj, pg, device, companion):
        return f"{kind} on {device} in {pg} with {companion}"

    return func


def iterate_by_kind():
    tree = sharded_tree()
    funcs = labelled("sharded"), labelled("dtensor"), labelled("tensor")
    kinds = [iterate(tree, *funcs, device=CPU) for iterate in (iterate_state_dict, theirs._iterate_state_dict)]
    only = [iterate(tree, *funcs, ranks_only=(0,)) for iterate in (iterate_state_dict, theirs._iterate_state_dict)]
    return kinds[0] == kinds[1], only[0] == only[1], kinds[0]["chunks"], kinds[0]["even"], kinds[0]["plain"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_kind_has_its_function(rank_pool, ranks):
    """ShardedTensors, DTensors and tensors go to their own functions, with group, device and companion, as in torch."""
    words = [f"{kind} on cpu in None with None" for kind in ("sharded", "dtensor", "tensor")]
    assert rank_pool.run(ranks, iterate_by_kind) == [(True, True, *words)] * ranks


def same(tree, **options):
    return iterate_state_dict(tree, _identity_func, _identity_func, _identity_func, **options)


def test_containers_come_out_new_and_alike():
    buffer = io.BytesIO(b"x")
    tree = {
        "d": OrderedDict(a=1),
        "l": [True, None, 2.5],
        "t": (b"b", "s"),
        "p": Pair(numbered(2), 3),
        1: buffer,
        "e": [{}, [], ()],
    }
    made = same(tree)
    assert seen(made) == seen({**tree, "d": {"a": 1}})
    assert made is not tree
    assert made["l"] is not tree["l"]
    assert isinstance(made["p"], Pair)
    assert made["p"].first is tree["p"].first
    assert made[1] is buffer


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, [object()]])
def test_other_values_are_refused_or_copied(value):
    """A ValueError names the path; without the type check the value is copied deeply."""
    with pytest.raises(BadValue, match=r"'a\.b"):
        same({"a": {"b": value}})
    with pytest.raises(ValueError, match="type_check=False"):
        same({"a": {"b": value}})
    made = same({"a": {"b": value}}, type_check=False)["a"]["b"]
    assert type(made) is type(value)


def test_without_a_group_this_process_is_rank_0():
    """`ranks_only` works where torch.distributed was never initialised."""
    assert same({"a": 1}, ranks_only=(0,)) == {"a": 1}
    assert same({"a": 1}, ranks_only=(1,)) == {}


def test_companions_take_the_values():
    """What comes out are the companion's own tensors, filled; without one for a value the source's."""
    companion = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.int64)], "n": 1}
    tensors = companion["a"], companion["b"][0]
    made = same({"a": numbered(3), "b": (numbered(2, dtype=torch.int64),), "n": 2}, companion_obj=companion)
    assert made["a"] is tensors[0]
    assert made["b"][0] is tensors[1]
    assert seen(made) == seen({"a": numbered(3), "b": (numbered(2, dtype=torch.int64),), "n": 2})
    assert companion["n"] == 1


BASE = {"a": {"b": [torch.ones(3), torch.ones(2, 2)]}, "n": 1}
MISFITS = {
    "a key less": ({"a": {}, "n": 1}, r"'a' has other keys.*a\.b"),
    "a key more": ({**BASE, "x": 1}, "other keys.*x"),
    "no dict": ({"a": [1], "n": 1}, "'a' is a dict, its companion a list"),
    "shorter": ({"a": {"b": [torch.ones(3)]}, "n": 1}, r"'a\.b' has other keys.*a\.b\.1"),
    "no list": ({"a": {"b": {"0": 1}}, "n": 1}, r"'a\.b' is a list, its companion a dict"),
    "other size": ({"a": {"b": [torch.ones(1), torch.ones(2, 2)]}, "n": 1}, r"'a\.b\.0' is .* size \(3,\)"),
    "other dtype": ({"a": {"b": [torch.ones(3).double(), torch.ones(2, 2)]}, "n": 1}, r"'a\.b\.0' is .*torch.float32"),
    "none": ({"a": {"b": [None, torch.ones(2, 2)]}, "n": 1}, r"'a\.b\.0' is a Tensor .*, its companion a NoneType"),
    "number": ({"a": {"b": [torch.ones(3), 4]}, "n": 1}, r"'a\.b\.1' is a Tensor .*, its companion a int"),
    "expanded": ({"a": {"b": [torch.ones(1).expand(3), torch.ones(2, 2)]}, "n": 1}, r"'a\.b\.0'.*expanded"),
    "meta": ({"a": {"b": [torch.ones(3), torch.ones(2, 2, device="meta")]}, "n": 1}, r"'a\.b\.1'.*meta"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_companion_that_does_not_fit_is_refused_by_path(name):
    """Keys, lengths, kinds, sizes, dtypes and missing memory: nothing is cast, stretched or left out."""
    companion, message = MISFITS[name]
    with pytest.raises(CompanionMismatch, match=message):
        same(BASE, companion_obj=companion)


def sharded_misfits():
    line = mesh_of(dist.get_world_size())
    value = spread_out(numbered(4, 4), line, Cut(0))
    chunks = in_chunks(numbered(4, 2))
    other = sharded_tensor(numbered(4, 2), [(0, (0, 0), (1, 2)), (1, (1, 0), (3, 2))])
    cases = [
        (value, spread_out(numbered(4, 4), line, Cut(1))),
        (value, value.to_local()),
        (value.to_local(), value),
        (value, value.to("meta")),
        (value, DTensor.from_local(torch.zeros(2, 4), line, [Cut(0)]).double()),
        (chunks, other),
        (chunks, numbered(4, 2)),
        tuple(DTensor.from_local(numbered(4, 4), line, [placement]) for placement in (Replicate(), Partial())),
    ]
    said = []
    for leaf, companion in cases:
        with pytest.raises(CompanionMismatch, match="'w'") as caught:
            same({"w": leaf}, companion_obj={"w": companion})
        said.append(caught.value.message)
    return said


def test_sharded_companions_must_be_cut_alike(rank_pool):
    for said in rank_pool.run(2, sharded_misfits):
        assert len(said) == 8
        assert "sharded as" in said[0]
        assert "meta" in said[3]
        assert "local shards" in said[5]
        assert "sharded as" in said[7]


def test_which_mappings_come_out():
    """An ordered dict becomes a plain one, as in torch; in what is distributed it stays ordered, as torch sends it."""
    tree = {"d": OrderedDict(a=torch.ones(1))}
    assert type(same(tree)["d"]) is dict
    local = {"d": OrderedDict(a=torch.zeros(1))}
    distribute_state_dict(tree, local, CPU)
    assert type(local["d"]) is OrderedDict
