"""The names of `torch.distributed.checkpoint._async_executor`."""

from shardkeep.compat.async_thread import _AsyncCheckpointExecutor

__all__ = ["_AsyncCheckpointExecutor"]
