"""The names of `torch.distributed.checkpoint._hf_utils`."""

from shardkeep.dcp._impl.hf_reader import *
from shardkeep.dcp._impl.hf_reader import (
    _get_dcp_custom_metadata,
    _get_dtype,
    _get_safetensors_file_metadata,
    _HFStorageInfo,
)
from shardkeep.layouts.safetensors import *
from shardkeep.layouts.safetensors import _metadata_fn
from shardkeep.layouts.safetensors import file_name as _gen_file_name
