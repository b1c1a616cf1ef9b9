"""State of a model and its optimizers together, and objects whose own methods are replaced by these functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardkeep.format.collector import collector_paused
from shardkeep.state.training.calls import PATCHED, as_tuple, check_states
from shardkeep.state.training.model import (
    by_submodule,
    get_model_state_dict,
    model_state,
    set_model_state,
    set_model_state_dict,
)
from shardkeep.state.training.optimizer import get_optimizer_state_dict, optimizer_state, set_optimizer_state_dict
from shardkeep.state.training.optimizer_load import load_optimizers
from shardkeep.state.training.options import StateDictOptions, checked_options
from shardkeep.state.training.problems import BadState
from shardkeep.state.training.share import from_rank0

if TYPE_CHECKING:
    from shardkeep.state.training.types import OptimizerStateType, ValueType


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """
    Return the state of a model and that of its optimizers, both by canonical names.

    Args:
        model: The model; all ranks that hold a part of it must call this.
        optimizers: One or several, or none.
        submodules: Deprecated: return only the model's state that is in these.
        options: See `StateDictOptions`.

    Raises:
        BadState: (RuntimeError) there is no state, or an optimizer holds parameters that are not in the model.

    """
    with collector_paused():
        given = as_tuple(optimizers)
        info = checked_options(model, given, optim_only=False, submodules=submodules, options=options)
        of_model = model_state(model, info)
        of_optimizers = optimizer_state(model, given, info)
        check_states(of_model, of_optimizers, info)
        return of_model, of_optimizers


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: dict[str, ValueType],
    optim_state_dict: OptimizerStateType,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """
    Load state into a model and its optimizers; return the model's names that were missing and those not asked for.

    Args:
        model: The model; all ranks that hold a part of it must call this.
        optimizers: One or several, which take what belongs to their parameters.
        model_state_dict: As for `set_model_state_dict`; empty to load optimizers alone.
        optim_state_dict: As for `set_optimizer_state_dict`.
        options: See `StateDictOptions`.

    Raises:
        BadState: (RuntimeError) one of them is empty or lacks something.

    """
    state = by_submodule(model, model_state_dict)
    with collector_paused():
        given = as_tuple(optimizers)
        info = checked_options(model, given, optim_only=False, options=options)
        # Where rank 0 alone has the state, it alone knows whether there is any for the model.
        info.handle_model = from_rank0(lambda: bool(state)) if info.broadcast_from_rank0 else bool(state)
        if not given and not info.handle_model:
            raise BadState("there is neither state for the model nor an optimizer to set state to")
        check_states(state, optim_state_dict, info)
        load_optimizers(model, given, optim_state_dict, info)
        return set_model_state(model, state, info)


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make `model.state_dict()` and `model.load_state_dict(state)` call the functions here, with these options."""

    def state_dict() -> dict[str, ValueType]:
        return get_model_state_dict(model, options=options)

    def load_state_dict(state_dict: dict[str, Any]) -> _IncompatibleKeys:
        return set_model_state_dict(model, state_dict, options=options)

    _replace_methods(model, state_dict, load_state_dict)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizer | tuple[Optimizer, ...], options: StateDictOptions | None = None
) -> None:
    """
    Make `state_dict()` and `load_state_dict(state)` of optimizers call the functions here, with these options.

    Each of several optimizers gives and takes the state of all of them.
    """

    def state_dict() -> OptimizerStateType:
        return get_optimizer_state_dict(model, optimizers, options=options)

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(model, optimizers, state_dict, options=options)

    for optimizer in as_tuple(optimizers):
        _replace_methods(optimizer, state_dict, load_state_dict)


def _replace_methods(obj: Any, state_dict: Any, load_state_dict: Any) -> None:
    for function in (state_dict, load_state_dict):
        setattr(function, PATCHED, True)
        setattr(obj, function.__name__, function)
