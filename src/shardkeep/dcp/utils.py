"""The names of `torch.distributed.checkpoint.utils`."""

from shardkeep.dcp._impl.dist import _all_gather_keys, _assert_same_keys, _DistWrapper
from shardkeep.dcp._impl.driver import _api_bc_check, _profile
from shardkeep.dcp._impl.file_reader import _create_file_view, _ReaderView
from shardkeep.dcp._impl.optimizer import _element_wise_add, _element_wise_sub, _normalize_device_info
from shardkeep.dcp._impl.plans import *
from shardkeep.dcp._impl.plans import _find_shard, _get_checkpointable_tensor_shard
from shardkeep.errors import WRAPPED_EXCEPTION as WRAPPED_EXCEPTION
from shardkeep.errors import CheckpointException as CheckpointException
from shardkeep.errors import _get_failure_dict, _is_wrapped_exception, _wrap_exception
from shardkeep.layouts.torch_values import *
from shardkeep.layouts.torch_values import _is_checkpointable_tensor
