"""The names of `torch.distributed.checkpoint._fsspec_filesystem`."""

from shardkeep.dcp.fsspec_filesystem import *
from shardkeep.storage.file_systems import FsspecFileSystem as FileSystem

_FileSystem = FileSystem
