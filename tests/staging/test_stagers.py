"""Stagers: copies that later changes do not reach, of their own bytes only, with memory that is used again."""

import collections
import copy
import gc
import pickle
import threading
import types
from concurrent.futures import Future
from contextlib import closing
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint._state_dict_stager as their_state_stager
import torch.distributed.checkpoint.staging as theirs
from hypothesis import given, settings

from shardkeep.dcp._state_dict_stager import StateDictStager
from shardkeep.dcp.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from shardkeep.engine.tensors import extent, runs
from shardkeep.errors import BrokenProtocol
from tests.protocol.samples import quietly
from tests.toolkit.samples import numbered, seen, sharded_tree

KINDS = [{}, {"share_memory": True}]


class Pair(NamedTuple):
    left: object
    right: object


class Marked(torch.Tensor):
    """A subclass without anything of its own."""


class Holder:
    def __init__(self):
        self.tensor = numbered(3)
        self.again = self.tensor
        self.parameter = torch.nn.Parameter(numbered(2))


def everything():
    whole = numbered(40, 30)
    ordered = collections.OrderedDict(a=numbered(2), b=[1, {"c": (numbered(1), "x")}])
    ordered._metadata = {"version": 1}
    return {
        "whole": whole,
        "alias": whole,
        "row": whole[3],
        "transposed": whole.t(),
        "column": numbered(100, 100)[:, 7],
        "expanded": torch.tensor([2.0]).expand(50, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "no elements": torch.empty(0, 3),
        "scalar": torch.tensor(4),
        "half": numbered(5, dtype=torch.bfloat16),
        "eighth": numbered(5).to(torch.float8_e5m2),
        "quarter": torch.arange(3, dtype=torch.uint8).view(torch.int4),
        "parameter": torch.nn.Parameter(numbered(4)),
        "marked": numbered(4).as_subclass(Marked),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "ordered": ordered,
        "pair": Pair(numbered(2), 5),
        "object": Holder(),
        "set": {1, 2},
        "none": None,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_everything(kind):
    """Same values, kinds, order and nesting, in other memory, whatever happens to the original."""
    state, model = everything(), everything()
    staged = StateDictStager(**kind).stage(state)
    for tensor in [*state.values(), state["ordered"]["a"], state["pair"].left, state["object"].tensor]:
        if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and not tensor.is_meta and tensor.numel():
            tensor.untyped_storage().fill_(255)
    state["set"].add(3)
    assert list(staged) == list(model)
    plain = [k for k, v in model.items() if isinstance(v, torch.Tensor) and not v.is_sparse and not v.is_meta]
    for key in plain:
        assert seen(staged[key]) == seen(model[key].detach()), key
        assert not staged[key].requires_grad
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))
    assert staged["meta"].is_meta
    assert type(staged["marked"]) is Marked
    assert type(staged["parameter"]) is torch.Tensor
    assert type(staged["ordered"]) is collections.OrderedDict
    assert staged["ordered"]._metadata == {"version": 1}
    assert torch.equal(staged["ordered"]["b"][1]["c"][0], numbered(1))
    assert isinstance(staged["pair"], Pair)
    assert torch.equal(staged["pair"].left, numbered(2))
    held = staged["object"]
    assert held.again is held.tensor
    assert torch.equal(held.tensor, numbered(3))
    assert torch.equal(held.parameter, numbered(2))
    assert held is not state["object"]
    assert staged["set"] == {1, 2}
    assert all(staged[key].is_shared() is bool(kind) for key in plain if staged[key].numel())


@pytest.mark.parametrize("kind", KINDS)
def test_what_shares_memory_goes_on_sharing_it(kind):
    """A tensor under two names, its rows and its transpose are views of one copy; a stranger is not."""
    staged = StateDictStager(**kind).stage(everything())
    assert staged["alias"] is staged["whole"]
    staged["whole"].fill_(7)
    assert staged["row"].eq(7).all()
    assert staged["transposed"].eq(7).all()
    assert not staged["column"].eq(7).all()


