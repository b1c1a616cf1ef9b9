"""Model and optimizer state under the names of `torch.distributed.checkpoint.state_dict`."""

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed.fsdp import *
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor as DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel as DDP

from shardkeep.options import collector_paused as _gc_context
from shardkeep.state.collectives import broadcast_state_dict as _broadcast_state_dict
from shardkeep.state.collectives import distribute_state_dict as _distribute_state_dict
from shardkeep.state.collectives import gather_state_dict as _gather_state_dict
from shardkeep.state.flatten import flatten_everything as _flatten_state_dict
from shardkeep.state.flatten import unflatten_state_dict as _unflatten_state_dict
from shardkeep.state.modules import PARAM_GROUPS as _PG
from shardkeep.state.modules import PARAMS as _PARAMS
from shardkeep.state.modules import STATE as _STATE
from shardkeep.state.modules import StateDictInfo as _StateDictInfo
from shardkeep.state.modules import StateDictOptions as StateDictOptions
from shardkeep.state.modules import by_submodule as _unflatten_model_state_dict
from shardkeep.state.modules import check_states as _verify_state_dict
from shardkeep.state.modules import checked_options as _verify_options
from shardkeep.state.modules import gathered_or_offloaded as _maybe_full_or_cpu_state_dict
from shardkeep.state.modules import model_state as _get_model_state_dict
from shardkeep.state.modules import set_model_state as _load_model_state_dict
from shardkeep.state.names import FLAT_PARAM as _FLAT_PARAM
from shardkeep.state.names import get_fqns as _get_fqns
from shardkeep.state.names import own_method as _state_dict_fn
from shardkeep.state.offload import offload_state_dict_to_cpu as _offload_state_dict_to_cpu
from shardkeep.state.optimizers import init_optim_state as _init_optim_state
from shardkeep.state.state_dict import *
from shardkeep.state.state_dict import flatten_optimizer_state as _flatten_optim_state_dict
from shardkeep.state.state_dict import load_optimizers as _load_optim_state_dict
from shardkeep.state.state_dict import optimizer_state as _get_optim_state_dict
from shardkeep.state.state_dict import patch_model_state_dict as _patch_model_state_dict
from shardkeep.state.state_dict import patch_optimizer_state_dict as _patch_optimizer_state_dict

FQNS_T = set[str]
PrimitiveType = DTensor | ShardedTensor | torch.Tensor | int | float | str
ValueType = PrimitiveType | list[PrimitiveType] | tuple[PrimitiveType] | dict[str, "ValueType"]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]
