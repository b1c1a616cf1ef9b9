"""The names of `torch.distributed.checkpoint._sharded_tensor_utils`."""

from shardkeep.dcp._impl.optimizer import _element_wise_add, _normalize_device_info
from shardkeep.dcp._traverse import STATE_DICT_ITEM
from shardkeep.layouts.torch_values import STATE_DICT_TYPE
from shardkeep.state.flatten import OBJ_PATH, set_element, traverse_state_dict
from shardkeep.state.flatten import flatten_sharded_tensors as _flatten_sharded_tensors

__all__ = [
    "OBJ_PATH",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "_element_wise_add",
    "_flatten_sharded_tensors",
    "_normalize_device_info",
    "set_element",
    "traverse_state_dict",
]
