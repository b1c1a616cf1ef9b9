"""
The value, or the shard of it, that an index names in a state; and where in a nested state a name belongs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkeep.errors import MalformedFile
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex
from shardkeep.protocol.problems import NoSuchValue
from shardkeep.state.toolkit.recognise import is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard


_MOST_GAPS = 1 << 20
"""Items of lists that left no trace in a checkpoint, such as empty dicts."""


def saved_path(metadata: Metadata, key: str) -> tuple[str | int, ...]:
    """
    Return the keys and positions that led to a value in the state that was saved, as the default planners store them.

    Raises:
        MalformedFile: they lead nowhere, or to a place in a list that is longer than the checkpoint.

    """
    paths = metadata.planner_data
    path = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
    most = len(metadata.state_dict_metadata) + _MOST_GAPS
    if not isinstance(path, tuple) or not all(
        isinstance(part, str) or (type(part) is int and 0 <= part < most) for part in path
    ):
        raise MalformedFile(f"{key!r} cannot stand at {path!r}", key=key)
    return path


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
