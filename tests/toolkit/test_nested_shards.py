"""ShardedTensors inside ShardedTensors, made flat."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint import _sharded_tensor_utils as theirs

from shardkeep.dcp._sharded_tensor_utils import _flatten_sharded_tensors
from shardkeep.errors import InvalidShards
from tests.toolkit.samples import in_chunks, numbered, seen, sharded_tensor


def two_by_two(full):
    """Rows over the first half and second half of four ranks, each half's columns over its two ranks."""
    rank = dist.get_rank()
    rows, columns = full.shape[0] // 2, full.shape[1] // 2
    first = rank // 2 * 2
    outer_at = (rank // 2 * rows, 0)
    part = full[outer_at[0] : outer_at[0] + rows]
    inner = sharded_tensor(
        part, [(first, (0, 0), (part.shape[0], columns)), (first + 1, (0, columns), (part.shape[0], columns))]
    )
    # The outer tensor of FSDP is one over the ranks of equal column, of which each sees two.
    owners = [rank % 2, rank % 2 + 2]
    metadata = [
        ShardMetadata(shard_offsets=[i * rows, 0], shard_sizes=[rows, full.shape[1]], placement=f"rank:{owner}/cpu")
        for i, owner in enumerate(owners)
    ]
    return outer_of([(inner, metadata[rank // 2])], metadata, full)


def outer_of(shards, metadata, full):
    """A ShardedTensor around (tensor, metadata) that torch would not let into one."""
    whole = ShardedTensorMetadata(metadata, full.size(), TensorProperties(dtype=full.dtype))
    outer = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.zeros(each.shard_sizes, dtype=full.dtype), each) for _, each in shards], whole
    )
    for held, (tensor, _) in zip(outer.local_shards(), shards, strict=True):
        held.tensor = tensor
    return outer


def described(tensor):
    """What saving asks of a ShardedTensor: its size, its own shards, and how all shards tile it."""
    boxes = sorted((tuple(m.shard_offsets), tuple(m.shard_sizes)) for m in tensor.metadata().shards_metadata)
    return seen(tensor), boxes


def flatten_both():
    full = numbered(4, 6)
    nested = two_by_two(full)
    rest = {"plain": in_chunks(numbered(8, 2)), "n": 1, "list": [numbered(2), {"x": None}], "t": numbered(3)}
    tree = {"w": nested, "in": {"side": [two_by_two(full * 2)]}, **rest}
    ours, expected = _flatten_sharded_tensors(tree), theirs._flatten_sharded_tensors(tree)
    same_memory = ours["w"].local_shards()[0].tensor is nested.local_shards()[0].tensor.local_shards()[0].tensor
    pairs = [(ours["w"], expected["w"]), (ours["in"]["side"][0], expected["in"]["side"][0])]
    kept = all(seen(ours[key]) == seen(expected[key]) == seen(tree[key]) for key in rest)
    unchanged = tree["w"] is nested and isinstance(nested.local_shards()[0].tensor, ShardedTensor)
    shard = ours["w"].local_shards()[0]
    (r, c), (h, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    in_place = torch.equal(full[r : r + h, c : c + w], shard.tensor)
    return [described(a) == described(b) for a, b in pairs], same_memory, kept, unchanged, in_place, (r, c)


def test_a_nested_tensor_lies_at_its_global_offsets(rank_pool):
    """Each rank's innermost shard, without a copy, where it belongs in the whole, and all else as in torch."""
    found = rank_pool.run(4, flatten_both)
    assert [one[:-1] for one in found] == [([True, True], True, True, True, True)] * 4
    assert [one[-1] for one in found] == [(0, 0), (0, 3), (2, 0), (2, 3)]


def flatten_without_shards():
    tree = {"few": in_chunks(numbered(1, 2)), "empty": {}, 3: {"x": numbered(1)}}
    made = _flatten_sharded_tensors(tree)
    return list(made), made["few"] is tree["few"], made["empty"], list(made[3])


def test_nothing_is_dropped(rank_pool):
    """A tensor without a shard on this rank stays, as do empty dicts and keys that are no strings; torch loses them."""
    assert rank_pool.run(2, flatten_without_shards) == [(["few", "empty", 3], True, {}, ["x"])] * 2


def flatten_badly(case):
    full = numbered(4, 6)
    rank = dist.get_rank()
    whole = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 6], placement=f"rank:{rank}/cpu")
    if case == "two inner shards":
        inner = sharded_tensor(full, [(rank, (0, 0), (4, 3)), (rank, (0, 3), (4, 3))])
        nested = outer_of([(inner, whole)], [whole], full)
    elif case == "no inner shard":
        inner = sharded_tensor(full, [(1 - rank, (0, 0), (4, 6))])
        nested = outer_of([(inner, whole)], [whole], full)
    elif case == "other size":
        inner = sharded_tensor(numbered(3, 6), [(rank, (0, 0), (3, 6))])
        nested = outer_of([(inner, whole)], [whole], full)
    elif case == "two outer shards":
        halves = [
            ShardMetadata(shard_offsets=[at, 0], shard_sizes=[2, 6], placement=f"rank:{rank}/cpu") for at in (0, 2)
        ]
        inner = sharded_tensor(full[:2], [(rank, (0, 0), (2, 6))])
        nested = outer_of([(inner, halves[0]), (full[2:], halves[1])], halves, full)
    else:
        inner = sharded_tensor(full, [(rank, (0, 0), (4, 6))])
        middle = outer_of([(inner, whole)], [whole], full)
        nested = outer_of([(middle, whole)], [whole], full)
    _flatten_sharded_tensors({"a": {"w": nested}})


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("two inner shards", "the inner one has 2 local shards"),
        ("no inner shard", "the inner one has 0 local shards"),
        ("other size", r"size \(3, 6\) \(expected \(4, 6\)\)"),
        ("two outer shards", "the outer one has 2 local shards"),
        ("three deep", "more than two ways"),
    ],
)
def test_what_cannot_be_flattened_is_refused(rank_pool, case, said):
    for outcome in rank_pool.outcomes(2, flatten_badly, case):
        with pytest.raises(InvalidShards, match=rf"'a\.w' is .*{said}") as caught:
            raise outcome.error
        assert isinstance(caught.value, ValueError)
