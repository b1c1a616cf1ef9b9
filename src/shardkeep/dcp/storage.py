"""The names of `torch.distributed.checkpoint.storage`."""

from shardkeep.protocol.storage import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
