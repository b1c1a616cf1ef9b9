"""The names of `torch.distributed.checkpoint.state_dict_saver`."""

from shardkeep.dcp._impl.async_ import AsyncCheckpointerType as AsyncCheckpointerType
from shardkeep.dcp._impl.async_ import AsyncSaveResponse as AsyncSaveResponse
from shardkeep.dcp._impl.async_ import _ProcessBasedAsyncCheckpointExecutor as _ProcessBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.async_ import _ThreadBasedAsyncCheckpointExecutor as _ThreadBasedAsyncCheckpointExecutor
from shardkeep.dcp._impl.async_ import async_save as async_save
from shardkeep.dcp._impl.dist import _DistWrapper as _DistWrapper
from shardkeep.dcp._impl.driver import _api_bc_check as _api_bc_check
from shardkeep.dcp._impl.driver import _dcp_method_logger as _dcp_method_logger
from shardkeep.dcp._impl.driver import _profile as _profile
from shardkeep.dcp._impl.driver import _save_state_dict as _save_state_dict
from shardkeep.dcp._impl.driver import _stateful_to_state_dict as _stateful_to_state_dict
from shardkeep.dcp._impl.driver import _storage_setup as _storage_setup
from shardkeep.dcp._impl.driver import save as save
from shardkeep.dcp._impl.driver import save_state_dict as save_state_dict
from shardkeep.dcp._impl.planners import DefaultSavePlanner as DefaultSavePlanner
from shardkeep.dcp._state_dict_utils import STATE_DICT_TYPE as STATE_DICT_TYPE
from shardkeep.dcp.stateful import Stateful as Stateful
from shardkeep.engine.stagers import AsyncStager as AsyncStager
from shardkeep.engine.stagers import DefaultStager as DefaultStager
from shardkeep.engine.stagers import StagingOptions as StagingOptions
from shardkeep.layouts.torch_values import Metadata as Metadata
from shardkeep.layouts.torch_values import SavePlan as SavePlan
from shardkeep.layouts.torch_values import SavePlanner as SavePlanner
from shardkeep.layouts.torch_values import StorageWriter as StorageWriter
from shardkeep.layouts.torch_values import WriteResult as WriteResult
