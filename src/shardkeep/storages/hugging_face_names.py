"""
What torch calls the parts of Hugging Face's files, and its helpers that read them from a stream.
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
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY, INDEX_NAME, file_name

_metadata_fn: str = INDEX_NAME
_gen_file_name = file_name

DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
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

NUM_BYTES_FOR_HEADER_LEN = 8

SHARDED_DIR_NAME = "sharded"


@dataclass
class _HFStorageInfo:
    """Where a chunk of a tensor lies."""

    relative_path: str
    """As in torch, the whole path of the file."""
    shape: torch.Size
    dtype: torch.dtype


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
