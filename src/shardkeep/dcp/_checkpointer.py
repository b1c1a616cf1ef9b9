"""The names of `torch.distributed.checkpoint._checkpointer`."""

from shardkeep.compat.checkpointer import _Checkpointer
from shardkeep.dcp import state_dict_loader as loader
from shardkeep.dcp import state_dict_saver as saver
from shardkeep.dcp.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.dcp.planner import LoadPlanner, SavePlanner
from shardkeep.dcp.storage import StorageReader, StorageWriter

__all__ = [
    "STATE_DICT_TYPE",
    "LoadPlanner",
    "Metadata",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "_Checkpointer",
    "loader",
    "saver",
]
