"""The names of `torch.distributed.checkpoint.utils`."""

from shardkeep.dcp._impl.dist import _all_gather_keys as _all_gather_keys
from shardkeep.dcp._impl.dist import _assert_same_keys as _assert_same_keys
from shardkeep.dcp._impl.dist import _DistWrapper as _DistWrapper
from shardkeep.dcp._impl.driver import _api_bc_check as _api_bc_check
from shardkeep.dcp._impl.driver import _profile as _profile
from shardkeep.dcp._impl.file_reader import _create_file_view as _create_file_view
from shardkeep.dcp._impl.file_reader import _ReaderView as _ReaderView
from shardkeep.dcp._impl.optimizer import _element_wise_add as _element_wise_add
from shardkeep.dcp._impl.optimizer import _element_wise_sub as _element_wise_sub
from shardkeep.dcp._impl.optimizer import _normalize_device_info as _normalize_device_info
from shardkeep.dcp._impl.plans import _find_shard as _find_shard
from shardkeep.dcp._impl.plans import find_state_dict_object as find_state_dict_object
from shardkeep.dcp._impl.plans import find_tensor_shard as find_tensor_shard
from shardkeep.errors import WRAPPED_EXCEPTION as WRAPPED_EXCEPTION
from shardkeep.errors import CheckpointException as CheckpointException
from shardkeep.errors import _get_failure_dict as _get_failure_dict
from shardkeep.errors import _is_wrapped_exception as _is_wrapped_exception
from shardkeep.errors import _wrap_exception as _wrap_exception
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
