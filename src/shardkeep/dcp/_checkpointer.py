"""The names of `torch.distributed.checkpoint._checkpointer`."""

from shardkeep.dcp import state_dict_loader as loader
from shardkeep.dcp import state_dict_saver as saver
from shardkeep.dcp._impl.async_ import _Checkpointer
from shardkeep.layouts.torch_values import *
