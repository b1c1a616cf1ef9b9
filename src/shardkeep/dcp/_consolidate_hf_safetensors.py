"""The names of `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

from shardkeep.dcp._impl.hf import consolidate_safetensors_files as consolidate_safetensors_files
from shardkeep.dcp._impl.hf import (
    consolidate_safetensors_files_on_every_rank as consolidate_safetensors_files_on_every_rank,
)
from shardkeep.dcp._impl.hf_files import DATA_OFFSETS_KEY as DATA_OFFSETS_KEY
from shardkeep.dcp._impl.hf_files import DEFAULT_EXTRA_METADATA_KEY as DEFAULT_EXTRA_METADATA_KEY
from shardkeep.dcp._impl.hf_files import DTYPE_KEY as DTYPE_KEY
from shardkeep.dcp._impl.hf_files import SHAPE_KEY as SHAPE_KEY
from shardkeep.dcp._impl.hf_files import _gen_file_name as _gen_file_name
from shardkeep.dcp._impl.hf_files import _get_dcp_custom_metadata as _get_dcp_custom_metadata
from shardkeep.dcp._impl.hf_files import _get_safetensors_file_metadata as _get_safetensors_file_metadata
from shardkeep.dcp._impl.hf_files import _metadata_fn as _metadata_fn
from shardkeep.layouts.safetensors import SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY
from shardkeep.layouts.safetensors import SUFFIX as SUFFIX
