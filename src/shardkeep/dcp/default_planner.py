"""The names of `torch.distributed.checkpoint.default_planner`."""

from shardkeep.dcp import _version
from shardkeep.dcp._dedup_save_plans import dedup_save_plans
from shardkeep.dcp._nested_dict import FLATTEN_MAPPING, flatten_state_dict
from shardkeep.dcp._sharded_tensor_utils import _flatten_sharded_tensors
from shardkeep.dcp._traverse import set_element
from shardkeep.dcp.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from shardkeep.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from shardkeep.dcp.planner_helpers import (
    _compare_save_plans,
    _contains_usable_plan,
    _create_default_metadata_only_plan,
    _create_read_items,
    _create_write_items,
    _init_state_dict,
    _merge_delta_local_plans,
)
from shardkeep.dcp.utils import find_state_dict_object
from shardkeep.protocol.chunks import within as _check_box_bounds
from shardkeep.protocol.default_plans import (
    _check_box_overlap,
    _create_default_local_metadata,
    _validate_global_plan,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from shardkeep.protocol.load_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.protocol.save_planner import DefaultSavePlanner

__all__ = [
    "FLATTEN_MAPPING",
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteItemType",
    "_EmptyStateDictLoadPlanner",
    "_check_box_bounds",
    "_check_box_overlap",
    "_compare_save_plans",
    "_contains_usable_plan",
    "_create_default_local_metadata",
    "_create_default_metadata_only_plan",
    "_create_read_items",
    "_create_write_items",
    "_flatten_sharded_tensors",
    "_init_state_dict",
    "_merge_delta_local_plans",
    "_validate_global_plan",
    "_version",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "dedup_save_plans",
    "find_state_dict_object",
    "flatten_state_dict",
    "set_element",
]
