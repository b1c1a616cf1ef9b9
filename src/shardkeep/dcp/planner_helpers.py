"""The names of `torch.distributed.checkpoint.planner_helpers`."""

from shardkeep.dcp._impl.planners import _compare_save_plans as _compare_save_plans
from shardkeep.dcp._impl.planners import _contains_usable_plan as _contains_usable_plan
from shardkeep.dcp._impl.planners import _merge_delta_local_plans as _merge_delta_local_plans
from shardkeep.dcp._impl.plans import _chunk_for_shard as _chunk_for_shard
from shardkeep.dcp._impl.plans import _create_chunk_from_dtensor as _create_chunk_from_dtensor
from shardkeep.dcp._impl.plans import _create_chunk_from_tensor as _create_chunk_from_tensor
from shardkeep.dcp._impl.plans import _create_chunk_list as _create_chunk_list
from shardkeep.dcp._impl.plans import _create_default_metadata_only_plan as _create_default_metadata_only_plan
from shardkeep.dcp._impl.plans import _create_read_item_for_byteio as _create_read_item_for_byteio
from shardkeep.dcp._impl.plans import _create_read_item_for_tensor as _create_read_item_for_tensor
from shardkeep.dcp._impl.plans import _create_read_items as _create_read_items
from shardkeep.dcp._impl.plans import _create_write_item_for_bytesio as _create_write_item_for_bytesio
from shardkeep.dcp._impl.plans import _create_write_item_for_shard as _create_write_item_for_shard
from shardkeep.dcp._impl.plans import _create_write_item_for_tensor as _create_write_item_for_tensor
from shardkeep.dcp._impl.plans import _create_write_items as _create_write_items
from shardkeep.dcp._impl.plans import _create_write_items_for_dtensor as _create_write_items_for_dtensor
from shardkeep.dcp._impl.plans import _init_state_dict as _init_state_dict
from shardkeep.dcp._impl.plans import _iterate_state_dict as _iterate_state_dict
from shardkeep.dcp._impl.plans import _sharded_tensor_metadata as _sharded_tensor_metadata
from shardkeep.dcp._impl.plans import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from shardkeep.format.boxes import boxes_overlap, overlap_region
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import STORAGE_TYPES as STORAGE_TYPES
from shardkeep.layouts.torch_values import BytesStorageMetadata as BytesStorageMetadata
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadItemType as LoadItemType
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import ReadItem as ReadItem
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.layouts.torch_values import TensorWriteData as TensorWriteData
from shardkeep.layouts.torch_values import WriteItem as WriteItem
from shardkeep.layouts.torch_values import WriteItemType as WriteItemType

_check_shard_metadata_pair_overlap = boxes_overlap
_shards_get_overlap_region_wrt_saved_tensor = overlap_region
