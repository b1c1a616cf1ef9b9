"""Our drivers and planners with torch's storages, and torch's drivers and planners with what we wrote."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as theirs

from shardkeep.dcp import default_planner as our_planners
from shardkeep.dcp import state_dict_loader, state_dict_saver
from shardkeep.dcp.metadata import Metadata
from tests.protocol.samples import blank, holds, quietly, state_of_ranks, torch_fills_metadata
from tests.toolkit.samples import numbered, seen

RANKS = [1, 2, 4]
SAVERS = {"ours": state_dict_saver.save, "theirs": theirs.save}
LOADERS = {"ours": state_dict_loader.load, "theirs": theirs.load}
SAVE_PLANNERS = {"ours": our_planners.DefaultSavePlanner, "theirs": theirs.DefaultSavePlanner}
LOAD_PLANNERS = {"ours": our_planners.DefaultLoadPlanner, "theirs": theirs.DefaultLoadPlanner}


def save_and_load(folder, saver, save_planner, loader, load_planner):
    state = state_of_ranks()
    if load_planner == "theirs":
        # Torch's planner drops a ShardedTensor of which a rank has no shard, takes the checkpoint for one of torch 2.3
        # as that key is missing now, and then asks for the empty dict.
        del state["empty"]
    expected = holds(state)
    returned = quietly(
        SAVERS[saver],
        state,
        storage_writer=theirs.FileSystemWriter(folder, thread_count=2),
        planner=SAVE_PLANNERS[save_planner](),
    )
    into = blank(state)
    quietly(
        LOADERS[loader], into, storage_reader=theirs.FileSystemReader(folder), planner=LOAD_PLANNERS[load_planner]()
    )
    found = holds(into)
    wrong = sorted(key for key in expected if found[key] != expected[key])
    return wrong, type(returned), sorted(returned.state_dict_metadata), returned.version


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("saver", "save_planner", "loader", "load_planner"),
    [
        ("ours", "ours", "ours", "ours"),
        ("ours", "ours", "theirs", "theirs"),
        ("theirs", "theirs", "ours", "ours"),
        ("ours", "theirs", "ours", "theirs"),
        ("theirs", "theirs", "theirs", "ours"),
        ("theirs", "ours", "theirs", "theirs"),
    ],
)
def test_what_one_saves_the_other_loads(rank_pool, tmp_path, ranks, saver, save_planner, loader, load_planner):
    """Each driver with each planner, over torch's files: every value comes back bit for bit, on every rank."""
    filled = torch_fills_metadata(tmp_path / "other")
    outcome = rank_pool.run(ranks, save_and_load, str(tmp_path / "ck"), saver, save_planner, loader, load_planner)
    for wrong, kind, keys, version in outcome:
        assert wrong == []
        assert version == ("1.0.0" if filled else None)
        assert keys == outcome[0][2]
        assert (kind is Metadata) == (saver == "ours")
    assert b"shardkeep" not in (tmp_path / "ck" / ".metadata").read_bytes()


def save_led_by(folder, leader):
    state = {"w": numbered(3), "n": leader}
    quietly(state_dict_saver.save_state_dict, state, theirs.FileSystemWriter(folder), coordinator_rank=leader)
    into = {"w": torch.zeros(3), "n": None}
    quietly(state_dict_loader.load_state_dict, into, theirs.FileSystemReader(folder), coordinator_rank=leader)
    return seen(into) == seen(state)


@pytest.mark.parametrize("leader", [0, 2])
def test_any_rank_may_coordinate(rank_pool, tmp_path, leader):
    assert rank_pool.run(3, save_led_by, str(tmp_path / "ck"), leader) == [True] * 3


def test_a_single_process(tmp_path):
    """Without ranks both warn, and `_load_state_dict_from_keys` makes the state itself, with gaps where keys are left out."""
    state = {"meta": {"step": 3}, "x": [numbered(1), 2]}
    with pytest.warns(UserWarning, match="this process saves on its own"):
        state_dict_saver.save(state, storage_writer=theirs.FileSystemWriter(tmp_path))
    read = state_dict_loader._load_state_dict_from_keys
    for keys, expected in [(None, state), ("x.1", {"x": [None, 2]})]:
        with pytest.warns(UserWarning, match="loads on its own"):
            assert seen(read(keys, storage_reader=theirs.FileSystemReader(tmp_path))) == seen(expected)


def test_a_storage_may_still_be_the_second_argument(tmp_path):
    """The old order of arguments works, and a warning says how to write it now."""
    state = {"w": numbered(2)}
    quietly(state_dict_saver.save, state, theirs.FileSystemWriter(tmp_path))
    into = {"w": torch.zeros(2)}
    with pytest.warns(UserWarning, match="given as storage_reader=|loads on its own") as said:
        state_dict_loader.load(into, theirs.FileSystemReader(tmp_path))
    assert len(said) == 2
    assert {warning.filename for warning in said} == {__file__}
    assert seen(into) == seen(state)
    with pytest.raises(AssertionError, match="given twice"):
        quietly(state_dict_loader.load, into, object(), storage_reader=theirs.FileSystemReader(tmp_path))


def test_a_storage_is_needed(tmp_path):
    for call, kind in [(state_dict_saver.save, "storage_writer"), (state_dict_loader.load, "storage_reader")]:
        with pytest.raises(RuntimeError, match=f"checkpoint_id` must be specified if {kind}"):
            quietly(call, {})
        with pytest.raises(RuntimeError, match="Cannot detect"):
            quietly(call, {}, checkpoint_id="no-such-scheme://nowhere")


def test_the_metadata_returned_can_be_pickled(tmp_path):
    """What `save` returns is in our classes, down to the index of each piece, and survives a pickle."""
    metadata = quietly(state_dict_saver.save, {"w": numbered(2)}, storage_writer=theirs.FileSystemWriter(tmp_path))
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    if torch_fills_metadata(tmp_path / "other"):
        assert {type(index).__module__ for index in metadata.storage_data} == {"shardkeep.layouts.torch_values"}
        assert metadata.storage_meta.checkpoint_id == tmp_path
