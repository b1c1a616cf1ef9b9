"""The names of `torch.distributed.checkpoint._async_process_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor, _ProcessBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.driver import _dcp_method_logger, _init_logger
from shardkeep.dcp._impl.process import SaverProcess as _AsyncCheckpointProcess
from shardkeep.layouts.torch_values import *
