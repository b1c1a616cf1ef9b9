"""The names of `torch.distributed.checkpoint._storage_utils`."""

from shardkeep.dcp._impl.calls import _storage_setup
from shardkeep.dcp._impl.filesystem import FileSystemReader, FileSystemWriter
from shardkeep.layouts.torch_values import StorageReader, StorageWriter

__all__ = ["FileSystemReader", "FileSystemWriter", "StorageReader", "StorageWriter", "_storage_setup"]
