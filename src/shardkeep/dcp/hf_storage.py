"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.dcp._impl.filesystem import FileSystemReader, FileSystemWriter
from shardkeep.dcp._impl.hf import HuggingFaceStorageWriter, consolidate_safetensors_files
from shardkeep.dcp._impl.hf_files import (
    SHARDED_DIR_NAME,
    _gen_file_name,
    _HFStorageInfo,
    _metadata_fn,
)
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, SUFFIX
from shardkeep.layouts.torch_values import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    SavePlanner,
    SerializationFormat,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    WriteItem,
    WriteResult,
)

__all__ = [
    "CUSTOM_METADATA_KEY",
    "SAVED_OFFSETS_KEY",
    "SHARDED_DIR_NAME",
    "SUFFIX",
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteResult",
    "_HFStorageInfo",
    "_gen_file_name",
    "_metadata_fn",
    "consolidate_safetensors_files",
]
