"""The names of `torch.distributed.checkpoint.state_dict_loader`."""

from shardkeep.dcp._impl.dist import _DistWrapper as _DistWrapper
from shardkeep.dcp._impl.driver import _api_bc_check as _api_bc_check
from shardkeep.dcp._impl.driver import _dcp_method_logger as _dcp_method_logger
from shardkeep.dcp._impl.driver import _load_state_dict as _load_state_dict
from shardkeep.dcp._impl.driver import _load_state_dict_from_keys as _load_state_dict_from_keys
from shardkeep.dcp._impl.driver import _profile as _profile
from shardkeep.dcp._impl.driver import _storage_setup as _storage_setup
from shardkeep.dcp._impl.driver import load as load
from shardkeep.dcp._impl.driver import load_state_dict as load_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import _EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from shardkeep.dcp.stateful import Stateful as Stateful
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import StorageReader as StorageReader
