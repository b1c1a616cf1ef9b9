"""The names of `torch.distributed.checkpoint.default_planner`."""

from shardkeep.dcp import _version as _version
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import DefaultSavePlanner as DefaultSavePlanner
from shardkeep.dcp._impl.planners import _compare_save_plans as _compare_save_plans
from shardkeep.dcp._impl.planners import _contains_usable_plan as _contains_usable_plan
from shardkeep.dcp._impl.planners import _EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from shardkeep.dcp._impl.planners import _merge_delta_local_plans as _merge_delta_local_plans
from shardkeep.dcp._impl.plans import _check_box_overlap as _check_box_overlap
from shardkeep.dcp._impl.plans import _create_default_local_metadata as _create_default_local_metadata
from shardkeep.dcp._impl.plans import _create_default_metadata_only_plan as _create_default_metadata_only_plan
from shardkeep.dcp._impl.plans import _create_read_items as _create_read_items
from shardkeep.dcp._impl.plans import _create_write_items as _create_write_items
from shardkeep.dcp._impl.plans import _init_state_dict as _init_state_dict
from shardkeep.dcp._impl.plans import _validate_global_plan as _validate_global_plan
from shardkeep.dcp._impl.plans import create_default_global_load_plan as create_default_global_load_plan
from shardkeep.dcp._impl.plans import create_default_global_save_plan as create_default_global_save_plan
from shardkeep.dcp._impl.plans import create_default_local_load_plan as create_default_local_load_plan
from shardkeep.dcp._impl.plans import create_default_local_save_plan as create_default_local_save_plan
from shardkeep.dcp._impl.plans import dedup_save_plans as dedup_save_plans
from shardkeep.dcp._impl.plans import find_state_dict_object as find_state_dict_object
from shardkeep.format.boxes import within
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import STORAGE_TYPES as STORAGE_TYPES
from shardkeep.layouts.torch_values import BytesStorageMetadata as BytesStorageMetadata
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import ReadItem as ReadItem
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageMeta as StorageMeta
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.layouts.torch_values import WriteItem as WriteItem
from shardkeep.layouts.torch_values import WriteItemType as WriteItemType
from shardkeep.state.flatten import FLATTEN_MAPPING as FLATTEN_MAPPING
from shardkeep.state.flatten import flatten_sharded_tensors
from shardkeep.state.flatten import flatten_state_dict as flatten_state_dict
from shardkeep.state.flatten import set_element as set_element

_check_box_bounds = within
_flatten_sharded_tensors = flatten_sharded_tensors
