"""The names of `torch.distributed.checkpoint._traverse`."""

from collections.abc import MutableMapping
from typing import Any

from shardkeep.state.flatten import (
    OBJ_PATH,
    PATH_ITEM,
    _keep_visiting_tensors,
    _print_nested,
    get_element,
    print_tensor,
    set_element,
    traverse_state_dict,
    traverse_state_dict_v_2_3,
)

STATE_DICT_ITEM = object
STATE_DICT_TYPE = dict[str, Any]
CONTAINER_TYPE = MutableMapping[PATH_ITEM, STATE_DICT_ITEM]

__all__ = [
    "CONTAINER_TYPE",
    "OBJ_PATH",
    "PATH_ITEM",
    "STATE_DICT_ITEM",
    "STATE_DICT_TYPE",
    "_keep_visiting_tensors",
    "_print_nested",
    "get_element",
    "print_tensor",
    "set_element",
    "traverse_state_dict",
    "traverse_state_dict_v_2_3",
]
