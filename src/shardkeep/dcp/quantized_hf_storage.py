"""The names of `torch.distributed.checkpoint.quantized_hf_storage`."""

from shardkeep.storages.quantized import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
