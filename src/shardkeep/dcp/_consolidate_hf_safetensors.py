"""The names of `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

from shardkeep.dcp._impl.hf import *
from shardkeep.dcp._impl.hf_files import *
from shardkeep.dcp._impl.hf_files import (
    _gen_file_name,
    _get_dcp_custom_metadata,
    _get_safetensors_file_metadata,
    _metadata_fn,
)
from shardkeep.layouts.safetensors import *
