"""The names of `torch.distributed.checkpoint.format_utils`, and its command."""

from shardkeep.compat.conversion import dcp_to_torch_save, torch_save_to_dcp
from shardkeep.compat.conversion_broadcast import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from shardkeep.compat.conversion_command import FormatMode, main
from shardkeep.compat.load_driver import _load_state_dict
from shardkeep.compat.save_driver import _save_state_dict
from shardkeep.protocol.items import _create_chunk_list
from shardkeep.protocol.load_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from shardkeep.protocol.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan
from shardkeep.protocol.storage import StorageReader
from shardkeep.state.toolkit.trees import flatten_state_dict
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.file_writer import FileSystemWriter

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
