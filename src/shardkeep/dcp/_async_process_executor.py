"""The names of `torch.distributed.checkpoint._async_process_executor`."""

from shardkeep.compat.async_process import _ProcessBasedAsyncCheckpointExecutor
from shardkeep.compat.saver_handle import SaverProcess as _AsyncCheckpointProcess

__all__ = ["_AsyncCheckpointProcess", "_ProcessBasedAsyncCheckpointExecutor"]
