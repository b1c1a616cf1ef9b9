"""The names of `torch.distributed.checkpoint.default_planner`."""

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
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "_check_box_bounds",
    "_check_box_overlap",
    "_create_default_local_metadata",
    "_validate_global_plan",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
]
