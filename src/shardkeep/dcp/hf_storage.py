"""The names of `torch.distributed.checkpoint.hf_storage`."""

from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.hf import HuggingFaceStorageWriter as HuggingFaceStorageWriter
from shardkeep.dcp._impl.hf import consolidate_safetensors_files as consolidate_safetensors_files
from shardkeep.dcp._impl.hf_files import SHARDED_DIR_NAME as SHARDED_DIR_NAME
from shardkeep.dcp._impl.hf_files import _gen_file_name as _gen_file_name
from shardkeep.dcp._impl.hf_files import _HFStorageInfo as _HFStorageInfo
from shardkeep.dcp._impl.hf_files import _metadata_fn as _metadata_fn
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY as CUSTOM_METADATA_KEY
from shardkeep.layouts.safetensors import SAVED_OFFSETS_KEY as SAVED_OFFSETS_KEY
from shardkeep.layouts.safetensors import SUFFIX as SUFFIX
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import ReadItem as ReadItem
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import SerializationFormat as SerializationFormat
from shardkeep.layouts.torch_values import StorageMeta as StorageMeta
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.layouts.torch_values import WriteItem as WriteItem
from shardkeep.layouts.torch_values import WriteResult as WriteResult
