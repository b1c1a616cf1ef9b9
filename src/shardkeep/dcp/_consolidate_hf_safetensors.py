"""The names of `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

from shardkeep.dcp._impl.hf import consolidate_safetensors_files as consolidate_safetensors_files
from shardkeep.dcp._impl.hf import (
    consolidate_safetensors_files_on_every_rank as consolidate_safetensors_files_on_every_rank,
)
from shardkeep.dcp._impl.hf_files import *
from shardkeep.dcp._impl.hf_files import (
    _gen_file_name,
    _get_dcp_custom_metadata,
    _get_safetensors_file_metadata,
    _metadata_fn,
)
from shardkeep.layouts.safetensors import SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY
from shardkeep.layouts.safetensors import SUFFIX as SUFFIX
