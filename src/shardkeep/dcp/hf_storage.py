"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.hf import *
from shardkeep.dcp._impl.hf_files import SHARDED_DIR_NAME as SHARDED_DIR_NAME
from shardkeep.dcp._impl.hf_files import _gen_file_name, _HFStorageInfo, _metadata_fn
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from shardkeep.layouts.safetensors import *
from shardkeep.layouts.torch_values import *
