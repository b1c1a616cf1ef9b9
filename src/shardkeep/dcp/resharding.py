"""The names of `torch.distributed.checkpoint.resharding`."""

from shardkeep.format.boxes import boxes_overlap, overlap_region
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata

_check_shard_metadata_pair_overlap = boxes_overlap
_shards_get_overlap_region_wrt_saved_tensor = overlap_region
