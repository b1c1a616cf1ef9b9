"""The names of `torch.distributed.checkpoint.optimizer`."""

from shardkeep.dcp._impl.driver import load_state_dict as load_state_dict
from shardkeep.dcp._impl.optimizer import STATE_DICT_2D_LAYOUT as STATE_DICT_2D_LAYOUT
from shardkeep.dcp._impl.optimizer import _alloc_tensor as _alloc_tensor
from shardkeep.dcp._impl.optimizer import _create_colwise_spec as _create_colwise_spec
from shardkeep.dcp._impl.optimizer import _element_wise_add as _element_wise_add
from shardkeep.dcp._impl.optimizer import _element_wise_sub as _element_wise_sub
from shardkeep.dcp._impl.optimizer import _gen_rank_device as _gen_rank_device
from shardkeep.dcp._impl.optimizer import _get_state_dict_2d_layout as _get_state_dict_2d_layout
from shardkeep.dcp._impl.optimizer import _is_nested_tensor as _is_nested_tensor
from shardkeep.dcp._impl.optimizer import _normalize_device_info as _normalize_device_info
from shardkeep.dcp._impl.optimizer import _ReaderWithOffset as _ReaderWithOffset
from shardkeep.dcp._impl.optimizer import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.plans import _create_read_items as _create_read_items
from shardkeep.dcp._impl.plans import create_read_items_for_chunk_list as create_read_items_for_chunk_list
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import BytesStorageMetadata as BytesStorageMetadata
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import MetadataIndex as MetadataIndex
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.state.flatten import unflatten_state_dict as unflatten_state_dict
