"""The default planners' plans and metadata next to torch's, and where ours must not do as torch does."""

import dataclasses
import inspect
import io
import logging
import pickle
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint import default_planner as their_planners

from shardkeep.dcp._dedup_save_plans import dedup_save_plans
from shardkeep.dcp._dedup_tensors import dedup_tensors
from shardkeep.dcp._nested_dict import flatten_state_dict
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _create_default_local_metadata,
    _EmptyStateDictLoadPlanner,
    _validate_global_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
)
from shardkeep.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.dcp.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from shardkeep.dcp.planner_helpers import (
    _compare_save_plans,
    _contains_usable_plan,
    _init_state_dict,
    _merge_delta_local_plans,
)
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from shardkeep.errors import InvalidShards, StateMismatch
from shardkeep.layouts.torch_values import to_ours
from tests.protocol.samples import quietly, state_of_ranks
from tests.toolkit.samples import numbered, seen

RANKS = [1, 2, 4]


class Pair(NamedTuple):
    left: object
    right: object


def state_to_plan():
    state = state_of_ranks()
    # Torch forgets the key of a ShardedTensor on ranks without a shard, and that of an empty dict.
    del state["few rows"], state["empty"]
    return {**state, "counter": state["counter"].state_dict()}


def local_plans(options):
    planners = DefaultSavePlanner(**options), theirs.DefaultSavePlanner(**options)
    for planner in planners:
        state = state_to_plan()
        if not options.get("flatten_state_dict", True):
            state, _ = flatten_state_dict(state)  # ours refuses spread tensors inside what is saved as one object
        planner.set_up_planner(state, None, dist.get_rank() == 0)
    return [planner.create_local_plan() for planner in planners]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", [{}, {"flatten_state_dict": False}, {"flatten_sharded_tensors": False}])
def test_saves_are_planned_as_torch_plans_them(rank_pool, ranks, options):
    """The same items on each rank; with replicated values on the first rank, the same global plan and metadata."""
    mine, other = zip(*rank_pool.run(ranks, local_plans, options), strict=True)
    assert list(mine) == to_ours(list(other))
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True, **options)
    torchs = theirs.DefaultSavePlanner(dedup_save_to_lowest_rank=True, **options)
    plans, metadata = planner.create_global_plan(list(mine))
    their_plans, their_metadata = torchs.create_global_plan(list(other))
    assert plans == to_ours(their_plans)
    assert metadata == to_ours(their_metadata)
    hints = [[item.index.index for item in plan.items] for plan in plans]
    assert hints == [[item.index.index for item in plan.items] for plan in their_plans]


def item(name, rows, whole=None, at=0):
    chunk = ChunkStorageMetadata(torch.Size([at]), torch.Size([rows]))
    data = TensorWriteData(chunk, TensorProperties(torch.int8), torch.Size([whole or rows]))
    return WriteItem(MetadataIndex(name, [at]), WriteItemType.SHARD, tensor_data=data)


def weight(plan):
    return sum(each.tensor_data.chunk.sizes[0] for each in plan.items)


def test_dedupe_balances_the_bytes_that_are_written():
    """Small chunks of huge tensors count as small, and large items are placed first: ranks write the same amount."""
    shared = [item("small 1", 10), item("small 2", 10), item("large", 80), item("middle", 60)]
    plans = [SavePlan([item("mine", 1, whole=10**6), *shared]), SavePlan([item("yours", 1, whole=10, at=1), *shared])]
    before = [list(plan.items) for plan in plans]
    assert [weight(plan) for plan in dedup_save_plans(plans)] == [81, 81]
    assert [plan.items for plan in plans] == before
    lowest = dedup_save_plans(plans, save_to_lowest_rank=True)
    assert [len(plan.items) for plan in lowest] == [5, 1]
    assert dedup_tensors(plans) == lowest


