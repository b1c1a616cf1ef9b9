"""The names of `torch.distributed.checkpoint._sharded_tensor_utils`."""

from shardkeep.dcp._impl.optimizer import _element_wise_add as _element_wise_add
from shardkeep.dcp._impl.optimizer import _normalize_device_info as _normalize_device_info
from shardkeep.dcp._traverse import STATE_DICT_ITEM as STATE_DICT_ITEM
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.flatten import OBJ_PATH as OBJ_PATH
from shardkeep.state.flatten import flatten_sharded_tensors
from shardkeep.state.flatten import set_element as set_element
from shardkeep.state.flatten import traverse_state_dict as traverse_state_dict

_flatten_sharded_tensors = flatten_sharded_tensors
