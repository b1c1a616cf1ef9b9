"""The names of `torch.distributed.checkpoint.filesystem`."""

from shardkeep.codec.transforms import _StorageReaderTransforms, _StorageWriterTransforms
from shardkeep.dcp._extension import ExtensionRegistry, StreamTransformExtension
from shardkeep.dcp._hf_utils import CUSTOM_METADATA_KEY, DCP_VERSION_KEY, FORMAT_KEY, FORMAT_VALUE, HF_DCP_VERSION
from shardkeep.dcp.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from shardkeep.dcp.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from shardkeep.dcp.staging import BlockingAsyncStager
from shardkeep.dcp.storage import StorageReader, StorageWriter, WriteResult
from shardkeep.dcp.utils import _create_file_view
from shardkeep.protocol.stored_items import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    SerializationFormat,
    _metadata_fn,
    _StorageInfo,
    _StoragePrefix,
)
from shardkeep.storages.buckets import _item_size, _split_by_size_and_type
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.file_systems import FileSystem, FileSystemBase
from shardkeep.storages.file_writer import FileSystemWriter, _FileSystemWriter, _generate_uuid
from shardkeep.storages.writing import _write_item

__all__ = [
    "CURRENT_DCP_VERSION",
    "CUSTOM_METADATA_KEY",
    "DCP_VERSION_KEY",
    "DEFAULT_SUFFIX",
    "FORMAT_KEY",
    "FORMAT_VALUE",
    "HF_DCP_VERSION",
    "STATE_DICT_TYPE",
    "BlockingAsyncStager",
    "ExtensionRegistry",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "StreamTransformExtension",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "_FileSystemWriter",
    "_StorageInfo",
    "_StoragePrefix",
    "_StorageReaderTransforms",
    "_StorageWriterTransforms",
    "_create_file_view",
    "_generate_uuid",
    "_item_size",
    "_metadata_fn",
    "_split_by_size_and_type",
    "_write_item",
]
