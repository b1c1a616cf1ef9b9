"""Model and optimizer state under the names of `torch.distributed.checkpoint.state_dict`."""

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictType as StateDictType
from torch.distributed.tensor import DTensor as DTensor
from torch.nn.modules.module import _IncompatibleKeys as _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel

from shardkeep.format.pickles import collector_paused
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict, gather_state_dict
from shardkeep.state.flatten import flatten_everything, unflatten_state_dict
from shardkeep.state.modules import (
    PARAM_GROUPS,
    PARAMS,
    STATE,
    StateDictInfo,
    by_submodule,
    check_states,
    checked_options,
    gathered_or_offloaded,
    model_state,
    set_model_state,
)
from shardkeep.state.modules import StateDictOptions as StateDictOptions
from shardkeep.state.names import FLAT_PARAM, get_fqns, own_method
from shardkeep.state.offload import offload_state_dict_to_cpu
from shardkeep.state.optimizers import init_optim_state
from shardkeep.state.state_dict import (
    flatten_optimizer_state,
    load_optimizers,
    optimizer_state,
    patch_model_state_dict,
    patch_optimizer_state_dict,
)
from shardkeep.state.state_dict import get_model_state_dict as get_model_state_dict
from shardkeep.state.state_dict import get_optimizer_state_dict as get_optimizer_state_dict
from shardkeep.state.state_dict import get_state_dict as get_state_dict
from shardkeep.state.state_dict import set_model_state_dict as set_model_state_dict
from shardkeep.state.state_dict import set_optimizer_state_dict as set_optimizer_state_dict
from shardkeep.state.state_dict import set_state_dict as set_state_dict

FSDP = FullyShardedDataParallel
DDP = DistributedDataParallel
_gc_context = collector_paused
_broadcast_state_dict = broadcast_state_dict
_distribute_state_dict = distribute_state_dict
_gather_state_dict = gather_state_dict
_flatten_state_dict = flatten_everything
_unflatten_state_dict = unflatten_state_dict
_PG = PARAM_GROUPS
_PARAMS = PARAMS
_STATE = STATE
_StateDictInfo = StateDictInfo
_unflatten_model_state_dict = by_submodule
_verify_state_dict = check_states
_verify_options = checked_options
_maybe_full_or_cpu_state_dict = gathered_or_offloaded
_get_model_state_dict = model_state
_state_dict_fn = own_method
_load_model_state_dict = set_model_state
_FLAT_PARAM = FLAT_PARAM
_get_fqns = get_fqns
_offload_state_dict_to_cpu = offload_state_dict_to_cpu
_init_optim_state = init_optim_state
_flatten_optim_state_dict = flatten_optimizer_state
_load_optim_state_dict = load_optimizers
_get_optim_state_dict = optimizer_state
_patch_model_state_dict = patch_model_state_dict
_patch_optimizer_state_dict = patch_optimizer_state_dict

FQNS_T = set[str]

PrimitiveType = DTensor | ShardedTensor | torch.Tensor | int | float | str

ValueType = PrimitiveType | list[PrimitiveType] | tuple[PrimitiveType] | dict[str, "ValueType"]

DictValueType = dict[str, ValueType]

ListDictValueType = list[DictValueType]

OptimizerStateType = dict[str, DictValueType | ListDictValueType]
