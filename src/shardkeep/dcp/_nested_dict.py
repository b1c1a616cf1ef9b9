"""The names of `torch.distributed.checkpoint._nested_dict`."""

from shardkeep.dcp import _version as _version
from shardkeep.dcp._traverse import STATE_DICT_ITEM as STATE_DICT_ITEM
from shardkeep.dcp._traverse import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.state.flatten import FLATTEN_MAPPING as FLATTEN_MAPPING
from shardkeep.state.flatten import OBJ_PATH as OBJ_PATH
from shardkeep.state.flatten import flatten_state_dict as flatten_state_dict
from shardkeep.state.flatten import set_element as set_element
from shardkeep.state.flatten import traverse_state_dict as traverse_state_dict
from shardkeep.state.flatten import traverse_state_dict_v_2_3 as traverse_state_dict_v_2_3
from shardkeep.state.flatten import unflatten_state_dict as unflatten_state_dict
