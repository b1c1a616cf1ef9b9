"""The names of `torch.distributed.checkpoint.state_dict_loader`."""

from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import (
    _api_bc_check,
    _dcp_method_logger,
    _load_state_dict,
    _load_state_dict_from_keys,
    _profile,
    _storage_setup,
)
from shardkeep.dcp._impl.driver import load as load
from shardkeep.dcp._impl.driver import load_state_dict as load_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import _EmptyStateDictLoadPlanner
from shardkeep.dcp.stateful import Stateful as Stateful
from shardkeep.layouts.torch_values import *
