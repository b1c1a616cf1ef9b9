"""What would be lost, or could not be read again, is refused when it is saved; what cannot be true, when it is loaded."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardkeep import dcp
from shardkeep.dcp.default_planner import _EmptyStateDictLoadPlanner
from shardkeep.dcp.metadata import Metadata, TensorProperties, TensorStorageMetadata
from shardkeep.errors import MalformedFile, UnsupportedLeaf

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is not in use")


def save_in_tuple(folder, placement, planner_options):
    mesh = init_device_mesh("cpu", (2,))
    spread = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [placement])
    state = {"ema": {"t": spread}} if planner_options else {"ema": (spread, 5)}
    try:
        dcp.save(state, checkpoint_id=folder, planner=dcp.DefaultSavePlanner(**planner_options))
    except dcp.CheckpointException as failed:
        return [str(error) for error, _ in failed.failures.values()]
    return []


@pytest.mark.parametrize("planner_options", [{}, {"flatten_state_dict": False}])
def test_shards_inside_an_object_are_refused(rank_pool, tmp_path, planner_options):
    """A tuple with a spread DTensor would be saved as one rank's pickle; a replicated one is the same everywhere."""
    for said in rank_pool.run(2, save_in_tuple, str(tmp_path / "a"), Shard(0), planner_options):
        assert said
        assert all("'ema'" in each and "spread over ranks" in each for each in said)
    assert rank_pool.run(2, save_in_tuple, str(tmp_path / "b"), Replicate(), planner_options) == [[], []]


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(dcp.CheckpointException) as failed:
        dcp.save({"s": torch.eye(3).to_sparse()}, checkpoint_id=tmp_path / "ck")
    error = failed.value.failures[0][0]
    assert isinstance(error, UnsupportedLeaf)
    assert "'s'" in str(error)
    assert not list((tmp_path / "ck").glob("*")) if (tmp_path / "ck").exists() else True


@pytest.mark.parametrize("path", [("w", 30_000_000), ("w", -1), "w", ("w", None)])
def test_paths_that_no_state_has(path):
    """A list of thirty million items is not made because metadata of one tensor say so."""
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])
    metadata = Metadata({"w": entry}, planner_data={"w": path})
    with pytest.raises(MalformedFile, match="'w' cannot be at"):
        _EmptyStateDictLoadPlanner().set_up_planner({}, metadata)
