"""The names of `torch.distributed.checkpoint._storage_utils`."""

from shardkeep.dcp._impl.driver import _storage_setup
from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_reader import FsspecReader as FsspecReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.file_writer import FsspecWriter as FsspecWriter
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter
