"""Sharded optimizer state, next to torch's own function on the same checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as theirs
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint import optimizer as their_optimizer
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - everyone's name
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import Shard as Cut

from shardkeep.dcp import optimizer as our_optimizer
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.metadata import TensorProperties as OurProperties
from shardkeep.dcp.state_dict_saver import save
from shardkeep.errors import InvalidShards
from shardkeep.layouts.torch_values import MetadataIndex
from tests.protocol.samples import quietly
from tests.toolkit.samples import in_chunks, mesh_of, numbered, seen, spread_out

CPU = torch.device("cpu")


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    wrapped = FSDP(model, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(3):
        wrapped(numbered(4, 6) / 10 + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped, optimizer


def resume_fsdp(folder):
    model, optimizer = trained(1)
    other, fresh = trained(2)
    for each in (model, other):
        FSDP.set_state_dict_type(each, StateDictType.SHARDED_STATE_DICT)
    state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    save(state, storage_writer=theirs.FileSystemWriter(folder))
    found = [
        module.load_sharded_optimizer_state_dict(other.state_dict(), "optim", theirs.FileSystemReader(folder))
        for module in (our_optimizer, their_optimizer)
    ]
    mine, other_state = found
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, mine["optim"]))
    again = FSDP.optim_state_dict(other, fresh)
    return {
        "as torch": seen(mine) == seen(other_state),
        "placed as torch": placements(mine) == placements(other_state),
        "as saved": seen(again) == seen(state["optim"]),
        "sharded": sum(isinstance(value, ShardedTensor) for value in leaves(mine)),
    }


def leaves(tree):
    if isinstance(tree, (dict, list)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(each)
    else:
        yield tree


def placements(tree):
    return [
        [(m.shard_offsets, m.shard_sizes, str(m.placement)) for m in leaf.metadata().shards_metadata]
        for leaf in leaves(tree)
        if isinstance(leaf, ShardedTensor)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore")
def test_the_optimizer_of_a_model_under_fsdp(rank_pool, tmp_path, ranks):
    """The state loaded is torch's, shard for shard, and after it is set the optimizer has what was saved."""
    for outcome in rank_pool.run(ranks, quietly, resume_fsdp, str(tmp_path / "ck")):
        assert outcome == {"as torch": True, "placed as torch": True, "as saved": True, "sharded": 8}


def over_tensor_parallel(full, group, place):
    """The columns of a tensor parallel place, one of two, cut by rows over the data parallel group."""
    columns = full.shape[1] // 2
    part = full[:, place * columns : (place + 1) * columns]
    ranks = dist.get_process_group_ranks(group)
    rows = -(-part.shape[0] // len(ranks))
    inner_md = [
        ShardMetadata([i * rows, 0], [min(rows, part.shape[0] - i * rows), columns], f"rank:{rank}/cpu")
        for i, rank in enumerate(ranks)
    ]
    mine = inner_md[dist.get_rank(group)]
    held = part[mine.shard_offsets[0] : mine.shard_offsets[0] + mine.shard_sizes[0]].contiguous()
    inner = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(held, mine)],
        ShardedTensorMetadata(inner_md, part.size(), TensorProperties(dtype=full.dtype)),
        process_group=group,
    )
    owners = [dist.get_rank() if i == place else (dist.get_rank() + 1) % 2 for i in range(2)]
    outer_md = [
        ShardMetadata([0, i * columns], [full.shape[0], columns], f"rank:{owner}/cpu") for i, owner in enumerate(owners)
    ]
    whole = ShardedTensorMetadata(outer_md, full.size(), TensorProperties(dtype=full.dtype))
    empty = Shard(torch.zeros(full.shape[0], columns, dtype=full.dtype), outer_md[place])
    outer = ShardedTensor._init_from_local_shards_and_global_metadata([empty], whole)
    outer.local_shards()[0].tensor = inner
    return outer


SAVED = {
    "state": {
        "w": {"exp_avg": numbered(5, 6), "step": torch.tensor(7.0)},
        "b": {"exp_avg": numbered(9) * 2},
        "unknown": {"m": numbered(3)},
    },
    "param_groups": [{"lr": 0.5, "params": ["w", "b"]}],
}


