"""
What is special about FSDP1, whose parameters are flattened and whose state only it can give and take.

Everything else here works on names; FSDP1 alone is asked for its state by its own methods. It is imported only
where a module of its class exists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardkeep.state.names import fsdp_modules


def state_dict_context(
    model: nn.Module, *, full: bool, cpu_offload: bool, broadcast: bool
) -> Callable[[], AbstractContextManager[None]]:
    """Return what sets, while entered, the form in which FSDP1 gives and takes state."""
    from torch.distributed.fsdp import (  # noqa: PLC0415 - slow, and needed only here
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    # On the CPU there is nothing to offload, and asking for it lets FSDP1 hand out memory that it frees at once.
    offload = cpu_offload and any(parameter.device.type != "cpu" for parameter in model.parameters())

    @contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
            # The method sets and resets; the warning is about its name alone.
            entered = FullyShardedDataParallel.state_dict_type(
                model,
                StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT,
                FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload)
                if full
                else ShardedStateDictConfig(offload_to_cpu=offload),
                FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=cpu_offload or broadcast)
                if full
                else ShardedOptimStateDictConfig(offload_to_cpu=offload),
            )
            with entered:
                yield

    return context


def fsdp1_optimizer_state(model: nn.Module, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by FSDP1's names of the original parameters; empty on ranks that get none."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow, and needed only here

    group = _process_group(model)
    return FullyShardedDataParallel.optim_state_dict(model, optimizer, packed, group=group)


def fsdp1_state_to_load(model: nn.Module, optimizer: Optimizer, named: dict[str, Any]) -> dict[str, Any]:
    """Return what the optimizer itself can load, from state by FSDP1's names of the original parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow, and needed only here

    group = _process_group(model)
    return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, named, group=group)


def _process_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks over which the outermost wrapper shards; None, all ranks, where it also replicates."""
    from torch.distributed.fsdp import ShardingStrategy  # noqa: PLC0415 - slow, and needed only here

    outermost = cast("Any", fsdp_modules(model)[0])
    if outermost.sharding_strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        return None
    group = outermost.process_group
    return None if isinstance(group, tuple) else group
