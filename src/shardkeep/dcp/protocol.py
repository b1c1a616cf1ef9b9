"""The names of `torch.distributed.checkpoint.protocol`, which torch has since 2.14."""

from shardkeep.dcp._impl.plans import (
    _get_checkpointable_tensor_chunks,
    _get_checkpointable_tensor_shard,
    _validate_checkpointable_tensor_metadata,
)
from shardkeep.layouts.torch_values import CheckpointableTensor as CheckpointableTensor
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import _copy_checkpointable_tensor_metadata, _is_checkpointable_tensor

__all__ = ["CheckpointableTensor"]
