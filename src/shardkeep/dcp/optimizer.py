"""The names of `torch.distributed.checkpoint.optimizer`."""

from shardkeep.dcp._impl.driver import load_state_dict
from shardkeep.dcp._impl.filesystem import (
    _element_wise_add,
    _element_wise_sub,
    _normalize_device_info,
)
from shardkeep.dcp._impl.optimizer import (
    STATE_DICT_2D_LAYOUT,
    _alloc_tensor,
    _create_colwise_spec,
    _gen_rank_device,
    _get_state_dict_2d_layout,
    _is_nested_tensor,
    _ReaderWithOffset,
    load_sharded_optimizer_state_dict,
)
from shardkeep.dcp._impl.planners import DefaultLoadPlanner
from shardkeep.dcp._impl.plans import _create_read_items, create_read_items_for_chunk_list
from shardkeep.layouts.torch_values import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    StorageReader,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.state.flatten import unflatten_state_dict

__all__ = [
    "STATE_DICT_2D_LAYOUT",
    "STATE_DICT_TYPE",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "StorageReader",
    "TensorProperties",
    "TensorStorageMetadata",
    "_ReaderWithOffset",
    "_alloc_tensor",
    "_create_colwise_spec",
    "_create_read_items",
    "_element_wise_add",
    "_element_wise_sub",
    "_gen_rank_device",
    "_get_state_dict_2d_layout",
    "_is_nested_tensor",
    "_normalize_device_info",
    "create_read_items_for_chunk_list",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "unflatten_state_dict",
]
