"""The names of `torch.distributed.checkpoint._async_thread_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor, save_wrapper
from shardkeep.layouts.torch_values import STATE_DICT_TYPE, SavePlanner, StorageWriter

__all__ = [
    "STATE_DICT_TYPE",
    "SavePlanner",
    "StorageWriter",
    "_AsyncCheckpointExecutor",
    "_ThreadBasedAsyncCheckpointExecutor",
    "save_wrapper",
]
