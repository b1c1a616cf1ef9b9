"""The names of `torch.distributed.checkpoint.default_planner`."""

from shardkeep.dcp import _version
from shardkeep.dcp._impl.planners import *
from shardkeep.dcp._impl.planners import (
    _compare_save_plans,
    _contains_usable_plan,
    _EmptyStateDictLoadPlanner,
    _merge_delta_local_plans,
)
from shardkeep.dcp._impl.plans import *
from shardkeep.dcp._impl.plans import (
    _check_box_overlap,
    _create_default_local_metadata,
    _create_default_metadata_only_plan,
    _create_read_items,
    _create_write_items,
    _init_state_dict,
    _validate_global_plan,
)
from shardkeep.format.boxes import within as _check_box_bounds
from shardkeep.layouts.torch_values import *
from shardkeep.layouts.torch_values import _is_checkpointable_tensor
from shardkeep.state.flatten import *
from shardkeep.state.flatten import flatten_sharded_tensors as _flatten_sharded_tensors
