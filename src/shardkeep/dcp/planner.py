"""The names of `torch.distributed.checkpoint.planner`."""

from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import BytesIOWriteData as BytesIOWriteData
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadItemType as LoadItemType
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import ReadItem as ReadItem
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageMeta as StorageMeta
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorWriteData as TensorWriteData
from shardkeep.layouts.torch_values import WriteItem as WriteItem
from shardkeep.layouts.torch_values import WriteItemType as WriteItemType