def test_dedupe_drops_nothing_and_doubles_nothing():
    """Of any plans each item stays in exactly one, of a rank that had it, in its order."""
    rng = random.Random(7)
    for _ in range(50):
        every = [item(f"k{n}", rng.randint(1, 50)) for n in range(20)]
        plans = [SavePlan([each for each in every if rng.random() < 0.6]) for _ in range(4)]
        kept = dedup_save_plans(plans)
        names = [each.index for plan in kept for each in plan.items]
        assert sorted(i.fqn for i in names) == sorted({each.index.fqn for plan in plans for each in plan.items})
        for before, after in zip(plans, kept, strict=True):
            assert [each for each in before.items if each in after.items] == after.items


def test_a_key_written_twice_is_refused():
    tensor = dataclasses.replace(item("w", 2), type=WriteItemType.TENSOR)
    thing = WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)
    for first, second in [(tensor, tensor), (thing, thing), (thing, item("w", 2))]:
        with pytest.raises(AssertionError, match="'w'"):
            create_default_global_save_plan([SavePlan([first]), SavePlan([second])])


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([item("w", 3, whole=5), item("w", 3, whole=5, at=2)], "overlapping"),
        ([item("w", 3, whole=5)], "invalid fill"),
        ([item("w", 3, whole=5), item("w", 3, whole=5, at=3)], "out of bounds"),
    ],
)
def test_shards_that_do_not_fit_are_refused(items, fault):
    """Overlaps, holes and shards outside their tensor are ValueErrors that name the key, and torch finds them too."""
    plans = [SavePlan([each], planner_data={}) for each in items] + [SavePlan([], planner_data={})]
    with pytest.raises(ValueError, match=f"Failed to validate global plan: key:w .*{fault}") as caught:
        DefaultSavePlanner().create_global_plan(plans)
    assert isinstance(caught.value, InvalidShards)
    _, metadata = create_default_global_save_plan(plans)
    assert len(_validate_global_plan(plans, metadata)) >= 1


def test_a_long_list_of_faults_is_cut():
    """A thousand bad keys make a message that can be read, and says how many there are."""
    plans = [SavePlan([item(f"k{n}", 1, whole=2) for n in range(1000)], planner_data={}), SavePlan([], planner_data={})]
    with pytest.raises(ValueError, match=r"\(1000 faults\)") as caught:
        DefaultSavePlanner().create_global_plan(plans)
    assert len(str(caught.value)) < 700


def metadata_of_everything():
    state = state_to_plan()
    del state["few"]  # torch asks a rank outside the mesh for its part
    flat, _ = _nested_dict.flatten_state_dict(state)
    return _create_default_local_metadata(flat) == to_ours(their_planners._create_default_local_metadata(flat))


@pytest.mark.parametrize("ranks", [1, 2])
def test_metadata_without_a_save(rank_pool, ranks):
    assert rank_pool.run(ranks, metadata_of_everything) == [True] * ranks


def load_plans(options):
    state = state_to_plan()
    saver = theirs.DefaultSavePlanner()
    saver.set_up_planner(state, None, True)
    plans = [None] * dist.get_world_size()
    dist.all_gather_object(plans, saver.create_local_plan())
    _, metadata = saver.create_global_plan(plans)
    planners = DefaultLoadPlanner(**options), theirs.DefaultLoadPlanner(**options)
    found = []
    for planner in planners:
        planner.set_up_planner(state, metadata, dist.get_rank() == 0)
        found.append(planner.create_local_plan())
    mine, other = found[0], to_ours(found[1])
    return sorted(map(repr, mine.items)) == sorted(map(repr, other.items)), len(mine.items)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("options", [{}, {"allow_partial_load": True}])
def test_loads_are_planned_as_torch_plans_them(rank_pool, ranks, options):
    for same, count in rank_pool.run(ranks, load_plans, options):
        assert same
        assert count > 20


