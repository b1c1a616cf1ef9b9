"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.dcp._consolidate_hf_safetensors import consolidate_safetensors_files
from shardkeep.dcp._hf_utils import (
    CUSTOM_METADATA_KEY,
    SAVED_OFFSETS_KEY,
    SHARDED_DIR_NAME,
    SUFFIX,
    _gen_file_name,
    _HFStorageInfo,
    _metadata_fn,
)
from shardkeep.dcp.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from shardkeep.dcp.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from shardkeep.dcp.storage import WriteResult
from shardkeep.storages.hugging_face import HuggingFaceStorageWriter
from shardkeep.storages.hugging_face_reader import HuggingFaceStorageReader

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
