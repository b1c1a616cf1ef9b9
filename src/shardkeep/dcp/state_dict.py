"""Model and optimizer state under the names of `torch.distributed.checkpoint.state_dict`."""

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as torch calls it there
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from shardkeep.dcp._state_dict_utils import (
    _broadcast_state_dict,
    _distribute_state_dict,
    _flatten_state_dict,
    _gather_state_dict,
    _offload_state_dict_to_cpu,
    _unflatten_state_dict,
)
from shardkeep.format.collector import collector_paused as _gc_context
from shardkeep.state.training.both import get_state_dict, set_state_dict
from shardkeep.state.training.both import patch_model_state_dict as _patch_model_state_dict
from shardkeep.state.training.both import patch_optimizer_state_dict as _patch_optimizer_state_dict
from shardkeep.state.training.calls import check_states as _verify_state_dict
from shardkeep.state.training.calls import gathered_or_offloaded as _maybe_full_or_cpu_state_dict
from shardkeep.state.training.calls import own_method as _state_dict_fn
from shardkeep.state.training.fresh import init_optim_state as _init_optim_state
from shardkeep.state.training.model import by_submodule as _unflatten_model_state_dict
from shardkeep.state.training.model import get_model_state_dict, set_model_state_dict
from shardkeep.state.training.model import model_state as _get_model_state_dict
from shardkeep.state.training.model import set_model_state as _load_model_state_dict
from shardkeep.state.training.names import FLAT_PARAM as _FLAT_PARAM
from shardkeep.state.training.names import get_fqns as _get_fqns
from shardkeep.state.training.optimizer import get_optimizer_state_dict, set_optimizer_state_dict
from shardkeep.state.training.optimizer import optimizer_state as _get_optim_state_dict
from shardkeep.state.training.optimizer_load import load_optimizers as _load_optim_state_dict
from shardkeep.state.training.options import PARAM_GROUPS as _PG
from shardkeep.state.training.options import PARAMS as _PARAMS
from shardkeep.state.training.options import STATE as _STATE
from shardkeep.state.training.options import StateDictInfo as _StateDictInfo
from shardkeep.state.training.options import StateDictOptions
from shardkeep.state.training.options import checked_options as _verify_options
from shardkeep.state.training.saved import flatten as _flatten_optim_state_dict
from shardkeep.state.training.types import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    ValueType,
)

__all__ = [
    "DDP",
    "FQNS_T",
    "FSDP",
    "_FLAT_PARAM",
    "_PARAMS",
    "_PG",
    "_STATE",
    "DTensor",
    "DictValueType",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "ListDictValueType",
    "OptimStateDictConfig",
    "OptimizerStateType",
    "PrimitiveType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardedTensor",
    "StateDictConfig",
    "StateDictOptions",
    "StateDictType",
    "ValueType",
    "_IncompatibleKeys",
    "_StateDictInfo",
    "_broadcast_state_dict",
    "_distribute_state_dict",
    "_flatten_optim_state_dict",
    "_flatten_state_dict",
    "_gather_state_dict",
    "_gc_context",
    "_get_fqns",
    "_get_model_state_dict",
    "_get_optim_state_dict",
    "_init_optim_state",
    "_load_model_state_dict",
    "_load_optim_state_dict",
    "_maybe_full_or_cpu_state_dict",
    "_offload_state_dict_to_cpu",
    "_patch_model_state_dict",
    "_patch_optimizer_state_dict",
    "_state_dict_fn",
    "_unflatten_model_state_dict",
    "_unflatten_state_dict",
    "_verify_options",
    "_verify_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