def saved(folder, state, **options):
    writer, planner = theirs.FileSystemWriter(folder), theirs.DefaultSavePlanner(**options)
    quietly(theirs.save, state, storage_writer=writer, planner=planner)
    return theirs.FileSystemReader(folder)


def refusal(reader, state):
    with pytest.raises(CheckpointException) as caught:
        quietly(load, state, storage_reader=reader)
    return caught.value.failures[0][0]


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner(), type("Users", (DefaultLoadPlanner,), {})()])
@pytest.mark.parametrize(
    ("stored", "asked", "hint"),
    [
        (
            {"model": {"weight": 1}},
            {"model": {"weigth": 0}},
            "did you mean 'model.weight' for 'model.weigth'?; load with",
        ),
        ({"app": {"a": 1, "b": 2}}, {"a": 0, "b": 0}, "pass rename={'app': ''} to shardkeep.load; load with"),
        ({"model": 1}, {"x": 0}, "load with DefaultLoadPlanner(allow_partial_load=True)"),
    ],
)
def test_near_names_are_suggested_for_missing_keys(tmp_path, stored, asked, hint, planner):
    """As in `sk.load`; torch's words stay as they are."""
    reader = saved(tmp_path, stored)
    with pytest.raises(CheckpointException) as caught:
        quietly(load, asked, storage_reader=reader, planner=planner)
    error = caught.value.failures[0][0]
    assert error.message.startswith("Missing key in checkpoint state_dict: ")
    assert hint in error.hint


def test_all_missing_keys_are_named_at_once(tmp_path):
    reader = saved(tmp_path, {"a": numbered(2)})
    state = {"a": torch.zeros(2), "b": numbered(3), "c": {"d": 1}}
    error = refusal(reader, state)
    assert isinstance(error, RuntimeError)
    assert error.message == "Missing key in checkpoint state_dict: b, c.d."
    assert seen(state) == seen({"a": torch.zeros(2), "b": numbered(3), "c": {"d": 1}})


def test_all_wrong_sizes_are_named_at_once(tmp_path):
    reader = saved(tmp_path, {"a": numbered(2), "b": numbered(3, 3), "c": numbered(1)})
    error = refusal(reader, {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(1)})
    assert isinstance(error, StateMismatch)
    assert isinstance(error, ValueError)
    assert "torch.Size([2]) and current: torch.Size([3]) for a" in str(error)
    assert "torch.Size([3, 3]) and current: torch.Size([3]) for b" in str(error)
    assert len(error.mismatched) == 2


def test_an_object_in_the_place_of_a_tensor_is_refused(tmp_path):
    """An int where the checkpoint has a tensor is a ValueError that names the key; a tensor may become an object."""
    reader = saved(tmp_path, {"a": numbered(2), "n": 5})
    error = refusal(reader, {"a": np.zeros(2)})
    assert isinstance(error, ValueError)
    assert "'a'" in str(error)
    state = {"n": torch.zeros(1)}
    quietly(load, state, storage_reader=reader)
    assert state == {"n": 5}


def test_meta_tensors_get_memory_and_nothing_else_changes():
    on_meta = torch.empty(3, device="meta")
    inner, same = [on_meta, 1], (1, {2})
    state = {"w": on_meta, "list": inner, "pair": Pair(on_meta, "x"), "same": same, "tuple": (on_meta,)}
    _init_state_dict(state)
    assert state["list"] is inner
    assert state["same"] is same
    assert type(state["pair"]) is Pair
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    for tensor in (state["w"], inner[0], state["pair"].left, state["tuple"][0]):
        assert (tensor.device.type, tensor.shape) == (device.type, (3,))


def test_a_tensor_that_is_not_all_there_is_said(caplog):
    """Where the stored chunks leave a hole in what is loaded, the log names the key."""
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), chunks)})
    with caplog.at_level(logging.WARNING, "shardkeep"):
        plan = create_default_local_load_plan({"w": torch.zeros(4)}, metadata)
    assert [tuple(each.lengths) for each in plan.items] == [(2,)]
    assert "does not hold all of these tensors" in caplog.text
    assert "w" in caplog.text.split()


