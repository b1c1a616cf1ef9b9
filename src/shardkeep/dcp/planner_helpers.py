"""The names of `torch.distributed.checkpoint.planner_helpers`."""

from shardkeep.protocol.items import (
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
    _sharded_tensor_metadata,
    create_read_items_for_chunk_list,
)
from shardkeep.protocol.materialise import _init_state_dict, _iterate_state_dict
from shardkeep.protocol.plan_cache import _compare_save_plans, _contains_usable_plan, _merge_delta_local_plans

__all__ = [
    "_chunk_for_shard",
    "_compare_save_plans",
    "_contains_usable_plan",
    "_create_chunk_from_dtensor",
    "_create_chunk_from_tensor",
    "_create_chunk_list",
    "_create_default_metadata_only_plan",
    "_create_read_item_for_byteio",
    "_create_read_item_for_tensor",
    "_create_read_items",
    "_create_write_item_for_bytesio",
    "_create_write_item_for_shard",
    "_create_write_item_for_tensor",
    "_create_write_items",
    "_create_write_items_for_dtensor",
    "_init_state_dict",
    "_iterate_state_dict",
    "_merge_delta_local_plans",
    "_sharded_tensor_metadata",
    "create_read_items_for_chunk_list",
]
