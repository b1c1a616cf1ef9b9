"""The names of `torch.distributed.checkpoint._fsspec_filesystem`."""

from shardkeep.storages.file_systems import FsspecFileSystem as FileSystem
from shardkeep.storages.fsspec_storage import FsspecReader, FsspecWriter

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]
