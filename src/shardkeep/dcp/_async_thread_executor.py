"""The names of `torch.distributed.checkpoint._async_thread_executor`."""

from shardkeep.compat.async_thread import _ThreadBasedAsyncCheckpointExecutor, save_wrapper

__all__ = ["_ThreadBasedAsyncCheckpointExecutor", "save_wrapper"]
