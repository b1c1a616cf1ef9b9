"""The names of `torch.distributed.checkpoint.resharding`."""

from shardkeep.dcp.metadata import ChunkStorageMetadata
from shardkeep.protocol.chunks import boxes_overlap as _check_shard_metadata_pair_overlap
from shardkeep.protocol.chunks import overlap_region as _shards_get_overlap_region_wrt_saved_tensor

__all__ = ["ChunkStorageMetadata", "_check_shard_metadata_pair_overlap", "_shards_get_overlap_region_wrt_saved_tensor"]
