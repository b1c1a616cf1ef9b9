"""The names of `torch.distributed.checkpoint.state_dict_saver`."""

from shardkeep.compat.async_save import AsyncCheckpointerType, AsyncSaveResponse, async_save
from shardkeep.compat.calls import _stateful_to_state_dict
from shardkeep.compat.save_driver import _save_state_dict, save, save_state_dict
from shardkeep.dcp._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from shardkeep.dcp._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from shardkeep.dcp._state_dict_utils import STATE_DICT_TYPE
from shardkeep.dcp._storage_utils import _storage_setup
from shardkeep.dcp.default_planner import DefaultSavePlanner
from shardkeep.dcp.logger import _dcp_method_logger
from shardkeep.dcp.metadata import Metadata
from shardkeep.dcp.planner import SavePlan, SavePlanner
from shardkeep.dcp.staging import AsyncStager, DefaultStager, StagingOptions
from shardkeep.dcp.stateful import Stateful
from shardkeep.dcp.storage import StorageWriter, WriteResult
from shardkeep.dcp.utils import _api_bc_check, _DistWrapper, _profile

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
