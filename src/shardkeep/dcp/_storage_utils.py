"""The names of `torch.distributed.checkpoint._storage_utils`."""

from shardkeep.compat.calls import _storage_setup
from shardkeep.dcp.filesystem import FileSystemReader, FileSystemWriter
from shardkeep.dcp.storage import StorageReader, StorageWriter

__all__ = ["FileSystemReader", "FileSystemWriter", "StorageReader", "StorageWriter", "_storage_setup"]
