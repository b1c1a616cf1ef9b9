"""
The names of Hugging Face's files as torch writes them, and the keys inside their headers.
"""

from __future__ import annotations

import io
import json
import struct
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.errors import MalformedFile
from shardkeep.format.dtypes import TABLE
from shardkeep.format.header import MAX_HEADER_NBYTES

_metadata_fn: str = "model.safetensors.index.json"

FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"
SUFFIX = ".safetensors"

CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SAVED_OFFSETS_KEY = "saved_offsets"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"

DTYPE_MAP: dict[str, torch.dtype] = {
    row.safetensors: getattr(torch, row.name)
    for row in TABLE
    if row.safetensors is not None and hasattr(torch, row.name)
}
"""Every type that safetensors and the installed torch have; torch's own table lacks bool, fp8 and the unsigned ones."""

HF_DCP_VERSION: float = 1.0
DCP_VERSION_KEY = "DCP_VERSION"
DCP_SHARDING_INFO_KEY = "DCP_SHARDING_INFO"

FORMAT_KEY = "format"
FORMAT_VALUE = "pt"

NUM_BYTES_FOR_HEADER_LEN = 8

SHARDED_DIR_NAME = "sharded"

SAVE_ID_KEY = "shardkeep.save_id"
"""Which save a file is of, so that files of two saves are never read as one checkpoint."""
FILE_COUNT_KEY = "shardkeep.files"
"""How many files that save has, so that a missing one is known."""


@dataclass
class _HFStorageInfo:
    """Where a chunk of a tensor lies."""

    relative_path: str
    """As in torch, the whole path of the file."""
    shape: torch.Size
    dtype: torch.dtype


def _gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """Return the name of file `index` of `largest_index`, or of one shard of it; all are counted from 1."""
    numbers = {"cpt_idx": f"{index:05}", "num_files": f"{largest_index:05}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(shard_idx=f"{shard_index:05}", **numbers) + SUFFIX


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """Read the header from the beginning of a stream; return it and the bytes that it and its length take."""
    read = file_bytes.read
    length = read(NUM_BYTES_FOR_HEADER_LEN)
    if len(length) != NUM_BYTES_FOR_HEADER_LEN:
        raise MalformedFile(f"a safetensors file of {len(length)} bytes: not even the length of a header")
    nbytes: int = struct.unpack("<Q", length)[0]
    if nbytes > MAX_HEADER_NBYTES:
        raise MalformedFile(f"a header of {nbytes} bytes, more than the {MAX_HEADER_NBYTES} that safetensors allows")
    return json.loads(read(nbytes)), nbytes + NUM_BYTES_FOR_HEADER_LEN


def _get_dtype(dtype_str: str) -> torch.dtype:
    """Return torch's type for one of safetensors; the default type for one that torch does not have."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Return what a header says about shards: the offsets of each tensor in its whole; None if nothing."""
    said = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {})
    return json.loads(said[CUSTOM_METADATA_KEY]) if CUSTOM_METADATA_KEY in said else None
