"""The names of `torch.distributed.checkpoint._sharded_tensor_utils`."""

from shardkeep.dcp._impl.optimizer import _element_wise_add, _normalize_device_info
from shardkeep.dcp._traverse import STATE_DICT_ITEM as STATE_DICT_ITEM
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.flatten import *
from shardkeep.state.flatten import flatten_sharded_tensors as _flatten_sharded_tensors
