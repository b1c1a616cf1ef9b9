"""
State of optimizers: by canonical names of parameters, read from any number of optimizers and set to them.

Parameters, gradients and learning rates are never touched by reading, nor is an optimizer that has no state yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.format.collector import collector_paused
from shardkeep.state.training import fsdp1
from shardkeep.state.training.calls import (
    as_tuple,
    check_states,
    gathered_or_offloaded,
    own_method,
)
from shardkeep.state.training.fresh import with_initial_state
from shardkeep.state.training.names import canonical_key
from shardkeep.state.training.optimizer_load import load_optimizers
from shardkeep.state.training.options import (
    PARAM_GROUPS,
    PARAMS,
    STATE,
    StateDictInfo,
    StateDictOptions,
    checked_options,
)
from shardkeep.state.training.problems import BadState, MissingKey
from shardkeep.state.training.saved import flatten

if TYPE_CHECKING:
    from shardkeep.state.training.types import OptimizerStateType


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """
    Return the state of optimizers by the canonical names of the model's parameters.

    An optimizer that made no step yet is shown with the state that a step with zero gradients makes; it stays as it
    is. Containers in the result are new, tensors are the optimizer's own wherever options allow it.

    Args:
        model: The model; all ranks that hold a part of it must call this.
        optimizers: One or several; no parameter may be in two of them.
        submodules: Deprecated, and of no effect on optimizer state.
        options: See `StateDictOptions`.

    Raises:
        BadState: (RuntimeError) an optimizer holds parameters that are not in the model.

    """
    with collector_paused():
        given = as_tuple(optimizers)
        info = checked_options(model, given, optim_only=True, submodules=submodules, options=options)
        state = optimizer_state(model, given, info)
        check_states({}, state, info)
        return state


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: OptimizerStateType,
    *,
    options: StateDictOptions | None = None,
) -> None:
    """
    Give optimizers the state they had, by the canonical names of the model's parameters.

    Optimizers need not have made a step: their state is made from what is passed. Values keep the type the optimizer
    has them in. As with `Optimizer.load_state_dict`, tensors that fit as they are become the optimizer's own, without
    a copy: pass a copy to keep them, or to give them to two optimizers.

    Args:
        model: The model; all ranks that hold a part of it must call this.
        optimizers: One or several, which take what belongs to their parameters and leave the rest.
        optim_state_dict: What `get_optimizer_state_dict` returned, here or under other wrappers; never changed. With
            `full_state_dict` its tensors are whole, and with `broadcast_from_rank0` only rank 0 needs to pass it.
        options: See `StateDictOptions`.

    Raises:
        BadState: (RuntimeError) it is empty, or has no state for a parameter that needs some.

    """
    with collector_paused():
        given = as_tuple(optimizers)
        info = checked_options(model, given, optim_only=True, options=options)
        check_states({}, optim_state_dict, info)
        load_optimizers(model, given, optim_state_dict, info)


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer], info: StateDictInfo) -> dict[str, Any]:
    """Return the state of optimizers as the options say."""
    if not info.handle_optim:
        return {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        with with_initial_state(optimizer):
            named = _named_by_fsdp1(model, optimizer, info) if info.fsdp_modules else _named(optimizer, info)
        for name, tree in named.get(STATE, {}).items():
            if name in state:
                raise BadState(
                    f"two of the optimizers have state for {name!r}",
                    hint="read their states one by one",
                )
            state[name] = _copied_dicts(tree)
        groups += named.get(PARAM_GROUPS, [])
    whole: dict[str, Any] = {STATE: state, PARAM_GROUPS: groups}
    return gathered_or_offloaded(flatten(whole) if info.flatten_optimizer_state_dict else whole, info)


def _named(optimizer: Optimizer, info: StateDictInfo) -> dict[str, Any]:
    packed = own_method(optimizer, "state_dict")()
    names = [name for group in optimizer.param_groups for name in _names_in(group, optimizer, info)]
    for key in packed[STATE]:
        if not isinstance(key, int) or key >= len(names):
            raise MissingKey(
                f"{type(optimizer).__qualname__} keeps state under {key!r}, which is none of its parameters",
                hint="save such state by itself",
            )
    return {
        STATE: {names[number]: tree for number, tree in packed[STATE].items()},
        PARAM_GROUPS: [
            {**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in packed[PARAM_GROUPS]
        ],
    }


def _names_in(group: Mapping[str, Any], optimizer: Optimizer, info: StateDictInfo) -> list[str]:
    """Return the usual name of each parameter in a group."""
    found = []
    for number, parameter in enumerate(group[PARAMS]):
        if parameter not in info.param_names:
            raise MissingKey(
                f"{type(optimizer).__qualname__} holds a parameter of shape {tuple(parameter.shape)} (number {number} "
                f"in its group) that is not in the model",
                hint="pass the model that holds all parameters of the optimizer, as it is after wrapping",
            )
        found.append(info.param_names[parameter][0])
    return found


def _named_by_fsdp1(model: nn.Module, optimizer: Optimizer, info: StateDictInfo) -> dict[str, Any]:
    packed = own_method(optimizer, "state_dict")()
    with info.fsdp_context():
        named = fsdp1.optimizer_state(model, optimizer, packed)
    if not named:
        return {}

    def canonical(name: str) -> str:
        return canonical_key(model, name, fqn_modifiers=info.dsd_fqn_modifiers)

    return {
        STATE: {canonical(name): tree for name, tree in named[STATE].items()},
        PARAM_GROUPS: [{**group, PARAMS: [canonical(name) for name in group[PARAMS]]} for group in named[PARAM_GROUPS]],
    }


def _copied_dicts(tree: Any) -> Any:
    """Copy nested dicts, so that nobody changes the optimizer by changing what was read."""
    if isinstance(tree, dict):
        return {key: _copied_dicts(value) for key, value in tree.items()}
    return tree