def test_only_the_own_bytes_of_a_view_are_staged():
    """Line 21 of torch's defects: rows and columns of a matrix take what they show; torch stages all of it."""
    whole = numbered(1000, 1000)
    for state, nbytes in (
        ({"row": whole[5]}, 4000),
        ({"columns": whole[:, 5:7]}, 8000),
        ({"left": whole[0], "right": whole[999]}, 8000),
        ({"rows": whole[2:4], "row": whole[3]}, 8000),
        ({"expanded": torch.ones(1).expand(10_000)}, 4),
    ):
        stager = StateDictStager()
        staged = stager.stage(state)
        assert seen(staged) == seen(state)
        assert stager._memory.kept_bytes == nbytes
    torchs = their_state_stager.StateDictStager().stage({"row": whole[5]})
    assert torchs["row"].untyped_storage().nbytes() == 4_000_000  # the fault


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_views_of_one_storage(data):
    base = torch.arange(240, dtype=torch.uint8)
    state = {}
    for index in range(data.draw(st.integers(1, 6))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
        row = base.view(dtype)
        at = data.draw(st.integers(0, row.numel() - 20))
        shape = data.draw(st.sampled_from([(3,), (2, 2), (4,), (1,)]))
        steps = tuple(data.draw(st.sampled_from([0, 1, 2, 5])) for _ in shape)
        state[str(index)] = row.as_strided(shape, steps, at)
    expected = seen(state)
    staged = StateDictStager(share_memory=data.draw(st.booleans())).stage(state)
    assert seen(staged) == expected
    base.fill_(0)
    assert seen(staged) == expected
    mine = list(runs(state.values()))
    assert all(run.start <= low and high <= run.stop for run in mine for low, high in map(extent, run.tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_used_again_only_when_nobody_holds_it(kind):
    """A snapshot that is still held keeps its values over later stages; one that was let go of gives its memory."""
    stager = StateDictStager(**kind)
    state = {"w": torch.zeros(1000), "b": torch.zeros(10)}
    held = []
    for step in range(5):
        state["w"].fill_(step)
        held.append(stager.stage(state))
    assert [each["w"][0].item() for each in held] == [0, 1, 2, 3, 4]
    slice_of_first = held[0]["w"][:1].detach()
    address = held[1]["w"].data_ptr()
    held.clear()
    gc.collect()
    assert stager.stage(state)["w"].data_ptr() != slice_of_first.data_ptr()
    for _ in range(20):
        stager.stage(state)
    assert slice_of_first.item() == 0
    found = stager.stage(state)["w"].data_ptr()
    assert found == stager.stage(state)["w"].data_ptr()
    assert address != slice_of_first.data_ptr()
    assert stager._memory.kept_bytes <= 3 * 4100
    stager.close()
    assert stager._memory.kept_bytes == 0


def test_many_small_tensors_share_a_few_pieces_of_shared_memory():
    state = {str(index): torch.full((5,), float(index)) for index in range(1000)}
    staged = StateDictStager(share_memory=True).stage(state)
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged.values()}) < 5
    assert all(staged[key].tolist() == [float(key)] * 5 for key in state)


def test_a_value_that_cannot_be_copied_is_named():
    with pytest.raises(TypeError, match=r"'a\.b\.1' holds a lock"):
        StateDictStager().stage({"a": {"b": [numbered(2), threading.Lock()]}})


class Fleeting:
    """Copies itself through tensors that live for a moment, and with no memory of what was copied before."""

    def __init__(self, values):
        self.values = values

    def __deepcopy__(self, memo):
        return Fleeting([copy.deepcopy(torch.tensor(value)).item() for value in self.values])


def test_tensors_that_live_for_a_moment():
    """An object that copies itself through other tensors sees their values, and none is taken for one before it."""
    numbers = [float(number) for number in range(200)]
    stager = DefaultStager(StagingOptions(False, False, True, False))
    assert stager.stage({"o": Fleeting(numbers)}).result(30)["o"].values == numbers
    stager.close()


def test_a_state_that_contains_itself():
    state = {"w": numbered(2)}
    state["self"] = state
    staged = StateDictStager().stage(state)
    assert staged["self"] is staged
    assert staged["w"] is not state["w"]


def on_ranks(kind):
    state = sharded_tree()
    expected = seen(state)
    staged = StateDictStager(**kind).stage(state)
    for key in ("even", "both", "scalar"):
        state[key]._local_tensor.zero_()
    for shard in state["chunks"].local_shards():
        shard.tensor.zero_()
    return seen(staged) == expected, seen(pickle.loads(pickle.dumps(staged["both"]))) == seen(staged["both"])


@pytest.mark.parametrize("kind", KINDS)
def test_spread_tensors(rank_pool, kind):
    """DTensors and ShardedTensors of any layout keep it, with copies of their local parts; they can be pickled."""
    assert rank_pool.run(2, on_ranks, kind) == [(True, True)] * 2


# Stagers


def test_the_default_options_work_without_an_accelerator():
    """What only an accelerator needs is left out; torch raises an AssertionError."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert StagingOptions() == StagingOptions(True, True, True, True)
    stager = DefaultStager()
    staged = stager.stage({"w": numbered(4)})
    assert isinstance(staged, Future)
    assert torch.equal(staged.result(30)["w"], numbered(4))
    stager.close()
    with pytest.raises(AssertionError):
        quietly(theirs.DefaultStager)
    with pytest.warns(UserWarning, match="pin_memory is ignored"):
        assert StateDictStager(pin_memory=True).pin_memory is False


@pytest.mark.parametrize("options", [(False, False, False, False), (True, True, False, True), (True, True, True, True)])
def test_one_stager_for_many_stages(options):
    """Every snapshot has the values of its own time; after `close` there are no more."""
    stager = DefaultStager(StagingOptions(*options))
    weights = torch.zeros(500)
    snapshots = []
    for step in range(10):
        weights.fill_(step)
        staged = stager.stage({"w": weights, "step": [step]})
        snapshots.append(staged.result(30) if options[2] else staged)
        stager.synchronize_staging()
    assert [each["w"][0].item() for each in snapshots] == [each["step"][0] for each in snapshots] == list(range(10))
    stager.close()
    with pytest.raises(BrokenProtocol, match="closed"):
        stager.stage({"w": weights})
    with pytest.raises(RuntimeError):
        stager.stage({"w": weights})


def test_objects_are_copied_before_the_call_returns():
    """With staging on a thread only tensors must be left alone until it is done."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    state = {"list": [1], "w": numbered(1_000_000)}
    future = stager.stage(state)
    state["list"].append(2)
    assert future.result(30)["list"] == [1]
    stager.close()


def test_stagers_are_torchs_stagers_and_torchs_are_ours():
    """The protocol is the same one, by its members."""
    ours, torchs = BlockingAsyncStager(), theirs.BlockingAsyncStager()
    assert isinstance(ours, theirs.AsyncStager)
    assert isinstance(torchs, AsyncStager)
    assert isinstance(DefaultStager(StagingOptions(False, False, False, False)), theirs.AsyncStager)
    assert not isinstance(types.SimpleNamespace(stage=1), AsyncStager)
    assert ours.should_synchronize_after_execute is torchs.should_synchronize_after_execute is False
    assert DefaultStager.should_synchronize_after_execute.fget(DefaultStager()) is True
    with pytest.raises(NotImplementedError):
        type("Mine", (AsyncStager,), {})().stage({})


@pytest.mark.parametrize("cache", [False, True])
def test_the_blocking_stager_copies_values_on_the_cpu(cache):
    """Each call has its own values though the last copy is held, with the cache too; torch's overwrites that one."""
    stager = BlockingAsyncStager(cache_staged_state_dict=cache)
    state = {"w": torch.zeros(100), "n": {"list": [1, numbered(2)]}, "scalar": torch.tensor(0)}
    held = []
    for step in range(4):
        state["w"].fill_(step)
        state["scalar"].fill_(step)
        held.append(stager.stage(state))
    assert [each["w"][0].item() for each in held] == [each["scalar"].item() for each in held] == [0, 1, 2, 3]
    assert stager.synchronize_staging() is None
    held.clear()
    if cache:
        assert stager.state_dict_cache is not None
        assert len({stager.stage(state)["w"].data_ptr() for _ in range(5)}) == 1
    stager.close()
    assert stager.state_dict_cache is None


def test_the_blocking_stager_checks_types_if_asked_to():
    """As torch's does, and with the path."""
    with pytest.raises(ValueError, match=r"'a\.b'"):
        BlockingAsyncStager(type_check=True).stage({"a": {"b": {1, 2}}})
    assert BlockingAsyncStager().stage({"a": {1, 2}}) == {"a": {1, 2}}


def test_stagers_are_pickled_without_their_memory():
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    staged = stager.stage({"w": torch.zeros(100_000)})
    sent = pickle.dumps(stager)
    assert len(sent) < 1000
    there = pickle.loads(sent)
    assert torch.equal(there.stage({"w": staged["w"] + 1})["w"], staged["w"] + 1)
    assert copy.deepcopy(stager).cache_staged_state_dict is True


class Box:
    def __init__(self):
        self.layer = torch.nn.Linear(2, 3)
        self.tensor = numbered(4)


@pytest.mark.parametrize("top", [False, True])
def test_parameters_inside_objects_are_staged_too(top):
    """They are parameters in the copy, in the stager's memory; one that the state also holds itself is that copy."""
    box = Box()
    state = {"box": box, "weight": box.layer.weight} if top else {"box": box}
    expected = {key: value.clone() for key, value in box.layer.state_dict().items()}
    staged = StateDictStager(share_memory=True).stage(state)
    with torch.no_grad():
        for parameter in box.layer.parameters():
            parameter.fill_(-1)
    layer = staged["box"].layer
    assert isinstance(layer.bias, torch.nn.Parameter)
    assert layer.bias.requires_grad
    for key in ("weight", "bias"):
        assert getattr(layer, key).is_shared()
        assert torch.equal(getattr(layer, key), expected[key])
    assert layer(torch.ones(2)).shape == (3,)
    if top:
        assert staged["weight"] is layer.weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_device_is_not_where_states_are_staged(kind):
    """Copies are in host memory, though the user has tensors made elsewhere."""
    state = {"w": numbered(6), "strided": numbered(6)[::2], "none": torch.empty(0), "box": Box()}
    with torch.device("meta"):
        staged = StateDictStager(**kind).stage(state)
        cached = BlockingAsyncStager(cache_staged_state_dict=True).stage(state)
    for each in (staged, cached):
        assert torch.equal(each["w"], numbered(6))
        assert torch.equal(each["strided"], numbered(6)[::2])
        assert torch.equal(each["box"].tensor, numbered(4))


def test_states_are_staged_on_a_thread_in_inference_mode():
    """The mode belongs to the caller's thread; the copy made there is filled on another."""
    with closing(DefaultStager(StagingOptions(False, False, True, False))) as stager, torch.inference_mode():
        staged = stager.stage({"w": numbered(6), "strided": numbered(6)[::2]}).result(30)
    assert torch.equal(staged["w"], numbered(6))
    assert torch.equal(staged["strided"], numbered(6)[::2])
