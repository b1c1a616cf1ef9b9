"""The names of `torch.distributed.checkpoint._fsspec_filesystem`."""

from shardkeep.codecs.stream_extensions import StreamTransformExtension
from shardkeep.dcp._impl.file_reader import FileSystemReader, FsspecReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter, FsspecWriter
from shardkeep.layouts.torch_values import SerializationFormat
from shardkeep.storage.file_systems import FileSystemBase
from shardkeep.storage.file_systems import FsspecFileSystem as FileSystem

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