def test_checkpoints_of_torch_2_3_are_read(tmp_path):
    """Dicts without tensors, which torch 2.3 stored as one object, are found as such; also in a partial load."""
    old = {"w": numbered(2), "groups": {"lr": 0.1, "sub": {"x": [1]}}, "nested": {"t": numbered(1), "none": {"a": 1}}}
    nested = {f"nested.{key}": value for key, value in old["nested"].items()}
    flat = {"w": old["w"], "groups": old["groups"], **nested}
    reader = saved(tmp_path, flat, flatten_state_dict=False)
    for options in ({}, {"allow_partial_load": True}):
        into = {
            "w": torch.zeros(2),
            "groups": {"lr": 0, "sub": {"x": []}},
            "nested": {"t": torch.zeros(1), "none": {"a": 0}},
        }
        quietly(load, into, storage_reader=reader, planner=DefaultLoadPlanner(**options))
        assert seen(into) == seen(old)


def test_the_state_must_be_empty_where_it_is_made():
    """`_EmptyStateDictLoadPlanner` refuses a state with something in it, and a load without metadata."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner({})
    with pytest.raises(AssertionError, match="must be empty"):
        _EmptyStateDictLoadPlanner().set_up_planner({"a": 1}, Metadata({}))
    with pytest.raises(AssertionError, match="metadata"):
        _EmptyStateDictLoadPlanner().set_up_planner({}, None)
    with pytest.raises(AssertionError, match="metadata"):
        planner.create_local_plan()


def test_an_option_without_effect_is_said(caplog):
    DefaultSavePlanner(dedup_replicated_tensors=True)
    assert "dedup_replicated_tensors" in caplog.text


CALLS = (
    "set_up_planner create_local_plan create_global_plan finish_plan resolve_data lookup_object transform_object "
    "load_bytes resolve_tensor commit_tensor lookup_tensor transform_tensor"
)


def recording(base):
    """A planner that notes each call of a hook, with the kind of what it is called with."""
    calls = []

    def noted(name):
        def hook(self, *args, **kwargs):
            calls.append((name, [type(each).__name__ for each in args], sorted(kwargs)))
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    kind = type("Recording", (base,), {name: noted(name) for name in CALLS.split() if hasattr(base, name)})
    # Drivers look at the parameters of this one.
    kind.set_up_planner.__signature__ = inspect.signature(base.set_up_planner)
    return kind(), calls


def test_hooks_are_called_as_torch_calls_them(tmp_path):
    state = {"w": numbered(2), "n": 1, "sub": {"x": numbered(3)}}
    noted = {}
    for who, saver, loader, save_base, load_base in [
        ("ours", save, load, DefaultSavePlanner, DefaultLoadPlanner),
        ("theirs", theirs.save, theirs.load, theirs.DefaultSavePlanner, theirs.DefaultLoadPlanner),
    ]:
        planner, saving = recording(save_base)
        quietly(saver, state, storage_writer=theirs.FileSystemWriter(tmp_path / who), planner=planner)
        planner, loading = recording(load_base)
        into = {"w": torch.zeros(2), "n": 0, "sub": {"x": torch.zeros(3)}}
        quietly(loader, into, storage_reader=theirs.FileSystemReader(tmp_path / who), planner=planner)
        assert seen(into) == seen(state)
        noted[who] = saving, loading
    assert noted["ours"] == noted["theirs"]
    assert len(noted["ours"][0]) > 8


class HalfPrecision(DefaultSavePlanner):
    """Stores tensors in half precision, under names with a prefix."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(
            {f"half_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator
        )

    def create_local_plan(self):
        plan = super().create_local_plan()
        for each in plan.items:
            if each.tensor_data is not None:
                each.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item, object):  # noqa: A002 - torch's name
        found = super().transform_object(write_item, object)
        return found.half() if write_item.type == WriteItemType.TENSOR else found


