"""The names of `torch.distributed.checkpoint._checkpointer`."""

from shardkeep.dcp import state_dict_loader, state_dict_saver
from shardkeep.dcp._impl.async_ import _Checkpointer as _Checkpointer
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter

loader = state_dict_loader
saver = state_dict_saver
