"""
ShardedTensors inside ShardedTensors, as FSDP over tensor parallelism makes them, turned into flat ones.

Nothing is copied or communicated: the flat tensor is over the innermost memory, at its offsets in the whole tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from shardkeep.errors import InvalidShards
from shardkeep.state.toolkit.recognise import Path, is_sharded_tensor, spell


def flatten_sharded_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the state dict with each ShardedTensor whose local shard is a ShardedTensor as one flat ShardedTensor.

    Everything else passes through, in new dicts and lists. That includes a ShardedTensor of which this rank has no
    shard, which torch drops with its key, and empty dicts, which torch drops too.

    A flat ShardedTensor is right about the local shard and its place, which is all that saving and loading need. It
    knows other ranks' shards only as far as this rank's own nesting tells, so it cannot be gathered or computed with.

    Raises:
        InvalidShards: (a ValueError) a nested tensor cannot be flattened; says which and why.

    """
    return {key: _flattened(value, (key,)) for key, value in state_dict.items()}


def _flattened(value: Any, path: Path) -> Any:
    if isinstance(value, Mapping):
        return {key: _flattened(child, (*path, key)) for key, child in value.items()}
    if isinstance(value, list):
        return [_flattened(child, (*path, index)) for index, child in enumerate(value)]
    if is_sharded_tensor(value) and any(is_sharded_tensor(shard.tensor) for shard in value.local_shards()):
        return _flat(value, path)
    return value


def _flat(outer: Any, path: Path) -> Any:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor
    from torch.distributed._shard.metadata import ShardMetadata  # noqa: PLC0415
    from torch.distributed._shard.sharded_tensor.shard import Shard  # noqa: PLC0415

    outer_shard, inner_shard = _only_shards(outer, path)
    outer_at = outer_shard.metadata.shard_offsets
    rank = dist.get_rank()

    def moved(inner: Any, placement: str) -> ShardMetadata:
        offsets = [a + b for a, b in zip(outer_at, inner.shard_offsets, strict=True)]
        return ShardMetadata(shard_offsets=offsets, shard_sizes=list(inner.shard_sizes), placement=placement)

    device = inner_shard.tensor.device
    mine = moved(inner_shard.metadata, f"rank:{rank}/{device}")
    # Who holds the rest is not known here; all that torch asks is that it be another rank.
    elsewhere = f"rank:{0 if rank else 1}/{device.type if device.type == 'cpu' else f'{device.type}:0'}"
    metadata = copy.deepcopy(outer.metadata())
    metadata.tensor_properties.requires_grad = inner_shard.tensor.requires_grad
    metadata.shards_metadata = [
        *(
            ShardMetadata(
                shard_offsets=list(each.shard_offsets), shard_sizes=list(each.shard_sizes), placement=elsewhere
            )
            for each in outer.metadata().shards_metadata
            if list(each.shard_offsets) != list(outer_at)
        ),
        *(
            moved(each, elsewhere)
            for each in outer_shard.tensor.metadata().shards_metadata
            if list(each.shard_offsets) != list(inner_shard.metadata.shard_offsets)
        ),
        mine,
    ]
    return type(outer)._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(tensor=inner_shard.tensor, metadata=mine)], sharded_tensor_metadata=metadata
    )


def _only_shards(outer: Any, path: Path) -> tuple[Any, Any]:
    """Return the one outer and the one inner shard of this rank; raise where there are more, or they do not match."""
    name = spell(path)
    outer_shards = outer.local_shards()
    if len(outer_shards) != 1:
        raise InvalidShards(
            f"{name!r} has {len(outer_shards)} local shards, some of them ShardedTensors: only one can be flattened",
            hint="give each rank one shard of the outer tensor",
            key=name,
        )
    inner = outer_shards[0].tensor
    inner_shards = inner.local_shards()
    if len(inner_shards) != 1:
        raise InvalidShards(
            f"{name!r}: the ShardedTensor inside has {len(inner_shards)} local shards, expected one",
            hint="give each rank one shard of the inner tensor",
            key=name,
        )
    if is_sharded_tensor(inner_shards[0].tensor):
        raise InvalidShards(f"{name!r} is sharded in more than two ways, one inside the other", key=name)
    inner_size, room = tuple(inner.size()), tuple(outer_shards[0].metadata.shard_sizes)
    if inner_size != room:
        raise InvalidShards(
            f"{name!r}: the ShardedTensor inside has size {inner_size}, the shard it stands for {room}",
            hint="the inner tensor must be the whole of the outer shard",
            key=name,
        )
    return outer_shards[0], inner_shards[0]
