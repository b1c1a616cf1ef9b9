"""The names of `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

from shardkeep.dcp._impl.hf import *
from shardkeep.dcp._impl.hf_reader import *
from shardkeep.dcp._impl.hf_reader import _get_dcp_custom_metadata, _get_safetensors_file_metadata
from shardkeep.layouts.safetensors import *
from shardkeep.layouts.safetensors import _metadata_fn
from shardkeep.layouts.safetensors import file_name as _gen_file_name
