"""The names of `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

from shardkeep.dcp._impl.hf import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from shardkeep.dcp._impl.hf_files import (
    DATA_OFFSETS_KEY,
    DEFAULT_EXTRA_METADATA_KEY,
    DTYPE_KEY,
    SHAPE_KEY,
    _gen_file_name,
    _get_dcp_custom_metadata,
    _get_safetensors_file_metadata,
    _metadata_fn,
)
from shardkeep.layouts.safetensors import SAVED_OFFSETS_KEY, SUFFIX

__all__ = [
    "DATA_OFFSETS_KEY",
    "DEFAULT_EXTRA_METADATA_KEY",
    "DTYPE_KEY",
    "SAVED_OFFSETS_KEY",
    "SHAPE_KEY",
    "SUFFIX",
    "_gen_file_name",
    "_get_dcp_custom_metadata",
    "_get_safetensors_file_metadata",
    "_metadata_fn",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
]
