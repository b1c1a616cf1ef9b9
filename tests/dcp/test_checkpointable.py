"""Plain tensors whose attributes say which shards of a larger one they hold: torch's `CheckpointableTensor`, of 2.14."""

import pytest
import torch

from shardkeep import dcp
from tests.protocol.samples import quietly

WHOLE = torch.arange(24.0).reshape(6, 4)


def holding(*shards, shape=(4, 6)):
    """A padded tensor with these rows of the whole one, two rows from row 0 and two from row 2 of it."""
    tensor = torch.full(shape, -1.0)
    tensor.global_shape = tuple(WHOLE.shape)
    tensor.global_offsets = tuple((row, 0) for row in shards)
    tensor.local_offsets = tuple((2 * n, 1) for n in range(len(shards)))
    tensor.local_sizes = tuple((2, 4) for _ in shards)
    return tensor


def filled(*shards):
    tensor = holding(*shards)
    for n, row in enumerate(shards):
        tensor[2 * n : 2 * n + 2, 1:5] = WHOLE[row : row + 2]
    return tensor


def save_and_reshard(folder, saving):
    rank = torch.distributed.get_rank()
    state = {"w": filled(4, 0) if rank else filled(2)}
    if saving == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        kind = dcp.state_dict_saver.AsyncCheckpointerType[saving]
        dcp.async_save(state, checkpoint_id=folder, async_checkpointer_type=kind).result()
    target = {"w": holding(2, 4) if rank else holding(0)}
    dcp.load(target, checkpoint_id=folder)
    return torch.equal(target["w"], filled(2, 4) if rank else filled(0))


@pytest.mark.parametrize("saving", ["save", "THREAD", "PROCESS"])
def test_shards_are_saved_and_loaded(rank_pool, tmp_path, saving):
    """Only the shards, not what is beside them in memory; a plain tensor gets the whole."""
    assert rank_pool.run(2, save_and_reshard, str(tmp_path), saving) == [True, True]
    whole = {"w": torch.zeros(6, 4)}
    quietly(dcp.load, whole, checkpoint_id=tmp_path)
    assert torch.equal(whole["w"], WHOLE)
    assert dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].size == WHOLE.shape


def test_meta_tensors_keep_what_they_hold(tmp_path):
    """Memory is given to a tensor on meta before it is loaded into."""
    quietly(dcp.save, {"w": WHOLE}, checkpoint_id=tmp_path)
    target = {"w": holding(4)}
    meta = target["w"].to("meta")
    vars(meta).update(vars(target["w"]))
    state = {"w": meta}
    dcp.planner_helpers._init_state_dict(state)
    quietly(dcp.load, state, checkpoint_id=tmp_path)
    assert torch.equal(state["w"][:2, 1:5], WHOLE[4:])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("local_sizes", ((2, 4), (2, 4)), "three times"),
        ("global_offsets", ((5, 0),), "is not inside"),
        ("local_offsets", ((3, 1),), "is not inside"),
        ("global_offsets", ((0,),), "is not inside"),
    ],
)
def test_descriptions_that_cannot_be(tmp_path, name, value, message):
    tensor = filled(0)
    setattr(tensor, name, value)
    with pytest.raises(dcp.CheckpointException, match=message):
        quietly(dcp.save, {"w": tensor}, checkpoint_id=tmp_path / "ck")
    assert not (tmp_path / "ck" / ".metadata").exists()


def test_a_whole_of_another_size(tmp_path):
    quietly(dcp.save, {"w": torch.zeros(7, 4)}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        quietly(dcp.load, {"w": holding(0)}, checkpoint_id=tmp_path)


def test_a_shard_is_found_by_its_offset():
    """Without an offset, only where there is one shard."""
    index = dcp.metadata.MetadataIndex
    assert torch.equal(dcp.utils.find_tensor_shard(filled(4, 0), index("w", [0, 0], 0)), WHOLE[:2])
    assert torch.equal(dcp.utils.find_tensor_shard(filled(4), index("w")), WHOLE[4:])
    with pytest.raises(ValueError, match="no offset"):
        dcp.utils.find_tensor_shard(filled(4, 0), index("w"))
    with pytest.raises(ValueError, match=r"no shard at \(2, 0\)"):
        dcp.utils.find_tensor_shard(filled(4, 0), index("w", [2, 0]))
