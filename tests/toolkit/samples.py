"""State dicts as ranks hold them, sharded in every way, and how to compare two of them bit for bit."""

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from tests.engine.samples import bits, raw_view

CPU = torch.device("cpu")


def seen(value):
    """Everything about a tree that counts, as something comparable: kinds, layouts, dtypes and bits."""
    if isinstance(value, ShardedTensor):
        shards = [(tuple(s.metadata.shard_offsets), bits(s.tensor)) for s in value.local_shards()]
        return ("ShardedTensor", tuple(value.size()), shards)
    if isinstance(value, DTensor):
        return ("DTensor", tuple(value.shape), value.placements, bits(value._local_tensor))
    if isinstance(value, torch.Tensor) and value.is_meta:
        return ("meta", str(value.dtype), tuple(value.shape))
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [seen(item) for item in value])
    return bits(value)


def numbered(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape)


def grid():
    size = dist.get_world_size()
    return mesh_of(2, size // 2) if size > 1 else mesh_of(1, 1)


def spread_out(full, mesh, *placements):
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def copied(tensor):
    return raw_view(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def sharded_tensor(full, boxes):
    """A ShardedTensor of the parts of `full` given as (rank, offsets, sizes)."""
    rank = dist.get_rank()
    metadata = [
        ShardMetadata(shard_offsets=list(at), shard_sizes=list(size), placement=f"rank:{owner}/cpu")
        for owner, at, size in boxes
    ]
    local = [
        Shard(copied(full[tuple(slice(o, o + n) for o, n in zip(m.shard_offsets, m.shard_sizes, strict=True))]), m)
        for (owner, _, _), m in zip(boxes, metadata, strict=True)
        if owner == rank
    ]
    whole = ShardedTensorMetadata(metadata, full.size(), TensorProperties(dtype=full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)


def in_chunks(full):
    """A ShardedTensor cut by rows as FSDP does it: the last ranks have fewer rows, or no shard."""
    rows, size = full.shape[0], dist.get_world_size()
    each = -(-rows // size)
    starts = [(rank, min(rank * each, rows)) for rank in range(size)]
    boxes = [
        (rank, (at, *(0,) * (full.dim() - 1)), (min(each, rows - at), *full.shape[1:]))
        for rank, at in starts
        if at < rows
    ]
    return sharded_tensor(full, boxes)


def sharded_tree():
    line, square = mesh_of(dist.get_world_size()), grid()
    return {
        "even": spread_out(numbered(8, 3), line, Cut(0)),
        "uneven": spread_out(numbered(5, 3), line, Cut(0)),
        "columns": spread_out(numbered(3, 7, dtype=torch.bfloat16), line, Cut(1)),
        "replicated": spread_out(numbered(4), line, Replicate()),
        "hybrid": spread_out(numbered(6, 5), square, Replicate(), Cut(0)),
        "both": spread_out(numbered(7, 9, dtype=torch.float64), square, Cut(0), Cut(1)),
        "twice": spread_out(numbered(9, 2, dtype=torch.int64), square, Cut(0), Cut(0)),
        "scalar": spread_out(torch.tensor(2.5), line, Replicate()),
        "chunks": in_chunks(numbered(9, 2)),
        "few rows": in_chunks(numbered(2, 3, dtype=torch.int32)),
        "nested": {"list": [numbered(3), spread_out(numbered(4, 4), line, Cut(0)), None], "pair": (1, numbered(2))},
        "plain": numbered(2, 2),
        "step": 7,
        "lr": 0.1,
        "name": "run",
        "raw": b"\x00\x01",
        "nothing": None,
        "empty": {},
    }
