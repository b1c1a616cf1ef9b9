"""The names of `torch.distributed.checkpoint._async_thread_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.async_ import save_wrapper as save_wrapper
from shardkeep.layouts.torch_values import *
