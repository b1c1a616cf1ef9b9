"""
`torch.distributed.checkpoint`, on our engine: the same names, modules, arguments and files.

    import shardkeep.dcp as dcp

or, for code that imports torch's module itself, `shardkeep.dcp.install()` before that import.

Each module has the names that torch's module defines, from where they live in our tree, and those that it only imports
from its neighbours, since people import them from there: these come from the same neighbours of ours.
"""

from shardkeep.compat.install import install, uninstall

# Those that torch's package has once it is imported, and scripts reach through it.
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
    logger,
    logging_handlers,
    planner_helpers,
    resharding,
    staging,
    stateful,
    utils,
)
from shardkeep.dcp.api import CheckpointException
from shardkeep.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from shardkeep.dcp.filesystem import FileSystemReader, FileSystemWriter
from shardkeep.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from shardkeep.dcp.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from shardkeep.dcp.optimizer import load_sharded_optimizer_state_dict
from shardkeep.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from shardkeep.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from shardkeep.dcp.state_dict_loader import load, load_state_dict
from shardkeep.dcp.state_dict_saver import async_save, save, save_state_dict
from shardkeep.dcp.storage import StorageReader, StorageWriter

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
    "async_save",
    "install",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "logger",
    "logging_handlers",
    "planner_helpers",
    "resharding",
    "save",
    "save_state_dict",
    "staging",
    "stateful",
    "uninstall",
    "utils",
]