class FromHalf(DefaultLoadPlanner):
    """Reads such a checkpoint: another name for each key, and a copy of each tensor."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.mine = state_dict
        super().set_up_planner({f"half_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item, value):
        self.mine[read_item.dest_index.fqn.removeprefix("half_")] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item):
        return torch.empty(read_item.lengths, dtype=torch.float16)

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_users_planners_decide(tmp_path):
    """Renamed keys and converted tensors, through overridden hooks, are what is stored and what is loaded."""
    state = {"w": numbered(4), "n": 2}
    written = quietly(save, state, storage_writer=theirs.FileSystemWriter(tmp_path), planner=HalfPrecision())
    assert written.state_dict_metadata["half_w"].properties.dtype == torch.float16
    stored = {"half_w": torch.zeros(4, dtype=torch.float16), "half_n": 0}
    quietly(theirs.load, stored, checkpoint_id=str(tmp_path))
    assert seen(stored["half_w"]) == seen(numbered(4).half())
    into = {"w": torch.zeros(4), "n": 0}
    quietly(load, into, storage_reader=theirs.FileSystemReader(tmp_path), planner=FromHalf())
    assert seen(into) == seen(state)


class OldFashioned(DefaultSavePlanner):
    """From before planners were told of the storage."""

    def set_up_planner(self, state_dict, is_coordinator):
        super().set_up_planner(state_dict, None, is_coordinator)


def test_a_planner_of_old_is_told_less(tmp_path):
    with pytest.warns(UserWarning, match="OldFashioned.set_up_planner|on its own"):
        save({"w": numbered(2)}, storage_writer=theirs.FileSystemWriter(tmp_path), planner=OldFashioned())
    into = {"w": torch.zeros(2)}
    quietly(load, into, storage_reader=theirs.FileSystemReader(tmp_path))
    assert seen(into["w"]) == seen(numbered(2))


def test_what_cannot_be_found_is_named():
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": numbered(4), "n": 1})
    for index in (MetadataIndex("x"), MetadataIndex("w", [2]), MetadataIndex("n", [0])):
        with pytest.raises(ValueError, match=f"'{index.fqn}'"):
            planner.lookup_object(index)
    assert isinstance(planner.resolve_data(WriteItem(MetadataIndex("n"), WriteItemType.BYTE_IO)), io.BytesIO)


def test_planners_can_be_sent_to_another_process():
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for each in (planner, DefaultLoadPlanner(), _EmptyStateDictLoadPlanner({"a"})):
        assert type(pickle.loads(pickle.dumps(each))) is type(each)
    planner.set_up_planner({"w": numbered(2)}, StorageMeta("here"), is_coordinator=True)
    [plan], _ = planner.create_global_plan([planner.create_local_plan()])
    planner.finish_plan(plan)
    again = pickle.loads(pickle.dumps(planner))
    again.set_up_planner({"w": numbered(2)}, StorageMeta("there"), is_coordinator=True)
    assert [item.index.fqn for item in again.create_local_plan().items] == ["w"]


def test_torchs_helpers_for_plans_that_are_used_again():
    """Plans differ by a hint alone; the new plan of a rank counts, and its previous one where it sent none."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner.set_up_planner({"w": numbered(2)})
    plan = planner.create_local_plan()
    [hinted], _ = planner.create_global_plan([plan])
    none = SavePlan([], usable=False)
    assert _compare_save_plans(plan, planner.create_local_plan())
    assert not _compare_save_plans(plan, hinted)
    assert not _compare_save_plans(plan, none)
    assert not _compare_save_plans(plan, dataclasses.replace(plan, planner_data={}))
    assert _merge_delta_local_plans([plan, plan], [none, hinted]) == [plan, hinted]
    assert [_contains_usable_plan(plans) for plans in ([none], [none, plan], [])] == [False, True, False]
