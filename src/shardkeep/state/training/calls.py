"""What all the public functions do around their work: check, pause the collector, gather or offload results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from shardkeep.state.toolkit.gather import gather_state_dict
from shardkeep.state.toolkit.offload import offload_state_dict_to_cpu
from shardkeep.state.training.names import FLAT_PARAM
from shardkeep.state.training.options import StateDictInfo
from shardkeep.state.training.problems import BadState

PATCHED = "_shardkeep_patched"
"""Marks functions that were put in place of an object's own `state_dict` and `load_state_dict`."""


def as_tuple(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple."""
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def own_method(obj: Any, name: str) -> Callable[..., Any]:
    """Return a method of an object, and the class's own one where ours was put in its place."""
    found: Callable[..., Any] = getattr(obj, name)
    if getattr(found, PATCHED, False):
        found = getattr(type(obj), name).__get__(obj)
    return found


def gathered_or_offloaded(state: dict[str, Any], info: StateDictInfo) -> dict[str, Any]:
    """Make tensors whole, or move them to the CPU, as the options say."""
    if info.full_state_dict:
        only = (0,) if info.cpu_offload and dist.is_initialized() else ()
        return gather_state_dict(state, cpu_offload=info.cpu_offload, ranks_only=only)
    if info.cpu_offload:
        return offload_state_dict_to_cpu(state)
    return state


def check_states(model_state: Mapping[str, Any], optimizer_state: Mapping[str, Any], info: StateDictInfo) -> None:
    """
    Refuse state dicts that are empty where they must not be, or that no plain model can have.

    Raises:
        BadState: (RuntimeError) with what to do about it.

    """
    elsewhere = info.broadcast_from_rank0 or (info.cpu_offload and info.full_state_dict)
    partial = bool(info.submodule_prefixes) or info.ignore_frozen_params or not info.strict
    if info.handle_model and not model_state and not elsewhere and not partial:
        raise BadState(
            f"the model's state dict is empty{_on_rank()}",
            hint="the model has no parameters or buffers here, or an empty dict was passed to be loaded",
        )
    if info.handle_optim and not optimizer_state and not elsewhere:
        raise BadState(
            f"the optimizers' state dict is empty{_on_rank()}",
            hint="pass what get_optimizer_state_dict returned, or set the model's state alone",
        )
    for key in model_state:
        if FLAT_PARAM in key.split("."):
            raise BadState(
                f"{key!r} is a flat parameter of FSDP1, not a parameter of the model",
                hint="pass the root module that FSDP wraps, not a part of it",
            )


def _on_rank() -> str:
    return f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
