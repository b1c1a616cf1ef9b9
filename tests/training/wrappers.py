"""The ways of training a model on several ranks, each as a function from a plain model to the one that is trained."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.protocol.samples import quietly
from tests.training.samples import Net


def _mesh(*shape: int, names: tuple[str, ...] | None = None) -> dist.DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fsdp1(model: Net, *, use_orig_params: bool, hybrid: bool = False) -> nn.Module:
    kwargs = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if hybrid:
        mesh = _mesh(2, dist.get_world_size() // 2, names=("replicate", "shard"))
        kwargs |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    for name in ("first", "second", "norm"):
        setattr(model, name, quietly(FullyShardedDataParallel, getattr(model, name), **kwargs))
    return quietly(FullyShardedDataParallel, model, **kwargs)


def _fsdp2(model: Net, mesh: dist.DeviceMesh | None = None) -> nn.Module:
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh or _mesh(dist.get_world_size()))
    return model


def _tp(model: Net, mesh: dist.DeviceMesh) -> Net:
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _fsdp2_tp(model: Net) -> nn.Module:
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    return _fsdp2(_tp(model, mesh["tp"]), mesh["dp"])


def _hsdp_tp(model: Net) -> nn.Module:
    mesh = _mesh(1, dist.get_world_size() // 2, 2, names=("replicate", "shard", "tp"))
    return _fsdp2(_tp(model, mesh["tp"]), mesh["replicate", "shard"])


def _compiled(model: Net) -> nn.Module:
    model.second = torch.compile(model.second, backend="eager")
    return torch.compile(model, backend="eager")


def _compiled_in_place(model: Net) -> nn.Module:
    model.first.compile(backend="eager")
    return model


def _checkpointed(model: Net, part: str) -> Net:
    setattr(model, part, checkpoint_wrapper(getattr(model, part)))
    return model


def _fsdp1_checkpointed(model: Net) -> nn.Module:
    model.first.up = checkpoint_wrapper(model.first.up)
    wrapped = _fsdp1(model, use_orig_params=False)
    _checkpointed(model, "second")
    return wrapped


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    "bare": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1": functools.partial(_fsdp1, use_orig_params=True),
    "fsdp1_flat": functools.partial(_fsdp1, use_orig_params=False),
    "fsdp1_hybrid": functools.partial(_fsdp1, use_orig_params=True, hybrid=True),
    "fsdp2": _fsdp2,
    "hsdp": lambda model: _fsdp2(model, _mesh(2, dist.get_world_size() // 2, names=("replicate", "shard"))),
    "tp": lambda model: _tp(model, _mesh(dist.get_world_size())),
    "fsdp2_tp": _fsdp2_tp,
    "hsdp_tp": _hsdp_tp,
    "compiled": _compiled,
    "compiled_ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "compiled_in_place": _compiled_in_place,
    "checkpointed": lambda model: _checkpointed(model, "first"),
    "checkpointed_fsdp2": lambda model: _fsdp2(_checkpointed(model, "second")),
    "fsdp1_checkpointed": _fsdp1_checkpointed,
}
FOR_FOUR = ("fsdp1_hybrid", "hsdp", "fsdp2_tp", "hsdp_tp")
"""Those that mean something on four ranks or more."""
