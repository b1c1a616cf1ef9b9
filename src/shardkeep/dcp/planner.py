"""The names of `torch.distributed.checkpoint.planner`."""

from shardkeep.dcp.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from shardkeep.protocol.planners import LoadPlanner, SavePlanner
from shardkeep.protocol.plans import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = [
    "STATE_DICT_TYPE",
    "BytesIOWriteData",
    "ChunkStorageMetadata",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "TensorProperties",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]
