"""The names of `torch.distributed.checkpoint.storage`."""

from shardkeep.dcp.metadata import Metadata, MetadataIndex, StorageMeta
from shardkeep.dcp.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from shardkeep.protocol.storage import StorageReader, StorageWriter, WriteResult

__all__ = [
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
]
