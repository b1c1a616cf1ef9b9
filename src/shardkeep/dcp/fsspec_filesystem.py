"""The names of `torch.distributed.checkpoint.fsspec_filesystem`, which torch has since 2.15."""

from shardkeep.codecs.stream_extensions import StreamTransformExtension as StreamTransformExtension
from shardkeep.dcp._impl.file_reader import *
from shardkeep.dcp._impl.file_writer import *
from shardkeep.layouts.torch_values import SerializationFormat as SerializationFormat
from shardkeep.storage.file_systems import FileSystemBase as FileSystemBase
from shardkeep.storage.file_systems import FsspecFileSystem as _FileSystem
