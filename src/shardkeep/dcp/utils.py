"""The names of `torch.distributed.checkpoint.utils`."""

from shardkeep.dcp._impl.calls import _api_bc_check, _profile
from shardkeep.dcp._impl.dist import _all_gather_keys, _assert_same_keys, _DistWrapper
from shardkeep.dcp._impl.filesystem import (
    _create_file_view,
    _element_wise_add,
    _element_wise_sub,
    _normalize_device_info,
    _ReaderView,
)
from shardkeep.dcp._impl.plans import _find_shard, find_state_dict_object, find_tensor_shard
from shardkeep.errors import (
    WRAPPED_EXCEPTION,
    CheckpointException,
    _get_failure_dict,
    _is_wrapped_exception,
    _wrap_exception,
)
from shardkeep.layouts.torch_values import STATE_DICT_TYPE, MetadataIndex

__all__ = [
    "STATE_DICT_TYPE",
    "WRAPPED_EXCEPTION",
    "CheckpointException",
    "MetadataIndex",
    "_DistWrapper",
    "_ReaderView",
    "_all_gather_keys",
    "_api_bc_check",
    "_assert_same_keys",
    "_create_file_view",
    "_element_wise_add",
    "_element_wise_sub",
    "_find_shard",
    "_get_failure_dict",
    "_is_wrapped_exception",
    "_normalize_device_info",
    "_profile",
    "_wrap_exception",
    "find_state_dict_object",
    "find_tensor_shard",
]
