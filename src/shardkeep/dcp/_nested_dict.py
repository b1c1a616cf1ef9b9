"""The names of `torch.distributed.checkpoint._nested_dict`."""

from shardkeep.dcp import _version
from shardkeep.dcp._traverse import STATE_DICT_ITEM, STATE_DICT_TYPE
from shardkeep.state.flatten import (
    FLATTEN_MAPPING,
    OBJ_PATH,
    flatten_state_dict,
    set_element,
    traverse_state_dict,
    traverse_state_dict_v_2_3,
    unflatten_state_dict,
)

__all__ = [
    "FLATTEN_MAPPING",
    "OBJ_PATH",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "_version",
    "flatten_state_dict",
    "set_element",
    "traverse_state_dict",
    "traverse_state_dict_v_2_3",
    "unflatten_state_dict",
]
