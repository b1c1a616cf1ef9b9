"""
`torch.distributed.checkpoint`, on our engine: the same names, modules, arguments and files.

    import shardkeep.dcp as dcp

or, for code that imports torch's module itself, `shardkeep.dcp.install()` before that import.
"""

from shardkeep.compat.install import install, uninstall
from shardkeep.dcp import _extension
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
    "_extension",
    "async_save",
    "install",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
    "uninstall",
]
