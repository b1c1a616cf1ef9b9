"""The names of `torch.distributed.checkpoint._async_process_executor`."""

from shardkeep.compat.async_process import _ProcessBasedAsyncCheckpointExecutor
from shardkeep.compat.saver_handle import SaverProcess as _AsyncCheckpointProcess
from shardkeep.dcp._async_executor import _AsyncCheckpointExecutor
from shardkeep.dcp.logger import _dcp_method_logger, _init_logger
from shardkeep.dcp.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.dcp.planner import SavePlanner
from shardkeep.dcp.storage import StorageWriter
from shardkeep.dcp.utils import _DistWrapper

__all__ = [
    "STATE_DICT_TYPE",
    "Metadata",
    "SavePlanner",
    "StorageWriter",
    "_AsyncCheckpointExecutor",
    "_AsyncCheckpointProcess",
    "_DistWrapper",
    "_ProcessBasedAsyncCheckpointExecutor",
    "_dcp_method_logger",
    "_init_logger",
]
