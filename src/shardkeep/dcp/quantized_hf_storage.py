"""The names of `torch.distributed.checkpoint.quantized_hf_storage`."""

from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from shardkeep.dcp._impl.hf_reader import QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader
from shardkeep.layouts.safetensors import _metadata_fn
from shardkeep.layouts.torch_values import *
