"""The names of `torch.distributed.checkpoint.state_dict_loader`."""

from shardkeep.compat.load_driver import _load_state_dict, _load_state_dict_from_keys, load, load_state_dict
from shardkeep.dcp._storage_utils import _storage_setup
from shardkeep.dcp.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.dcp.logger import _dcp_method_logger
from shardkeep.dcp.planner import LoadPlan, LoadPlanner
from shardkeep.dcp.stateful import Stateful
from shardkeep.dcp.storage import StorageReader
from shardkeep.dcp.utils import _api_bc_check, _DistWrapper, _profile

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
