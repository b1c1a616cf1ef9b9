"""
The API of `torch.distributed.checkpoint` on shardkeep's engine: the same names, modules, arguments and files.

    import shardkeep.dcp as dcp

For code that imports torch's module itself, call `shardkeep.dcp.install()` before that import.

Each module re-exports the names of torch's module, whether torch's module defines them or imports them, because people
import both from there. The implementation is in `_impl`.
"""

from shardkeep.dcp import _async_executor as _async_executor
from shardkeep.dcp import _async_process_executor as _async_process_executor
from shardkeep.dcp import _async_thread_executor as _async_thread_executor
from shardkeep.dcp import _consolidate_hf_safetensors as _consolidate_hf_safetensors
from shardkeep.dcp import _dedup_save_plans as _dedup_save_plans
from shardkeep.dcp import _extension as _extension
from shardkeep.dcp import _hf_utils as _hf_utils
from shardkeep.dcp import _nested_dict as _nested_dict
from shardkeep.dcp import _pg_transport as _pg_transport
from shardkeep.dcp import _sharded_tensor_utils as _sharded_tensor_utils
from shardkeep.dcp import _state_dict_stager as _state_dict_stager
from shardkeep.dcp import _storage_utils as _storage_utils
from shardkeep.dcp import _traverse as _traverse
from shardkeep.dcp import _version as _version
from shardkeep.dcp import api as api
from shardkeep.dcp import default_planner as default_planner
from shardkeep.dcp import filesystem as filesystem
from shardkeep.dcp import fsspec_filesystem as fsspec_filesystem
from shardkeep.dcp import hf_storage as hf_storage
from shardkeep.dcp import logger as logger
from shardkeep.dcp import logging_handlers as logging_handlers
from shardkeep.dcp import metadata as metadata
from shardkeep.dcp import optimizer as optimizer
from shardkeep.dcp import planner as planner
from shardkeep.dcp import planner_helpers as planner_helpers
from shardkeep.dcp import protocol as protocol
from shardkeep.dcp import quantized_hf_storage as quantized_hf_storage
from shardkeep.dcp import resharding as resharding
from shardkeep.dcp import staging as staging
from shardkeep.dcp import state_dict_loader as state_dict_loader
from shardkeep.dcp import state_dict_saver as state_dict_saver
from shardkeep.dcp import stateful as stateful
from shardkeep.dcp import storage as storage
from shardkeep.dcp import utils as utils
from shardkeep.dcp._impl.async_ import async_save as async_save
from shardkeep.dcp._impl.driver import load as load
from shardkeep.dcp._impl.driver import load_state_dict as load_state_dict
from shardkeep.dcp._impl.driver import save as save
from shardkeep.dcp._impl.driver import save_state_dict as save_state_dict
from shardkeep.dcp._impl.file_reader import FileSystemReader as FileSystemReader
from shardkeep.dcp._impl.file_reader import FsspecReader as FsspecReader
from shardkeep.dcp._impl.file_writer import FileSystemWriter as FileSystemWriter
from shardkeep.dcp._impl.file_writer import FsspecWriter as FsspecWriter
from shardkeep.dcp._impl.hf import HuggingFaceStorageWriter as HuggingFaceStorageWriter
from shardkeep.dcp._impl.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from shardkeep.dcp._impl.hf_reader import QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader
from shardkeep.dcp._impl.optimizer import load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict
from shardkeep.dcp._impl.planners import DefaultLoadPlanner as DefaultLoadPlanner
from shardkeep.dcp._impl.planners import DefaultSavePlanner as DefaultSavePlanner
from shardkeep.dcp_install import install as install
from shardkeep.dcp_install import uninstall as uninstall
from shardkeep.errors import CheckpointException as CheckpointException
from shardkeep.layouts.torch_values import BytesStorageMetadata as BytesStorageMetadata
from shardkeep.layouts.torch_values import CheckpointableTensor as CheckpointableTensor
from shardkeep.layouts.torch_values import ChunkStorageMetadata as ChunkStorageMetadata
from shardkeep.layouts.torch_values import LoadPlan as LoadPlan
from shardkeep.layouts.torch_values import LoadPlanner as LoadPlanner
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import ReadItem as ReadItem
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageReader as StorageReader
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter
from shardkeep.layouts.torch_values import TensorStorageMetadata as TensorStorageMetadata
from shardkeep.layouts.torch_values import WriteItem as WriteItem
