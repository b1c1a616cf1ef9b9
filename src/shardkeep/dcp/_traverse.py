"""The names of `torch.distributed.checkpoint._traverse`."""

from collections.abc import MutableMapping
from typing import Any

from shardkeep.state.flatten import OBJ_PATH as OBJ_PATH
from shardkeep.state.flatten import PATH_ITEM as PATH_ITEM
from shardkeep.state.flatten import _keep_visiting_tensors as _keep_visiting_tensors
from shardkeep.state.flatten import _print_nested as _print_nested
from shardkeep.state.flatten import get_element as get_element
from shardkeep.state.flatten import print_tensor as print_tensor
from shardkeep.state.flatten import set_element as set_element
from shardkeep.state.flatten import traverse_state_dict as traverse_state_dict
from shardkeep.state.flatten import traverse_state_dict_v_2_3 as traverse_state_dict_v_2_3

STATE_DICT_ITEM = object
STATE_DICT_TYPE = dict[str, Any]
CONTAINER_TYPE = MutableMapping[PATH_ITEM, STATE_DICT_ITEM]
