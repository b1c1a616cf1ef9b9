"""The names of `torch.distributed.checkpoint.optimizer`."""

from shardkeep.dcp._impl.driver import load_state_dict as load_state_dict
from shardkeep.dcp._impl.optimizer import *
from shardkeep.dcp._impl.optimizer import (
    _alloc_tensor,
    _create_colwise_spec,
    _element_wise_add,
    _element_wise_sub,
    _gen_rank_device,
    _get_state_dict_2d_layout,
    _is_nested_tensor,
    _normalize_device_info,
    _ReaderWithOffset,
)
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.plans import _create_read_items
from shardkeep.dcp._impl.plans import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from shardkeep.layouts.torch_values import *
from shardkeep.state.flatten import unflatten_state_dict as unflatten_state_dict
