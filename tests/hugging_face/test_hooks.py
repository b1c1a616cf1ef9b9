"""Readers, writers, planners and file systems that extend torch's classes, under ours."""

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from safetensors.torch import save_file

from shardkeep import dcp
from shardkeep.dcp import filesystem, hf_storage, state_dict_loader, state_dict_saver
from shardkeep.dcp.api import CheckpointException
from tests.hugging_face.samples import LOADERS, READERS, SAVERS, WRITERS, load, same, save
from tests.protocol.samples import clear_torchs_plans, quietly
from tests.toolkit.samples import numbered

SIDES = ("ours", "theirs")


def renamed(index, old, new):
    return dataclasses.replace(index, fqn=index.fqn.replace(old, new))


def renaming(base):
    """A reader of files whose keys are not those of the model."""

    class Renaming(base):
        def read_metadata(self):
            found = super().read_metadata()
            found.state_dict_metadata = {
                key.replace("hf.", "model."): entry for key, entry in found.state_dict_metadata.items()
            }
            found.storage_data = {renamed(index, "hf.", "model."): at for index, at in found.storage_data.items()}
            return found

        def _process_read_request(self, f, req, planner):
            stored = renamed(req.storage_index, "model.", "hf.")
            found = f.get_slice(stored.fqn)
            assert found.get_shape() == list(f.get_tensor(stored.fqn).shape)
            assert torch.equal(found[1:], f.get_tensor(stored.fqn)[1:])
            super()._process_read_request(f, dataclasses.replace(req, storage_index=stored), planner)

    return Renaming


@pytest.mark.parametrize("side", SIDES)
def test_a_reader_that_renames_keys(tmp_path, side):
    save_file({"hf.w": numbered(4, 3), "hf.v": numbered(2)}, tmp_path / "model.safetensors")
    into = {"model.w": torch.zeros(4, 3), "model.v": torch.zeros(2)}
    quietly(LOADERS[side], into, storage_reader=renaming(READERS[side])(str(tmp_path)), no_dist=True)
    assert same(into, {"model.w": numbered(4, 3), "model.v": numbered(2)}) == []


@pytest.mark.parametrize("side", SIDES)
def test_a_reader_with_its_own_threads(tmp_path, side):
    """`_read_files_from_queue` is what reads where a subclass overrides it; a file that it leaves out is an error."""
    state = {"a": numbered(3), "b": numbered(2)}
    for key, value in state.items():
        save_file({key: value}, tmp_path / f"{key}.safetensors")

    class Counting(READERS[side]):
        calls = 0

        def _read_files_from_queue(self, file_queue, result_queue, planner):
            type(self).calls += 1
            super()._read_files_from_queue(file_queue, result_queue, planner)

    class Idle(READERS[side]):
        def _read_files_from_queue(self, file_queue, result_queue, planner):
            pass

    into = {key: torch.zeros_like(value) for key, value in state.items()}
    quietly(LOADERS[side], into, storage_reader=Counting(str(tmp_path), thread_count=2), no_dist=True)
    assert same(into, state) == []
    assert Counting.calls == 2
    with pytest.raises((CheckpointException, theirs.CheckpointException), match="Not all files were processed: 0"):
        quietly(LOADERS[side], into, storage_reader=Idle(str(tmp_path), thread_count=2), no_dist=True)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_writer_that_splits_items_itself(tmp_path, distributed):
    """What `_split_by_storage_plan` returns decides on the files; they are named as torch's are."""
    state = {"a": numbered(2), "b": numbered(3)}
    names = {}
    for side in SIDES:

        class Splitting(WRITERS[side]):
            def _split_by_storage_plan(self, storage_plan, items):
                return {number: [item] for number, item in enumerate(items, start=1)}

        writer = Splitting(str(tmp_path / side), {"a": 1, "b": 1}, save_distributed=distributed)
        quietly(SAVERS[side], state, storage_writer=writer, no_dist=True)
        names[side] = sorted(os.listdir(tmp_path / side))
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        assert same(load("ours", into, tmp_path / side, no_dist=True), state) == []
    assert len(names["ours"]) == (2 if distributed else 3)
    assert names["ours"] == names["theirs"]


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_a_writer_that_makes_the_plans_itself(tmp_path, side, distributed):
    """`prepare_global_plan` without a call of `super()` decides on the files, as in torch; a second save replaces them."""
    state = {"a": numbered(2), "b": numbered(3)}

    class Planning(WRITERS[side]):
        def prepare_global_plan(self, plans):
            told = {"fqn_to_index_mapping": {"a": 2, "b": 1}} | ({"shard_index": 7} if distributed else {})
            return [dataclasses.replace(plan, storage_data=told) for plan in plans]

    for _ in range(2):
        quietly(SAVERS[side], state, storage_writer=Planning(tmp_path, save_distributed=distributed), no_dist=True)
    shard, index = ("shard-00007-", []) if distributed else ("", ["model.safetensors.index.json"])
    files = [f"{shard}model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(os.listdir(tmp_path)) == sorted(files + index)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    assert same(load("ours", into, tmp_path, no_dist=True), state) == []


@pytest.mark.parametrize("name", ["StorageWriter", "StorageReader", "QuantizedStorageReader"])
def test_attributes_are_torchs(tmp_path, name):
    kind = name.replace("Storage", "HuggingFaceStorage")
    own, torchs = (getattr(module, kind)(str(tmp_path)) for module in (dcp, theirs))
    assert [each for each in vars(torchs) if not hasattr(own, each)] == []


class Elsewhere(filesystem.FileSystem):
    """A file system of the user's own."""


def test_another_file_system_is_refused(tmp_path):
    state = {"a": numbered(3)}
    save("ours", state, tmp_path / "there", no_dist=True)
    writer = hf_storage.HuggingFaceStorageWriter(str(tmp_path / "new"))
    reader = hf_storage.HuggingFaceStorageReader(str(tmp_path / "there"))
    writer.fs = reader.fs = Elsewhere()
    with pytest.raises(CheckpointException, match="Elsewhere, which would not be used"):
        quietly(state_dict_saver.save, state, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match="Elsewhere, which would not be used"):
        quietly(state_dict_loader.load, {"a": torch.zeros(3)}, storage_reader=reader, no_dist=True)
    assert os.listdir(tmp_path) == ["there"]


class Kept(theirs.DefaultSavePlanner):
    """Torch's planner; its kept plans are the class's, by its name."""


def save_again_and_again(folder, kind, distributed):
    clear_torchs_plans()
    planner = kind(enable_plan_caching=True)
    found = []
    for turn in range(4):
        state = {"w": numbered(4, 3) + turn, "x": numbered(7) + turn, "y": numbered(9) + turn}
        place = os.path.join(folder, str(turn % 2))
        writer = hf_storage.HuggingFaceStorageWriter(place, save_distributed=distributed)
        quietly(state_dict_saver.save, state, storage_writer=writer, planner=planner)
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        found.append(same(load("ours", into, place), state))
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ranks", "kind", "distributed"), [(1, Kept, False), (2, Kept, True), (2, dcp.DefaultSavePlanner, False)]
)
def test_plans_that_are_used_again(rank_pool, tmp_path, ranks, kind, distributed):
    """Where ranks only say that their plans have not changed, to our planner or torch's, each save is the new one."""
    assert rank_pool.run(ranks, save_again_and_again, str(tmp_path), kind, distributed) == [[[]] * 4] * ranks
