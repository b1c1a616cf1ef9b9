"""The names of `torch.distributed.checkpoint._async_executor`."""

from shardkeep.dcp._impl.async_ import _AsyncCheckpointExecutor as _AsyncCheckpointExecutor
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter
