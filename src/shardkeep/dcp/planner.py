"""The names of `torch.distributed.checkpoint.planner`."""

from shardkeep.layouts.torch_values import (
    STATE_DICT_TYPE,
    BytesIOWriteData,
    ChunkStorageMetadata,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageMeta,
    TensorProperties,
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
