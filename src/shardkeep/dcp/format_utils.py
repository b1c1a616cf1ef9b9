"""The names of `torch.distributed.checkpoint.format_utils`, and its command."""

from shardkeep.dcp._impl.convert import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
from shardkeep.dcp._impl.convert import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
from shardkeep.dcp._impl.convert import FormatMode as FormatMode
from shardkeep.dcp._impl.convert import dcp_to_torch_save as dcp_to_torch_save
from shardkeep.dcp._impl.convert import main as main
from shardkeep.dcp._impl.convert import torch_save_to_dcp as torch_save_to_dcp
from shardkeep.dcp._impl.driver import _load_state_dict as _load_state_dict
from shardkeep.dcp._impl.driver import _save_state_dict as _save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import _EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from shardkeep.dcp._impl.plans import _create_chunk_list as _create_chunk_list
from shardkeep.layouts.torch_values import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.layouts.torch_values import STORAGE_TYPES as STORAGE_TYPES
from shardkeep.layouts.torch_values import LoadItemType as LoadItemType
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import TensorProperties as TensorProperties
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.state.flatten import flatten_state_dict as flatten_state_dict

if __name__ == "__main__":
    main()
