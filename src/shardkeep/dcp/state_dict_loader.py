"""The names of `torch.distributed.checkpoint.state_dict_loader`."""

from shardkeep.dcp._impl.calls import _api_bc_check, _dcp_method_logger, _profile, _storage_setup
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import (
    _load_state_dict,
    _load_state_dict_from_keys,
    load,
    load_state_dict,
)
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.dcp.stateful import Stateful
from shardkeep.layouts.torch_values import LoadPlan, LoadPlanner, StorageReader

__all__ = [
    "DefaultLoadPlanner",
    "LoadPlan",
    "LoadPlanner",
    "Stateful",
    "StorageReader",
    "_DistWrapper",
    "_EmptyStateDictLoadPlanner",
    "_api_bc_check",
    "_dcp_method_logger",
    "_load_state_dict",
    "_load_state_dict_from_keys",
    "_profile",
    "_storage_setup",
    "load",
    "load_state_dict",
]
