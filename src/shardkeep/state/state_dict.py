"""
Saved optimizer state into live optimizers: which belongs to whom, cut to this rank's part, in the optimizer's types.

No step is made on the way. Only where the state's form cannot be known from the state itself (its dtype or layout is
not the parameter's) is an optimizer without state asked, by `fresh.rehearsed`, what its state looks like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardkeep.errors import BadState, MissingKey
from shardkeep.format.pickles import collector_paused
from shardkeep.state import fsdp1
from shardkeep.state.modules import (
    PARAM_GROUPS,
    PARAMS,
    PATCHED,
    STATE,
    StateDictInfo,
    StateDictOptions,
    as_tuple,
    by_submodule,
    check_states,
    checked_options,
    from_rank0,
    gathered_or_offloaded,
    get_model_state_dict,
    model_state,
    own_method,
    set_model_state,
    set_model_state_dict,
)
from shardkeep.state.names import FLAT_PARAM, canonical_key, state_dict_key
from shardkeep.state.optimizers import (
    SavedOptimizers,
    Templates,
    flatten_optimizer_state,
    group_for_load,
    map_tree,
    parse_optimizer_state,
    shard_full_state,
    skeleton,
    tensor_leaves,
    value_at,
    with_initial_state,
    with_keys_of,
)

if TYPE_CHECKING:
    from shardkeep.state.types import OptimizerStateType, ValueType


STEP = "step"


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter of an optimizer, and where its state is found."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name; several for a flat parameter of FSDP1, which holds several parameters."""


@dataclass(frozen=True)
class OptimizerLoadPlan:
    """What one optimizer is to get."""

    optimizer: Optimizer
    places: list[list[ParameterEntry]]
    """Its parameters, by group."""
    templates: Templates
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The hyper-parameters of each group."""

    @property
    def flat_places(self) -> list[ParameterEntry]:
        """Its parameters in their order, which is what numbers them in a state dict of its own."""
        return [place for row in self.places for place in row]


@torch.no_grad()
def load_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], state_dict: Mapping[str, Any], info: StateDictInfo
) -> None:
    """
    Load a state dict, in any of its forms, into optimizers.

    Raises:
        BadState: (RuntimeError) state or hyper-parameters of a parameter are missing, or do not fit.

    """
    if not info.handle_optim:
        return
    # FSDP1 sends whole state around by itself, whenever one rank alone was to keep it.
    from_first = info.broadcast_from_rank0 or bool(info.fsdp_modules and info.full_state_dict and info.cpu_offload)
    saved = SavedOptimizers()

    def told() -> SavedOptimizers:
        nonlocal saved
        saved = _read(optimizers, state_dict, info)
        return skeleton(saved)

    if from_first and dist.is_initialized():
        known = from_rank0(told)
    else:
        if not state_dict:
            raise BadState(
                "the optimizers' state dict is empty on this rank",
                hint="pass it on all ranks, or on rank 0 alone with broadcast_from_rank0=True",
            )
        known = saved = _read(optimizers, state_dict, info)
    # All are looked at before the first is changed.
    plans = [_plan(optimizer, known, info) for optimizer in optimizers]
    for plan in plans:
        if info.fsdp_modules:
            _load_by_fsdp1(model, plan, saved, info)
        else:
            _load(plan, known, saved, info)


def _plan(optimizer: Optimizer, known: SavedOptimizers, info: StateDictInfo) -> OptimizerLoadPlan:
    places = [[_place(parameter, known, info) for parameter in group[PARAMS]] for group in optimizer.param_groups]
    plan = OptimizerLoadPlan(optimizer, places, Templates(optimizer))
    _check_complete(plan, known, info)
    for group, row in zip(optimizer.param_groups, places, strict=True):
        names = [name for place in row for name in place.names]
        plan.groups.append(group_for_load(group, names, known, optimizer, strict=info.strict))
    return plan


def _read(optimizers: Sequence[Optimizer], state_dict: Mapping[str, Any], info: StateDictInfo) -> SavedOptimizers:
    names = {name for found in info.param_names.values() for name in found}
    in_order = [
        info.param_names[parameter][0]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group[PARAMS]
        if parameter in info.param_names
    ]
    return parse_optimizer_state(state_dict, names, in_order)


def _place(parameter: torch.Tensor, saved: SavedOptimizers, info: StateDictInfo) -> ParameterEntry:
    if parameter not in info.param_names:
        raise MissingKey(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model",
            hint="pass the model that holds all parameters of the optimizer, as it is after wrapping",
        )
    names = info.param_names[parameter]  # type: ignore[index]  # a parameter, as it was found there
    if hasattr(parameter, "_fqns") or FLAT_PARAM in names[0]:
        return ParameterEntry(parameter, names)
    # A tied parameter is saved under one of its names.
    used = next((name for name in names if name in saved.groups or name in saved.state), names[0])
    return ParameterEntry(parameter, (used,))


def _check_complete(plan: OptimizerLoadPlan, saved: SavedOptimizers, info: StateDictInfo) -> None:
    """Refuse to go on where a parameter that is trained would lose its state."""
    if not info.strict or not saved.state:
        return
    state = plan.optimizer.state
    trained = [place for place in plan.flat_places if place.parameter.requires_grad]
    found = any(name in saved.state for place in trained for name in place.names)
    for place in trained:
        missing = [name for name in place.names if name not in saved.state]
        if not missing or (state and place.parameter not in state):
            continue
        if not found and not plan.templates.of(place.parameter):
            return  # an optimizer that keeps no state, beside others that do
        raise BadState(
            f"Missing optimizer state for parameter {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="it requires gradients, and the state dict has no state for it (it was frozen, unused or not there "
            "when that was saved); StateDictOptions(strict=False) loads the state of the others",
            missing=missing,
        )


def _load(plan: OptimizerLoadPlan, known: SavedOptimizers, saved: SavedOptimizers, info: StateDictInfo) -> None:
    """Load into an optimizer that holds parameters as they are in the model."""
    optimizer, templates, flat = plan.optimizer, plan.templates, plan.flat_places
    trees: dict[int, dict[Any, Any]] = {}
    for number, place in enumerate(flat):
        if place.names[0] in known.state:
            trees[number] = _as_kept(known.state[place.names[0]], place.parameter, known, templates)
    if info.full_state_dict:
        trees = shard_full_state(
            trees, saved.state, [(place.parameter, place.names[0]) for place in flat], templates, info
        )
    numbers = iter(range(len(flat)))
    packed = {
        STATE: dict(trees),
        PARAM_GROUPS: [
            {**group, PARAMS: [next(numbers) for _ in row]} for group, row in zip(plan.groups, plan.places, strict=True)
        ],
    }
    own_method(optimizer, "load_state_dict")(state_dict=packed)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for number, tree in trees.items():
            parameter = flat[number].parameter
            template = templates.of(parameter) if _unlike(tree, parameter) else templates.at_hand(parameter)
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _in_own_types(tree, loaded, template)


def _as_kept(
    tree: dict[Any, Any], parameter: torch.Tensor, saved: SavedOptimizers, templates: Templates
) -> dict[Any, Any]:
    """Return state with the keys the optimizer has, where the flat form had made strings of them."""
    nested = saved.was_flat and any(isinstance(value, Mapping) for value in tree.values())
    template = templates.of(parameter) if nested else templates.at_hand(parameter)
    if saved.was_flat and template:
        return with_keys_of(tree, template)
    return tree


def _unlike(tree: Mapping[Any, Any], parameter: torch.Tensor) -> bool:
    """Say whether state has a floating type that is not the parameter's: only the optimizer knows which it wants."""
    return any(
        leaf.is_floating_point() and leaf.dtype != parameter.dtype and path[-1] != STEP
        for path, leaf in tensor_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    )