def resume_in_two_dimensions(folder):
    """Two ranks share the columns of each of two places, or four ranks those of their own place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if size == 4 else [dist.group.WORLD] * 2
    save({"optim": SAVED, "other": {"x": numbered(2)}}, storage_writer=theirs.FileSystemWriter(folder))
    outcomes = []
    for place in [rank % 2] if size == 4 else [0, 1]:
        group = groups[place]
        model = {"w": over_tensor_parallel(torch.zeros(5, 6), group, place), "b": in_chunks(torch.zeros(9))}
        layout, found_group = our_optimizer._get_state_dict_2d_layout({**model, "step": 3})
        load_it = [m.load_sharded_optimizer_state_dict for m in (our_optimizer, their_optimizer)]
        mine = load_it[0](model, "optim", theirs.FileSystemReader(folder))
        try:
            other = load_it[1](model, "optim", theirs.FileSystemReader(folder))
            as_torch = (seen(mine), placements(mine)) == (seen(other), placements(other))
        except ValueError as error:
            as_torch = str(error)
        tensors = {"w": mine["optim"]["state"]["w"]["exp_avg"], "b": mine["optim"]["state"]["b"]["exp_avg"]}
        whole = {"w": numbered(5, 6)[:, place * 3 : place * 3 + 3], "b": numbered(9) * 2}
        parts = [
            (tensors[name].size() == whole[name].size(), [seen(s.tensor) == seen(box(whole[name], s)) for s in shards])
            for name in tensors
            for shards in [tensors[name].local_shards()]
        ]
        outcomes.append(
            {
                "layout": layout == their_optimizer._get_state_dict_2d_layout(model)[0] and found_group is group,
                "as torch": as_torch,
                "parts": parts,
                "rest": seen({k: v for k, v in mine["optim"].items() if k != "state"})
                == seen({"param_groups": SAVED["param_groups"]}),
                "step": mine["optim"]["state"]["w"]["step"].item(),
                "keys": sorted(mine),
            }
        )
    return outcomes


def box(full, shard):
    at, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return full[tuple(slice(o, o + n) for o, n in zip(at, sizes, strict=True))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore")
def test_the_optimizer_of_a_model_under_fsdp_and_tensor_parallelism(rank_pool, tmp_path, ranks):
    """
    Each rank gets the rows of its own columns, as torch gives them where the data group is all ranks. Where it is not,
    torch names the ranks of the group where those of all are meant, and raises.
    """
    for rank, outcomes in enumerate(rank_pool.run(ranks, quietly, resume_in_two_dimensions, str(tmp_path / "ck"))):
        group = [rank % 2, rank % 2 + 2]
        refused = f"Global rank {1 - rank % 2} does not exist in input process group: {group}"
        for outcome in outcomes:
            assert outcome == {
                "layout": True,
                "as torch": True if ranks == 2 else refused,
                "parts": [(True, [True]), (True, [True])],
                "rest": True,
                "step": 7.0,
                "keys": ["optim"],
            }


def load_badly(folder):
    save({"optim": {"state": {"w": {"m": numbered(4)}}}}, storage_writer=theirs.FileSystemWriter(folder))
    reader = theirs.FileSystemReader(folder)
    with pytest.raises(RuntimeError, match="nothing under 'optimizer'"):
        our_optimizer.load_sharded_optimizer_state_dict({}, "optimizer", reader)

    class Broken(theirs.FileSystemReader):
        def read_data(self, plan, planner):
            if dist.get_rank() == 1:
                raise OSError("no data")
            return super().read_data(plan, planner)

    with pytest.raises(CheckpointException) as caught:
        our_optimizer.load_sharded_optimizer_state_dict({}, "optim", Broken(folder))
    return list(caught.value.failures)


def test_failures_are_told_on_all_ranks(rank_pool, tmp_path):
    """A key that is not in the checkpoint is named; a rank that cannot read is named on all ranks."""
    assert rank_pool.run(2, quietly, load_badly, str(tmp_path / "ck")) == [[1], [1]]


def try_the_pieces():
    mesh = mesh_of(dist.get_world_size())
    line = spread_out(numbered(4), mesh, Cut(0))
    nested_badly = in_chunks(numbered(4, 2))
    nested_badly.local_shards()[0].tensor = line
    with pytest.raises(InvalidShards):
        our_optimizer._is_nested_tensor(nested_badly)
    spec, expected = our_optimizer._create_colwise_spec(), their_optimizer._create_colwise_spec()
    made = our_optimizer._alloc_tensor(OurProperties(torch.int16), [2, 3], "cpu")
    planner = our_optimizer._ReaderWithOffset({"w": (1, 0)})
    planner.translation = {MetadataIndex("w", (1, 0)): MetadataIndex("w", (0, 0))}
    planner.state_dict = {"w": numbered(2, 2)}
    return {
        "plain": our_optimizer._is_nested_tensor(line) or our_optimizer._is_nested_tensor(in_chunks(numbered(4))),
        "spec": (spec.dim, [str(p) for p in spec.placements]) == (expected.dim, [str(p) for p in expected.placements]),
        "made": (made.dtype, tuple(made.shape), made.device.type),
        "device": our_optimizer._gen_rank_device(3, "cpu"),
        "found": seen(planner.lookup_tensor(MetadataIndex("w", (1, 0)))) == seen(numbered(2, 2)),
    }


def test_the_pieces(rank_pool):
    """Nested tensors are recognised or refused, cuts and memory are torch's, and a moved shard is found where it is."""
    expected = {"plain": False, "spec": True, "made": (torch.int16, (2, 3), "cpu"), "device": "cpu", "found": True}
    assert rank_pool.run(2, quietly, try_the_pieces) == [expected] * 2
