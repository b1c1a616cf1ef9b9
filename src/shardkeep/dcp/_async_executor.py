"""The names of `torch.distributed.checkpoint._async_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor
from shardkeep.layouts.torch_values import *
