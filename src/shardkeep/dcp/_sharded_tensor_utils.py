"""The names of `torch.distributed.checkpoint._sharded_tensor_utils`."""

from shardkeep.state.toolkit.nested_shards import flatten_sharded_tensors as _flatten_sharded_tensors

__all__ = ["_flatten_sharded_tensors"]
