"""The names of `torch.distributed.checkpoint._fsspec_filesystem`."""

from shardkeep.dcp._extension import StreamTransformExtension
from shardkeep.dcp.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from shardkeep.storages.file_systems import FsspecFileSystem as FileSystem
from shardkeep.storages.fsspec_storage import FsspecReader, FsspecWriter

__all__ = [
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "SerializationFormat",
    "StreamTransformExtension",
]
