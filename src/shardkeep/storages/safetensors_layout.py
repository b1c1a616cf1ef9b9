"""A data file of torch's layout that is a safetensors file: which order its tensors have, and its header."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

from shardkeep.errors import StateError
from shardkeep.format.dtypes import DType, Ints, of_torch
from shardkeep.format.region import Box
from shardkeep.layout.native import chunk_name
from shardkeep.layout.safetensors_files import alignment_of, build_header
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY, FORMAT_KEY, FORMAT_VALUE, SAVED_OFFSETS_KEY
from shardkeep.protocol.plans import WriteItem
from shardkeep.storages.hugging_face_names import DCP_VERSION_KEY, HF_DCP_VERSION


def in_order(items: Sequence[WriteItem]) -> list[WriteItem]:
    """Sort tensors so that each is aligned to its elements, without gaps between them."""
    return sorted(items, key=lambda item: -alignment_of(_nbytes(*_planned(item))))


def header_of(items: Sequence[WriteItem], *, where: str) -> bytes:
    """Make the header of a file with these tensors, in this order."""
    count = Counter(item.index.fqn for item in items)
    parts: dict[str, tuple[DType, Ints]] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for item in items:
        data = item.tensor_data
        begin = tuple(data.chunk.offsets) if data is not None else ()
        key, part = item.index.fqn, _planned(item)
        # Of two shards of one tensor in one file, only the place tells which is which.
        name = key if count[key] == 1 else chunk_name(key, Box(begin, part[1]))
        parts[name] = part
        offsets[name] = {SAVED_OFFSETS_KEY: list(begin)}
    metadata = {
        CUSTOM_METADATA_KEY: json.dumps(offsets),
        DCP_VERSION_KEY: str(HF_DCP_VERSION),
        FORMAT_KEY: FORMAT_VALUE,
    }
    return build_header(parts, metadata, where=where)


def _planned(item: WriteItem) -> tuple[DType, Ints]:
    if item.tensor_data is None:
        raise StateError(f"{item.index.fqn!r} is no tensor", key=item.index.fqn)
    return of_torch(item.tensor_data.properties.dtype), tuple(item.tensor_data.chunk.sizes)


def _nbytes(dtype: DType, shape: Ints) -> int:
    return math.prod(shape) * dtype.itemsize
