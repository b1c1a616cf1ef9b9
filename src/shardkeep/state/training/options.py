"""
Options of the functions that read and set state.

The names and defaults are torch's, so that code moves over by changing an import. What `checked_options` returns
holds everything that is looked up once for each call: names of parameters, FSDP1 wrappers, prefixes of submodules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from shardkeep.state.training import fsdp1
from shardkeep.state.training.live import LiveItem, live_state, names_of_parameters
from shardkeep.state.training.names import FQN_MODIFIERS, all_canonical, canonical_key
from shardkeep.state.training.problems import BadOptions, BadState

STATE = "state"
PARAM_GROUPS = "param_groups"
PARAMS = "params"


@dataclass
class StateDictOptions:
    """How state is read from a model and its optimizers, and how it is set to them."""

    full_state_dict: bool = False
    """Every tensor is whole: gathered when read, cut to each rank's part when set."""
    cpu_offload: bool = False
    """Tensors read are on the CPU; together with `full_state_dict` only rank 0 gets them, the others get nothing."""
    ignore_frozen_params: bool = False
    """Parameters that require no gradient are left out of the model's state."""
    keep_submodule_prefixes: bool = True
    """Names stay whole when only `submodules` are read; False takes the name of the submodule away."""
    strict: bool = True
    """A key too many or too few in the model's state, or a parameter without optimizer state, is an error."""
    broadcast_from_rank0: bool = False
    """Only rank 0 passes the (whole) state; the others get it from there. Needs `full_state_dict`."""
    flatten_optimizer_state_dict: bool = False
    """Optimizer state is one level deep: `state.<name>.<key>` and `param_groups.<name>.<key>`."""
    dsd_fqn_modifiers: str = FQN_MODIFIERS
    """What the method is called by which modules hide children from names."""


@dataclass
class StateDictInfo(StateDictOptions):
    """The options of one call and what was looked up for it."""

    fqn_param_mapping: dict[str | torch.Tensor, set[str] | torch.Tensor] = field(default_factory=dict)
    """Each parameter or buffer to its canonical names, and each name to what it names."""
    shared_params_mapping: dict[str | torch.Tensor, set[str] | torch.Tensor] = field(default_factory=dict)
    """The part of `fqn_param_mapping` about what has several names."""
    submodule_prefixes: set[str] = field(default_factory=set)
    handle_model: bool = True
    handle_optim: bool = True
    fsdp_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Sets how FSDP1 gives and takes state dicts, for as long as it is entered."""
    fsdp_modules: list[nn.Module] = field(default_factory=list)
    param_names: dict[nn.Parameter, tuple[str, ...]] = field(default_factory=dict)
    """Each parameter to its canonical names, the usual one first."""
    live: list[LiveItem] = field(default_factory=list)
    """All that the model holds."""
    canonical: bool = False
    """Whether nothing in the model wraps or hides anything: keys of its state dict are names."""


def checked_options(
    model: nn.Module,
    optims: Sequence[torch.optim.Optimizer],
    optim_only: bool,
    *,
    submodules: Iterable[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDictInfo:
    """
    Check options against each other and look up what a call needs to know of the model.

    Raises:
        BadOptions: (ValueError) `broadcast_from_rank0` without `full_state_dict`.
        BadState: (RuntimeError) only optimizers are asked for, and there are none.

    """
    options = options or StateDictOptions()
    if submodules:
        warnings.warn(
            "submodules= is deprecated: read the whole state and pick the keys that begin with the submodule's name",
            FutureWarning,
            stacklevel=3,
        )
    if optim_only and not optims:
        raise BadState("only optimizer state is asked for, but no optimizer was passed")
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise BadOptions(
            "broadcast_from_rank0 hands out whole tensors, and full_state_dict is False",
            hint="pass StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
        )
    modifiers = options.dsd_fqn_modifiers
    canonical = all_canonical(model, fqn_modifiers=modifiers)
    live = list(live_state(model, modifiers, canonical=canonical))
    named, shared = _name_tables(live)
    wrappers = fsdp1.fsdp_modules(model)
    return StateDictInfo(
        **{one.name: getattr(options, one.name) for one in fields(StateDictOptions)},
        fqn_param_mapping=named,
        shared_params_mapping=shared,
        submodule_prefixes=_prefixes(model, submodules, modifiers),
        handle_model=not optim_only,
        handle_optim=len(optims) > 0,
        fsdp_context=fsdp1.state_dict_context(
            model,
            full=options.full_state_dict,
            cpu_offload=options.cpu_offload,
            broadcast=options.broadcast_from_rank0,
        )
        if wrappers
        else nullcontext,
        fsdp_modules=wrappers,
        param_names=names_of_parameters(live),
        live=live,
        canonical=canonical,
    )


def _name_tables(
    live: Iterable[LiveItem],
) -> tuple[dict[str | torch.Tensor, set[str] | torch.Tensor], dict[str | torch.Tensor, set[str] | torch.Tensor]]:
    names: dict[torch.Tensor, set[str]] = {}
    for item in live:
        if isinstance(item.value, torch.Tensor):
            names.setdefault(item.value, set()).add(item.name)
    named: dict[str | torch.Tensor, set[str] | torch.Tensor] = {}
    shared: dict[str | torch.Tensor, set[str] | torch.Tensor] = {}
    for value, found in names.items():
        flat = hasattr(value, "_fqns")  # one tensor of FSDP1 that holds several parameters: these are not tied
        for table in (named,) if len(found) == 1 or flat else (named, shared):
            table[value] = found
            table.update(dict.fromkeys(found, value))
    return named, shared


def _prefixes(model: nn.Module, submodules: Iterable[nn.Module] | None, modifiers: str) -> set[str]:
    wanted = set(submodules or ())
    if not wanted:
        return set()
    found = {
        canonical_key(model, name, fqn_modifiers=modifiers)
        for name, module in model.named_modules(remove_duplicate=False)
        if module in wanted
    }
    return {f"{name}." if name else "" for name in found}
