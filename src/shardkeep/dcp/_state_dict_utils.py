"""The names of `torch.distributed._state_dict_utils`."""

from collections.abc import MutableMapping
from typing import Any

from shardkeep.errors import CompanionMismatch as CompanionMismatch
from shardkeep.state.collectives import _TensorInfo
from shardkeep.state.collectives import all_gather_sharded_tensor as _all_gather_sharded_tensor
from shardkeep.state.collectives import broadcast_state_dict as _broadcast_state_dict
from shardkeep.state.collectives import broadcast_tensors as _broadcast_tensors
from shardkeep.state.collectives import distribute_state_dict as _distribute_state_dict
from shardkeep.state.collectives import distribute_tensors as _distribute_tensors
from shardkeep.state.collectives import gather_state_dict as _gather_state_dict
from shardkeep.state.flatten import *
from shardkeep.state.flatten import PATH_ITEM as PATH_ITEM
from shardkeep.state.flatten import flatten_everything as _flatten_state_dict
from shardkeep.state.flatten import set_element as _set_element
from shardkeep.state.flatten import traverse_everything as _traverse_state_dict
from shardkeep.state.flatten import traverse_obj as _traverse_obj
from shardkeep.state.flatten import unflatten_state_dict as _unflatten_state_dict
from shardkeep.state.offload import _identity_func
from shardkeep.state.offload import check_state_dict_similarity as _check_state_dict_similarity
from shardkeep.state.offload import copy_state_dict as _copy_state_dict
from shardkeep.state.offload import create_cpu_state_dict as _create_cpu_state_dict
from shardkeep.state.offload import iterate_state_dict as _iterate_state_dict
from shardkeep.state.offload import offload_state_dict_to_cpu as _offload_state_dict_to_cpu

STATE_DICT_TYPE = dict[str, Any]
CONTAINER_TYPE = MutableMapping[PATH_ITEM, Any]
