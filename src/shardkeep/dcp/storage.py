"""The names of `torch.distributed.checkpoint.storage`."""

from shardkeep.layouts.torch_values import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    SavePlan,
    SavePlanner,
    StorageMeta,
    StorageReader,
    StorageWriter,
    WriteResult,
)

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
