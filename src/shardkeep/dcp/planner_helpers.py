"""The names of `torch.distributed.checkpoint.planner_helpers`."""

from shardkeep.dcp._impl.planners import _compare_save_plans, _contains_usable_plan, _merge_delta_local_plans
from shardkeep.dcp._impl.plans import (
    _chunk_for_shard,
    _create_chunk_from_dtensor,
    _create_chunk_from_tensor,
    _create_chunk_list,
    _create_default_metadata_only_plan,
    _create_read_item_for_byteio,
    _create_read_item_for_tensor,
    _create_read_items,
    _create_write_item_for_bytesio,
    _create_write_item_for_shard,
    _create_write_item_for_tensor,
    _create_write_items,
    _create_write_items_for_dtensor,
    _get_checkpointable_tensor_chunks,
    _get_checkpointable_tensor_write_items,
    _init_state_dict,
    _iterate_state_dict,
    _sharded_tensor_metadata,
)
from shardkeep.dcp._impl.plans import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from shardkeep.format.boxes import boxes_overlap as _check_shard_metadata_pair_overlap
from shardkeep.format.boxes import overlap_region as _shards_get_overlap_region_wrt_saved_tensor
from shardkeep.layouts.torch_values import *
from shardkeep.layouts.torch_values import _copy_checkpointable_tensor_metadata, _is_checkpointable_tensor
