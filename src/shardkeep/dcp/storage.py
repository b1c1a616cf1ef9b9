"""The names of `torch.distributed.checkpoint.storage`."""

from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageMeta as StorageMeta
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter
from shardkeep.layouts.torch_values import WriteResult as WriteResult
