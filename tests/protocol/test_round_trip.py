"""Our drivers and planners with torch's storages, and torch's drivers and planners with what we wrote."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import default_planner as our_planners
from shardkeep.dcp import state_dict_loader, state_dict_saver
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.metadata import Metadata
from tests.protocol.samples import blank, holds, quietly, state_of_ranks, torch_fills_metadata
from tests.toolkit.samples import mesh_of, numbered, seen, spread_out

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


def save_rows(folder):
    state = {"w": spread_out(numbered(9, 7), mesh_of(dist.get_world_size()), Cut(0)), "n": 3}
    quietly(state_dict_saver.save, state, storage_writer=theirs.FileSystemWriter(folder))


def load_columns(folder):
    full = numbered(9, 7)
    state = {"w": spread_out(torch.zeros(9, 7), mesh_of(dist.get_world_size()), Cut(1)), "n": 0}
    quietly(state_dict_loader.load, state, storage_reader=theirs.FileSystemReader(folder))
    expected = spread_out(full, mesh_of(dist.get_world_size()), Cut(1))
    return seen(state["w"]) == seen(expected), state["n"]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 2), (2, 4), (1, 4)])
def test_another_number_of_ranks_reads_another_cut(rank_pool, tmp_path, before, after):
    """Uneven rows of some ranks are read as uneven columns of others."""
    rank_pool.run(before, save_rows, str(tmp_path / "ck"))
    assert rank_pool.run(after, load_columns, str(tmp_path / "ck")) == [(True, 3)] * after


def save_each_alone(folder):
    rank = dist.get_rank()
    state = {"mine": numbered(4) + rank, "rank": rank}
    metadata = quietly(
        state_dict_saver.save, state, storage_writer=theirs.FileSystemWriter(folder), use_collectives=False
    )
    into = {"mine": torch.zeros(4), "rank": None}
    quietly(state_dict_loader.load, into, storage_reader=theirs.FileSystemReader(folder))
    again = {"mine": torch.zeros(4), "rank": None}
    quietly(theirs.load, again, storage_reader=theirs.FileSystemReader(folder))
    return seen(into) == seen(again) == seen(state), sorted(metadata.state_dict_metadata)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_may_save_for_itself(rank_pool, tmp_path, ranks):
    """Without collectives every rank writes and reads back its own values under the same names."""
    assert rank_pool.run(ranks, save_each_alone, str(tmp_path / "ck")) == [(True, ["mine", "rank"])] * ranks


def load_with_half_the_metadata(folder):
    rank = dist.get_rank()
    reader = theirs.FileSystemReader(folder)
    if rank == 1:
        read = reader.read_metadata

        def only_mine(*args, **kwargs):
            if "rank" not in kwargs:
                raise FileNotFoundError("not here yet")
            return read(**kwargs)

        reader.read_metadata = only_mine
    state = {"mine": torch.zeros(4), "rank": None}
    try:
        quietly(state_dict_loader.load, state, storage_reader=reader)
    except CheckpointException as error:
        return type(error).__name__, str(error)
    return None


def test_ranks_that_see_different_metadata_are_told(rank_pool, tmp_path):
    """One rank finds the checkpoint's metadata and another only its own: an error on both, where torch hangs."""
    folder = str(tmp_path / "ck")
    rank_pool.run(2, save_each_alone, folder)
    (tmp_path / "ck" / ".metadata").write_bytes((tmp_path / "ck" / "__0.metadata").read_bytes())
    for kind, text in rank_pool.run(2, load_with_half_the_metadata, folder):
        assert kind == "CheckpointException"
        assert "only ranks [0] of 2" in text


def save_in_halves(folder):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, half = groups[rank // 2], rank // 2
    state = {"w": numbered(3) + half, "half": half, "odd": {"only": rank} if rank % 2 else {}}
    where = f"{folder}{half}"
    metadata = quietly(state_dict_saver.save, state, storage_writer=theirs.FileSystemWriter(where), process_group=group)
    into = blank(state)
    quietly(state_dict_loader.load, into, storage_reader=theirs.FileSystemReader(where), process_group=group)
    return seen(into) == seen(state), sorted(metadata.state_dict_metadata)


def test_parts_of_the_ranks_save_on_their_own(rank_pool, tmp_path):
    """Two groups save at the same time, each with its own coordinator, and keys that not all ranks have are saved."""
    outcome = rank_pool.run(4, save_in_halves, str(tmp_path / "ck"))
    assert outcome == [(True, ["half", "odd.only", "w"])] * 4


def save_led_by(folder, leader):
    state = {"w": numbered(3), "n": leader}
    quietly(state_dict_saver.save_state_dict, state, theirs.FileSystemWriter(folder), coordinator_rank=leader)
    into = {"w": torch.zeros(3), "n": None}
    quietly(state_dict_loader.load_state_dict, into, theirs.FileSystemReader(folder), coordinator_rank=leader)
    return seen(into) == seen(state)


@pytest.mark.parametrize("leader", [0, 2])
def test_any_rank_may_coordinate(rank_pool, tmp_path, leader):
    """The old functions take the coordinator's rank, and do as well with the last one."""
    assert rank_pool.run(3, save_led_by, str(tmp_path / "ck"), leader) == [True] * 3


def test_a_single_process(tmp_path):
    """Without ranks both warn, the result is that of torch, and `_load_state_dict_from_keys` makes the state itself."""
    state = {
        "model": {"w": numbered(2, 3), "b": numbered(3)},
        "meta": {"step": 3, "tags": ["a"]},
        "x": [numbered(1), 2],
    }
    with pytest.warns(UserWarning, match="this process saves on its own"):
        state_dict_saver.save(state, storage_writer=theirs.FileSystemWriter(tmp_path))
    read = state_dict_loader._load_state_dict_from_keys
    for keys, expected in [
        (None, state),
        ("model", {"model": state["model"]}),
        ({"model.w", "meta.step"}, {"model": {"w": state["model"]["w"]}, "meta": {"step": 3}}),
        ("x.1", {"x": [None, 2]}),
        ("absent", {}),
    ]:
        with pytest.warns(UserWarning, match="loads on its own"):
            assert seen(read(keys, storage_reader=theirs.FileSystemReader(tmp_path))) == seen(expected)
    everything = quietly(theirs.state_dict_loader._load_state_dict_from_keys, checkpoint_id=str(tmp_path))
    assert seen(everything) == seen(state)


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
    """Without a storage, and without an id that says where it is, there is a RuntimeError that says what to give."""
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
