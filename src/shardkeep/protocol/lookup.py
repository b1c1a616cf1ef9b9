"""
The value, or the shard of it, that an index names in a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkeep.protocol.metadata import STATE_DICT_TYPE, MetadataIndex
from shardkeep.protocol.problems import NoSuchValue
from shardkeep.state.toolkit.recognise import is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard


def find_state_dict_object(state_dict: STATE_DICT_TYPE, index: MetadataIndex) -> Any:
    """
    Return what an index names in a flat state dict: the local memory of a tensor's shard, or an object.

    Raises:
        NoSuchValue: (a ValueError) there is no such key, or no shard at that offset.

    """
    if index.fqn not in state_dict:
        raise NoSuchValue(f"Could not find FQN: '{index.fqn}' in the state", key=index.fqn)
    value = state_dict[index.fqn]
    if isinstance(value, torch.Tensor):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _not_sharded(index, type(value).__qualname__)
    return value


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """
    Return the local memory of the shard of a tensor that an index names; of a plain tensor, itself.

    Raises:
        NoSuchValue: (a ValueError) this rank has no shard at that offset.

    """
    if hasattr(tensor, "__get_tensor_shard__"):
        shard: torch.Tensor = tensor.__get_tensor_shard__(index)
        return shard
    if is_sharded_tensor(tensor):
        return _find_shard(tensor, index).tensor  # type: ignore[arg-type]  # no type guard without the import
    if index.offset is not None and any(index.offset):
        raise _not_sharded(index, "whole tensor")
    return tensor


def _find_shard(tensor: ShardedTensor, index: MetadataIndex) -> Shard:
    if index.offset is None:
        raise NoSuchValue(f"{index.fqn!r} is a ShardedTensor: which shard is meant needs an offset", key=index.fqn)
    shards = tensor.local_shards()
    hinted = shards[index.index : index.index + 1] if index.index is not None and index.index >= 0 else []
    for shard in (*hinted, *shards):
        if torch.Size(shard.metadata.shard_offsets) == index.offset:
            return shard
    raise NoSuchValue(f"{index.fqn!r} has no shard at {tuple(index.offset)} on this rank", key=index.fqn)


def _not_sharded(index: MetadataIndex, what: str) -> NoSuchValue:
    offset = tuple(index.offset or ())
    return NoSuchValue(f"{index.fqn!r} is a {what}: nothing in it begins at {offset}", key=index.fqn)
