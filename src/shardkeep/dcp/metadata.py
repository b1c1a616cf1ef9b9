"""The names of `torch.distributed.checkpoint.metadata`."""

from shardkeep.dcp.stateful import StatefulT as StatefulT
from shardkeep.layouts.torch_values import _MEM_FORMAT_ENCODING as _MEM_FORMAT_ENCODING
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import STORAGE_TYPES as STORAGE_TYPES
from shardkeep.layouts.torch_values import BytesStorageMetadata as BytesStorageMetadata
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import StorageMeta as StorageMeta
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
