"""The names of `torch.distributed.checkpoint.quantized_hf_storage`."""

from shardkeep.dcp._impl.hf_files import _metadata_fn
from shardkeep.dcp._impl.hf_quantized import QuantizedHuggingFaceStorageReader
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader
from shardkeep.layouts.torch_values import LoadPlanner, ReadItem, TensorStorageMetadata

__all__ = [
    "HuggingFaceStorageReader",
    "LoadPlanner",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "TensorStorageMetadata",
    "_metadata_fn",
]
