"""
The API of `torch.distributed.checkpoint` on shardkeep's engine: the same names, modules, arguments and files.

For code that imports torch's module itself, call `shardkeep.dcp.install()` before that import. Each module re-exports
all names of torch's module, also those that it imports, because people import both from there.
"""

from importlib import import_module
from types import ModuleType

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


def __getattr__(name: str) -> ModuleType:
    """Import a module of the package when it is first used: torch's modules are there without an import of their own."""
    whole = f"{__name__}.{name}"
    try:
        return import_module(whole)
    except ModuleNotFoundError as error:
        if error.name != whole:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
