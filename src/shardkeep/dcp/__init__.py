"""
The API of `torch.distributed.checkpoint` on shardkeep's engine: the same names, modules, arguments and files.

    import shardkeep.dcp as dcp

For code that imports torch's module itself, call `shardkeep.dcp.install()` before that import.

Each module re-exports the names of torch's module, whether torch's module defines them or imports them, because people
import both from there. The implementation is in `_impl`.
"""

# Modules that scripts reach as attributes of torch's package.
from shardkeep.dcp import (
    _async_executor,
    _async_process_executor,
    _async_thread_executor,
    _consolidate_hf_safetensors,
    _dedup_save_plans,
    _extension,
    _hf_utils,
    _nested_dict,
    _pg_transport,
    _sharded_tensor_utils,
    _state_dict_stager,
    _storage_utils,
    _traverse,
    _version,
    api,
    default_planner,
    filesystem,
    hf_storage,
    logger,
    logging_handlers,
    metadata,
    optimizer,
    planner,
    planner_helpers,
    quantized_hf_storage,
    resharding,
    staging,
    state_dict_loader,
    state_dict_saver,
    stateful,
    storage,
    utils,
)
from shardkeep.dcp._impl.async_ import async_save
from shardkeep.dcp._impl.driver import load, load_state_dict, save, save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter
from shardkeep.dcp._impl.hf import HuggingFaceStorageWriter
from shardkeep.dcp._impl.hf_quantized import QuantizedHuggingFaceStorageReader
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader
from shardkeep.dcp._impl.optimizer import load_sharded_optimizer_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.dcp_install import install, uninstall
from shardkeep.errors import CheckpointException
from shardkeep.layouts.torch_values import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "_async_executor",
    "_async_process_executor",
    "_async_thread_executor",
    "_consolidate_hf_safetensors",
    "_dedup_save_plans",
    "_extension",
    "_hf_utils",
    "_nested_dict",
    "_pg_transport",
    "_sharded_tensor_utils",
    "_state_dict_stager",
    "_storage_utils",
    "_traverse",
    "_version",
    "api",
    "async_save",
    "default_planner",
    "filesystem",
    "hf_storage",
    "install",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "logger",
    "logging_handlers",
    "metadata",
    "optimizer",
    "planner",
    "planner_helpers",
    "quantized_hf_storage",
    "resharding",
    "save",
    "save_state_dict",
    "staging",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "uninstall",
    "utils",
]