def _in_own_types(tree: dict[Any, Any], loaded: dict[Any, Any], template: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """
    Undo what `Optimizer.load_state_dict` does to state that is not like the parameter.

    It turns tensors into the parameter's dtype, be they whole numbers, and strings into the text of a generator.
    """

    def own(path: tuple[Any, ...], value: Any) -> Any:
        given = value_at(tree, path)
        if isinstance(given, (str, bytes)):
            return given
        if not isinstance(given, torch.Tensor) or not isinstance(value, torch.Tensor) or path[-1] == STEP:
            return value
        like = value_at(template, path)
        if not isinstance(like, torch.Tensor):
            keep = given.is_floating_point() or given.is_complex() or given.dtype == value.dtype
            return value if keep else given.to(value.device)
        device = like.device if given.dim() == 0 else value.device
        if value.dtype == like.dtype and value.device == device:
            return value
        return given.to(device=device, dtype=like.dtype)

    result: dict[Any, Any] = map_tree(loaded, own)
    return result


def _load_by_fsdp1(model: nn.Module, plan: OptimizerLoadPlan, saved: SavedOptimizers, info: StateDictInfo) -> None:
    """Load into an optimizer that holds flat parameters, or parts of them, which FSDP1 alone can cut state for."""

    def key(name: str) -> str:
        return state_dict_key(model, name, fqn_modifiers=info.dsd_fqn_modifiers)

    named = [[name for place in row for name in place.names] for row in plan.places]
    state = {key(name): dict(saved.state[name]) for row in named for name in row if name in saved.state}
    packed = {
        STATE: state,
        PARAM_GROUPS: [
            {**group, PARAMS: [key(name) for name in row]} for group, row in zip(plan.groups, named, strict=True)
        ],
    }
    with info.fsdp_context():
        converted = fsdp1.fsdp1_state_to_load(model, plan.optimizer, packed)
    own_method(plan.optimizer, "load_state_dict")(state_dict=converted)


# State of optimizers: by canonical names of parameters, read from any number of optimizers and set to them.
#
# Parameters, gradients and learning rates are never touched by reading, nor is an optimizer that has no state yet.


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
    return gathered_or_offloaded(flatten_optimizer_state(whole) if info.flatten_optimizer_state_dict else whole, info)


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
        named = fsdp1.fsdp1_optimizer_state(model, optimizer, packed)
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


# State of a model and its optimizers together, and objects whose own methods are replaced by these functions.


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
