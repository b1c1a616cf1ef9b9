"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.hf import *
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from shardkeep.dcp._impl.hf_reader import _HFStorageInfo
from shardkeep.layouts.safetensors import *
from shardkeep.layouts.safetensors import _metadata_fn
from shardkeep.layouts.safetensors import file_name as _gen_file_name
from shardkeep.layouts.torch_values import *
