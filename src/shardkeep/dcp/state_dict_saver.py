"""The names of `torch.distributed.checkpoint.state_dict_saver`."""

from shardkeep.dcp._impl.async_ import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    _ProcessBasedAsyncCheckpointExecutor,
    _ThreadBasedAsyncCheckpointExecutor,
    async_save,
)
from shardkeep.dcp._impl.calls import (
    _api_bc_check,
    _dcp_method_logger,
    _profile,
    _stateful_to_state_dict,
    _storage_setup,
)
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import _save_state_dict, save, save_state_dict
from shardkeep.dcp._impl.planners import DefaultSavePlanner
from shardkeep.dcp._state_dict_utils import STATE_DICT_TYPE
from shardkeep.dcp.stateful import Stateful
from shardkeep.engine.stagers import AsyncStager, DefaultStager, StagingOptions
from shardkeep.layouts.torch_values import Metadata, SavePlan, SavePlanner, StorageWriter, WriteResult

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "DefaultSavePlanner",
    "DefaultStager",
    "Metadata",
    "SavePlan",
    "SavePlanner",
    "StagingOptions",
    "Stateful",
    "StorageWriter",
    "WriteResult",
    "_DistWrapper",
    "_ProcessBasedAsyncCheckpointExecutor",
    "_ThreadBasedAsyncCheckpointExecutor",
    "_api_bc_check",
    "_dcp_method_logger",
    "_profile",
    "_save_state_dict",
    "_stateful_to_state_dict",
    "_storage_setup",
    "async_save",
    "save",
    "save_state_dict",
]
