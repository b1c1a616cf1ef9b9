"""The names of `torch.distributed.checkpoint.metadata`."""

from shardkeep.dcp.stateful import StatefulT
from shardkeep.layouts.torch_values import (
    _MEM_FORMAT_ENCODING,
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "_MEM_FORMAT_ENCODING",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StatefulT",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]
