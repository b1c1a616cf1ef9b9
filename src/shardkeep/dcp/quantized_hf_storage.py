"""The names of `torch.distributed.checkpoint.quantized_hf_storage`."""

from shardkeep.dcp._hf_utils import _metadata_fn
from shardkeep.dcp.hf_storage import HuggingFaceStorageReader
from shardkeep.dcp.metadata import TensorStorageMetadata
from shardkeep.dcp.planner import LoadPlanner, ReadItem
from shardkeep.storages.quantized import QuantizedHuggingFaceStorageReader

__all__ = [
    "HuggingFaceStorageReader",
    "LoadPlanner",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "TensorStorageMetadata",
    "_metadata_fn",
]
