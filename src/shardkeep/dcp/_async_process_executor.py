"""The names of `torch.distributed.checkpoint._async_process_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor as _AsyncCheckpointExecutor
from shardkeep.dcp._impl.async_ import _ProcessBasedAsyncCheckpointExecutor as _ProcessBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.dist import _DistWrapper as _DistWrapper
from shardkeep.dcp._impl.driver import _dcp_method_logger as _dcp_method_logger
from shardkeep.dcp._impl.driver import _init_logger as _init_logger
from shardkeep.dcp._impl.process import SaverProcess
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter

_AsyncCheckpointProcess = SaverProcess
