"""The names of `torch.distributed._state_dict_utils`."""

from collections.abc import MutableMapping
from typing import Any

from shardkeep.errors import CompanionMismatch as CompanionMismatch
from shardkeep.state.collectives import _TensorInfo as _TensorInfo
from shardkeep.state.collectives import (
    all_gather_sharded_tensor,
    broadcast_state_dict,
    broadcast_tensors,
    distribute_state_dict,
    distribute_tensors,
    gather_state_dict,
)
from shardkeep.state.flatten import FLATTEN_MAPPING as FLATTEN_MAPPING
from shardkeep.state.flatten import OBJ_PATH as OBJ_PATH
from shardkeep.state.flatten import PATH_ITEM as PATH_ITEM
from shardkeep.state.flatten import (
    flatten_everything,
    set_element,
    traverse_everything,
    traverse_obj,
    unflatten_state_dict,
)
from shardkeep.state.offload import _identity_func as _identity_func
from shardkeep.state.offload import (
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    iterate_state_dict,
    offload_state_dict_to_cpu,
)

_all_gather_sharded_tensor = all_gather_sharded_tensor
_broadcast_state_dict = broadcast_state_dict
_broadcast_tensors = broadcast_tensors
_distribute_state_dict = distribute_state_dict
_distribute_tensors = distribute_tensors
_gather_state_dict = gather_state_dict
_flatten_state_dict = flatten_everything
_set_element = set_element
_traverse_state_dict = traverse_everything
_traverse_obj = traverse_obj
_unflatten_state_dict = unflatten_state_dict
_check_state_dict_similarity = check_state_dict_similarity
_copy_state_dict = copy_state_dict
_create_cpu_state_dict = create_cpu_state_dict
_iterate_state_dict = iterate_state_dict
_offload_state_dict_to_cpu = offload_state_dict_to_cpu

STATE_DICT_TYPE = dict[str, Any]

CONTAINER_TYPE = MutableMapping[PATH_ITEM, Any]
