"""The names of `torch.distributed.checkpoint.optimizer`."""

from shardkeep.compat.sharded_optimizer import (
    STATE_DICT_2D_LAYOUT,
    _alloc_tensor,
    _create_colwise_spec,
    _gen_rank_device,
    _get_state_dict_2d_layout,
    _is_nested_tensor,
    _ReaderWithOffset,
    load_sharded_optimizer_state_dict,
)

__all__ = [
    "STATE_DICT_2D_LAYOUT",
    "_ReaderWithOffset",
    "_alloc_tensor",
    "_create_colwise_spec",
    "_gen_rank_device",
    "_get_state_dict_2d_layout",
    "_is_nested_tensor",
    "load_sharded_optimizer_state_dict",
]
