"""The names of `torch.distributed.checkpoint.state_dict_saver`."""

from shardkeep.dcp._impl.async_ import *
from shardkeep.dcp._impl.async_ import _ProcessBasedAsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import (
    _api_bc_check,
    _dcp_method_logger,
    _profile,
    _save_state_dict,
    _stateful_to_state_dict,
    _storage_setup,
)
from shardkeep.dcp._impl.driver import save as save
from shardkeep.dcp._impl.driver import save_state_dict as save_state_dict
from shardkeep.dcp._impl.planners import DefaultSavePlanner as DefaultSavePlanner
from shardkeep.dcp._state_dict_utils import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.dcp.stateful import Stateful as Stateful
from shardkeep.engine.stagers import *
from shardkeep.layouts.torch_values import *
