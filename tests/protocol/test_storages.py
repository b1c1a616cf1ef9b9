"""Users' storages, derived from ours or from torch's: called in torch's order, with values in their own classes."""

import io
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.checkpoint import planner as their_planner
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.futures import Future

from shardkeep.dcp import planner as our_planner
from shardkeep.dcp import storage as our_storage
from shardkeep.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.dcp.metadata import StorageMeta
from shardkeep.dcp.state_dict_loader import load
from shardkeep.dcp.state_dict_saver import save
from tests.protocol.samples import blank, holds, quietly, state_of_ranks
from tests.toolkit.samples import mesh_of, numbered, seen


def done(value):
    future = Future()
    future.set_result(value)
    return future


def words(value):
    """Which classes a value is made of: those of ours, or torch's."""
    if isinstance(value, list):
        return sorted({each for item in value for each in words(item)})
    items = getattr(value, "items", None)
    held = words(items) if isinstance(items, list) else []
    return sorted({type(value).__module__.split(".")[0], *held})


class Noting:
    """Notes each call: its name, and which classes what is handed over is made of."""

    def __init__(self, folder, **options):
        self.folder, self.calls = folder, []
        self.__dict__.update(options)

    def note(self, name, *values):
        self.calls.append((name, *(words(value) for value in values)))

    def reset(self, checkpoint_id=None):
        self.calls.append(("reset", checkpoint_id is not None))

    def prepare_local_plan(self, plan):
        self.note("prepare_local_plan", plan)
        return replace(plan, storage_data=("local", dist.get_rank()))

    def prepare_global_plan(self, plans):
        self.note("prepare_global_plan", plans)
        return [replace(plan, storage_data=(*plan.storage_data, "global", rank)) for rank, plan in enumerate(plans)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class Writing(Noting):
    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        self.calls.append(("set_up_storage_writer", is_coordinator, args, sorted(kwargs.items())))

    def storage_meta(self):
        self.calls.append(("storage_meta",))
        return StorageMeta("somewhere")

    def write_data(self, plan, planner):
        self.note("write_data", plan)
        self.calls.append(plan.storage_data)
        results = []
        for number, item in enumerate(plan.items):
            data, name = planner.resolve_data(item), f"{dist.get_rank()}-{number}"
            torch.save(data if isinstance(data, torch.Tensor) else data.getvalue(), f"{self.folder}/{name}")
            results.append(self.result(index=item.index, size_in_bytes=1, storage_data=name))
        return done(results)

    def finish(self, metadata, results):
        self.note("finish", metadata, results)
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        with open(f"{self.folder}/index.tmp", "wb") as file:
            pickle.dump(metadata, file)
        os.replace(f"{self.folder}/index.tmp", f"{self.folder}/index")


class Reading(Noting):
    def read_metadata(self):
        self.calls.append(("read_metadata",))
        with open(f"{self.folder}/index", "rb") as file:
            return pickle.load(file)

    def set_up_storage_reader(self, metadata, is_coordinator):
        self.note("set_up_storage_reader", metadata)
        self.table = metadata.storage_data

    def read_data(self, plan, planner):
        self.note("read_data", plan)
        self.calls.append(plan.storage_data)
        for item in plan.items:
            stored = torch.load(f"{self.folder}/{self.table[item.storage_index]}")
            if item.type == self.bytes:
                planner.load_bytes(item, io.BytesIO(stored))
                continue
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(axis, start, length)
            into = planner.resolve_tensor(item)
            into.copy_(stored)
            planner.commit_tensor(item, into)
        return done(None)


class OurWriter(Writing, our_storage.StorageWriter):
    result = our_storage.WriteResult


class TheirWriter(Writing, theirs.StorageWriter):
    result = theirs.storage.WriteResult


class OurReader(Reading, our_storage.StorageReader):
    bytes = our_planner.LoadItemType.BYTE_IO


class TheirReader(Reading, theirs.StorageReader):
    bytes = their_planner.LoadItemType.BYTE_IO


WRITERS = {"ours": (OurWriter, OurReader), "theirs": (TheirWriter, TheirReader)}
PLANNERS = {
    "ours": (DefaultSavePlanner, DefaultLoadPlanner),
    "theirs": (theirs.DefaultSavePlanner, theirs.DefaultLoadPlanner),
}
DRIVERS = {"ours": (save, load), "theirs": (theirs.save, theirs.load)}


def through(folder, storages, planners, drivers):
    state = state_of_ranks()
    # Torch's load planner does without these where a rank has no shard.
    del state["empty"], state["few rows"]
    expected = holds(state)
    (make_writer, make_reader), (save_planner, load_planner) = WRITERS[storages], PLANNERS[planners]
    do_save, do_load = DRIVERS[drivers]
    writer, reader = make_writer(folder), make_reader(folder)
    quietly(do_save, state, storage_writer=writer, planner=save_planner(), checkpoint_id="x")
    into = blank(state)
    quietly(do_load, into, storage_reader=reader, planner=load_planner())
    found = holds(into)
    return [key for key in expected if found[key] != expected[key]], writer.calls, reader.calls


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("planners", PLANNERS)
@pytest.mark.parametrize("storages", WRITERS)
def test_a_users_storage_works_with_either_planner(rank_pool, tmp_path, ranks, planners, storages):
    """Every value comes back, and all that is handed to the storage is in the classes of its own base."""
    home = "shardkeep" if storages == "ours" else "torch"
    for wrong, *calls in rank_pool.run(ranks, through, str(tmp_path), storages, planners, "ours"):
        assert wrong == []
        handed = [said for each in calls for call in each for said in call if isinstance(said, list)]
        assert [home] in handed
        assert all(said == [home] for said in handed if said and isinstance(said[0], str))
    assert (b"shardkeep" in (tmp_path / "index").read_bytes()) == (storages == "ours")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_calls_come_in_torchs_order(rank_pool, tmp_path, ranks):
    """What torch's driver calls on torch's classes, ours calls on them too, on each rank, with the same arguments."""
    mine, other = (
        [calls for _, *calls in rank_pool.run(ranks, through, str(tmp_path), "theirs", planners, drivers)]
        for planners, drivers in (("ours", "ours"), ("theirs", "theirs"))
    )
    assert mine == other
    names = [call[0] for call in mine[0][0] if isinstance(call[0], str) and call[0] != "local"]
    assert names == [
        *("reset", "storage_meta", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"),
        *("write_data", "finish"),
    ]
    assert ("set_up_storage_writer", True, (), [("rank", 0), ("use_collectives", True)]) in mine[0][0]
    assert [call[0] for call in mine[0][1]][:2] == ["read_metadata", "set_up_storage_reader"]


def save_wrapped(folder):
    rank, mesh = dist.get_rank(), mesh_of(dist.get_world_size())
    full = numbered(8, 3)
    at = [(rank * 4, 0), (rank * 4 + 1, 0)]

    def table(rows):
        shards = [rows[rank * 4 : rank * 4 + 1].clone(), rows[rank * 4 + 1 : rank * 4 + 4].clone()]
        wrapper = LocalShardsWrapper(shards, at)
        return DTensor.from_local(wrapper, mesh, [Replicate()], run_check=False, shape=full.size(), stride=(3, 1))

    state = {"table": table(full)}
    metadata = quietly(save, state, storage_writer=theirs.FileSystemWriter(folder))
    into = {"table": table(torch.zeros(8, 3))}
    quietly(load, into, storage_reader=theirs.FileSystemReader(folder))
    right = [seen(a) == seen(b) for a, b in zip(local(into), local(state), strict=True)]
    whole = {"table": torch.zeros(8, 3)}
    quietly(theirs.load, whole, checkpoint_id=folder)
    chunks = metadata.state_dict_metadata["table"].chunks
    return right, seen(whole["table"]) == seen(full), len(chunks), type(chunks[0]).__module__


def local(state):
    return state["table"]._local_tensor.local_shards()


def test_tensors_that_describe_themselves(rank_pool, tmp_path):
    """A wrapper of several local shards describes them in torch's classes, and is saved and filled shard by shard."""
    for right, whole, count, home in rank_pool.run(2, save_wrapped, str(tmp_path / "ck")):
        assert right == [True, True]
        assert whole
        assert (count, home) == (4, "shardkeep.layouts.torch_values")
