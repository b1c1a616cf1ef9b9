"""The ways of training a model on several ranks, each as a function from a plain model to the one that is trained."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.training.samples import Net, quietly


def bare(model: Net) -> nn.Module:
    return model


def ddp(model: Net) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp1(model: Net, *, use_orig_params: bool, hybrid: bool = False) -> nn.Module:
    kwargs = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if hybrid:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        kwargs |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}

    def wrap(module: nn.Module) -> nn.Module:
        return quietly(FullyShardedDataParallel, module, **kwargs)

    for name in ("first", "second", "norm"):
        setattr(model, name, wrap(getattr(model, name)))
    return wrap(model)


def fsdp1(model: Net) -> nn.Module:
    return _fsdp1(model, use_orig_params=True)


def fsdp1_flat(model: Net) -> nn.Module:
    return _fsdp1(model, use_orig_params=False)


def fsdp1_hybrid(model: Net) -> nn.Module:
    return _fsdp1(model, use_orig_params=True, hybrid=True)


def _shard_all(model: Net, mesh: dist.DeviceMesh) -> nn.Module:
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp2(model: Net) -> nn.Module:
    return _shard_all(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return _shard_all(model, mesh)


def _split(model: Net, mesh: dist.DeviceMesh) -> Net:
    for block in (model.first, model.second):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tp(model: Net) -> nn.Module:
    return _split(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp2_tp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return _shard_all(_split(model, mesh["tp"]), mesh["dp"])


def hsdp_tp(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    return _shard_all(_split(model, mesh["tp"]), mesh["replicate", "shard"])


def compiled(model: Net) -> nn.Module:
    model.second = torch.compile(model.second, backend="eager")
    return torch.compile(model, backend="eager")


def compiled_ddp(model: Net) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def compiled_in_place(model: Net) -> nn.Module:
    model.first.compile(backend="eager")
    return model


def checkpointed(model: Net) -> nn.Module:
    model.first = checkpoint_wrapper(model.first)
    return model


def checkpointed_fsdp2(model: Net) -> nn.Module:
    model.second = checkpoint_wrapper(model.second)
    return fsdp2(model)


def forget_meshes() -> None:
    """
    Make DTensor forget the meshes of earlier runs in this process.

    Its caches take a mesh for an equal one of before, whose process groups are gone by now.
    """
    torch.distributed.tensor.debug._clear_sharding_prop_cache()
    for one in _caches(len(sys.modules)):
        one.cache_clear()


@functools.lru_cache(maxsize=1)
def _caches(modules: int) -> list[functools._lru_cache_wrapper]:
    """Find the caches of torch.distributed; looked for anew only once there are more modules, as it takes long."""
    del modules
    return [
        one
        for one in gc.get_objects()
        if type(one) is functools._lru_cache_wrapper and str(one.__module__).startswith("torch.distributed")
    ]


def fsdp1_checkpointed(model: Net) -> nn.Module:
    model.first.up = checkpoint_wrapper(model.first.up)
    wrapped = fsdp1_flat(model)
    model.second = checkpoint_wrapper(model.second)
    return wrapped


WRAPPERS: dict[str, Callable[[Net], nn.Module]] = {
    function.__name__: function
    for function in (
        bare,
        ddp,
        fsdp1,
        fsdp1_flat,
        fsdp1_hybrid,
        fsdp2,
        hsdp,
        tp,
        fsdp2_tp,
        hsdp_tp,
        compiled,
        compiled_ddp,
        compiled_in_place,
        checkpointed,
        checkpointed_fsdp2,
        fsdp1_checkpointed,
    )
}
FOR_FOUR = ("fsdp1_hybrid", "hsdp", "fsdp2_tp", "hsdp_tp")
"""Those that mean something on four ranks or more."""
