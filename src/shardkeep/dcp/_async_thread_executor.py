"""The names of `torch.distributed.checkpoint._async_thread_executor`."""

from shardkeep.compat.async_thread import _ThreadBasedAsyncCheckpointExecutor, save_wrapper
from shardkeep.dcp._async_executor import _AsyncCheckpointExecutor
from shardkeep.dcp.metadata import STATE_DICT_TYPE
from shardkeep.dcp.planner import SavePlanner
from shardkeep.dcp.storage import StorageWriter

__all__ = [
    "STATE_DICT_TYPE",
    "SavePlanner",
    "StorageWriter",
    "_AsyncCheckpointExecutor",
    "_ThreadBasedAsyncCheckpointExecutor",
    "save_wrapper",
]
