"""The names of `torch.distributed.checkpoint.filesystem`."""

from shardkeep.codec.transforms import _StorageReaderTransforms, _StorageWriterTransforms
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
    "DEFAULT_SUFFIX",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
    "_FileSystemWriter",
    "_StorageInfo",
    "_StoragePrefix",
    "_StorageReaderTransforms",
    "_StorageWriterTransforms",
    "_generate_uuid",
    "_item_size",
    "_metadata_fn",
    "_split_by_size_and_type",
    "_write_item",
]
