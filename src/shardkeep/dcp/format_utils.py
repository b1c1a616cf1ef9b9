"""The names of `torch.distributed.checkpoint.format_utils`, and its command."""

from shardkeep.dcp._impl.convert import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    FormatMode,
    dcp_to_torch_save,
    main,
    torch_save_to_dcp,
)
from shardkeep.dcp._impl.driver import _load_state_dict, _save_state_dict
from shardkeep.dcp._impl.filesystem import FileSystemReader, FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.dcp._impl.plans import _create_chunk_list
from shardkeep.layouts.torch_values import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    StorageReader,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.state.flatten import flatten_state_dict

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BroadcastingTorchSaveReader",
    "DefaultLoadPlanner",
    "DynamicMetaLoadPlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "FormatMode",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "StorageReader",
    "TensorProperties",
    "TensorStorageMetadata",
    "_EmptyStateDictLoadPlanner",
    "_create_chunk_list",
    "_load_state_dict",
    "_save_state_dict",
    "dcp_to_torch_save",
    "flatten_state_dict",
    "main",
    "torch_save_to_dcp",
]

if __name__ == "__main__":
    main()
