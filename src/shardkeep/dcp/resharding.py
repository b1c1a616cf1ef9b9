"""The names of `torch.distributed.checkpoint.resharding`."""

from shardkeep.format.boxes import boxes_overlap as _check_shard_metadata_pair_overlap
from shardkeep.format.boxes import overlap_region as _shards_get_overlap_region_wrt_saved_tensor
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
