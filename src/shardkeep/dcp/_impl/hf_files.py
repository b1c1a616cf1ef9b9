"""
Hugging Face's files under torch's names: constants and helpers, and the header of a save plan's items.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardkeep.errors import MalformedFile, UnsupportedLeaf
from shardkeep.format.boxes import Box
from shardkeep.format.data_file import MAX_HEADER_NBYTES
from shardkeep.format.dtypes import DTYPES, DType, Ints, of_torch
from shardkeep.layouts import safetensors
from shardkeep.layouts.native import chunk_name
from shardkeep.layouts.torch_values import WriteItem

_metadata_fn: str = safetensors.INDEX_NAME
_gen_file_name = safetensors.file_name

DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"

DTYPE_MAP: dict[str, torch.dtype] = {
    row.safetensors: getattr(torch, row.name)
    for row in DTYPES
    if row.safetensors is not None and hasattr(torch, row.name)
}
"""All dtypes that safetensors and the installed torch have; torch's own table lacks bool, fp8 and unsigned ones."""

HF_DCP_VERSION: float = 1.0
DCP_VERSION_KEY = "DCP_VERSION"
DCP_SHARDING_INFO_KEY = "DCP_SHARDING_INFO"

NUM_BYTES_FOR_HEADER_LEN = 8

SHARDED_DIR_NAME = "sharded"


@dataclass
class _HFStorageInfo:
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
    """Return the torch dtype for one of safetensors; the default dtype if torch has none."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Return the offsets of each tensor in its whole tensor, which a header of shards has; else None."""
    said = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {})
    return json.loads(said[safetensors.CUSTOM_METADATA_KEY]) if safetensors.CUSTOM_METADATA_KEY in said else None


# -- the layout of a file ----------------------------------------------------------------------------------------------


class ItemTensor(NamedTuple):
    item: WriteItem
    dtype: DType
    shape: Ints

    @property
    def key(self) -> str:
        return self.item.index.fqn

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def planned_tensor(item: WriteItem) -> ItemTensor:
    if item.tensor_data is None:
        raise no_tensor(item)
    dtype = of_torch(item.tensor_data.properties.dtype, key=item.index.fqn)
    return ItemTensor(item, dtype, tuple(item.tensor_data.chunk.sizes))


def no_tensor(item: WriteItem) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{item.index.fqn!r} is no tensor, and Hugging Face files hold nothing else",
        hint="leave it out of this save, or save it with FileSystemWriter",
        key=item.index.fqn,
    )


def header_of(tensors: Sequence[ItemTensor], metadata: Mapping[str, str], *, where: str) -> bytes:
    """Make the header of a file with these tensors, in this order; `metadata` is added to what torch writes."""
    count = Counter(tensor.key for tensor in tensors)
    parts: dict[str, tuple[DType, Ints]] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for tensor in tensors:
        data = tensor.item.tensor_data
        begin = tuple(data.chunk.offsets) if data is not None else ()
        # Several shards of one tensor in one file are distinguished by where they begin.
        name = tensor.key if count[tensor.key] == 1 else chunk_name(tensor.key, Box(begin, tensor.shape))
        parts[name] = tensor.dtype, tensor.shape
        offsets[name] = {safetensors.SAVED_OFFSETS_KEY: list(begin)}
    said = {
        safetensors.CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        safetensors.FORMAT_KEY: safetensors.FORMAT_VALUE,
        **metadata,
    }
    return safetensors.build_model_header(parts, said, where=where)
