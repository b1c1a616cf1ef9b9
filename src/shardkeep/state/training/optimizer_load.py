"""
Saved optimizer state into live optimizers: which belongs to whom, cut to this rank's part, in the optimizer's types.

No step is made on the way. Only where the state's form cannot be known from the state itself (its dtype or layout is
not the parameter's) is an optimizer without state asked, by `fresh.rehearsed`, what its state looks like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardkeep.state.training import fsdp1
from shardkeep.state.training.calls import own_method
from shardkeep.state.training.groups import group_for_load
from shardkeep.state.training.names import FLAT_PARAM, state_dict_key
from shardkeep.state.training.options import PARAM_GROUPS, PARAMS, STATE, StateDictInfo
from shardkeep.state.training.placing import placed
from shardkeep.state.training.problems import BadState, MissingKey
from shardkeep.state.training.saved import Saved, at, mapped, read_saved, skeleton, tensor_leaves, with_keys_of
from shardkeep.state.training.share import from_rank0
from shardkeep.state.training.templates import Templates

STEP = "step"


@dataclass(frozen=True)
class Place:
    """One parameter of an optimizer, and where its state is found."""

    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name; several for a flat parameter of FSDP1, which holds several parameters."""


@dataclass(frozen=True)
class Plan:
    """What one optimizer is to get."""

    optimizer: Optimizer
    places: list[list[Place]]
    """Its parameters, by group."""
    templates: Templates
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The hyper-parameters of each group."""

    @property
    def flat_places(self) -> list[Place]:
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
    saved = Saved()

    def told() -> Saved:
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


def _plan(optimizer: Optimizer, known: Saved, info: StateDictInfo) -> Plan:
    places = [[_place(parameter, known, info) for parameter in group[PARAMS]] for group in optimizer.param_groups]
    plan = Plan(optimizer, places, Templates(optimizer))
    _check_complete(plan, known, info)
    for group, row in zip(optimizer.param_groups, places, strict=True):
        names = [name for place in row for name in place.names]
        plan.groups.append(group_for_load(group, names, known, optimizer, strict=info.strict))
    return plan


def _read(optimizers: Sequence[Optimizer], state_dict: Mapping[str, Any], info: StateDictInfo) -> Saved:
    names = {name for found in info.param_names.values() for name in found}
    in_order = [
        info.param_names[parameter][0]
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group[PARAMS]
        if parameter in info.param_names
    ]
    return read_saved(state_dict, names, in_order)


def _place(parameter: torch.Tensor, saved: Saved, info: StateDictInfo) -> Place:
    if parameter not in info.param_names:
        raise MissingKey(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model",
            hint="pass the model that holds all parameters of the optimizer, as it is after wrapping",
        )
    names = info.param_names[parameter]  # type: ignore[index]  # a parameter, as it was found there
    if hasattr(parameter, "_fqns") or FLAT_PARAM in names[0]:
        return Place(parameter, names)
    # A tied parameter is saved under one of its names.
    used = next((name for name in names if name in saved.groups or name in saved.state), names[0])
    return Place(parameter, (used,))


def _check_complete(plan: Plan, saved: Saved, info: StateDictInfo) -> None:
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


def _load(plan: Plan, known: Saved, saved: Saved, info: StateDictInfo) -> None:
    """Load into an optimizer that holds parameters as they are in the model."""
    optimizer, templates, flat = plan.optimizer, plan.templates, plan.flat_places
    trees: dict[int, dict[Any, Any]] = {}
    for number, place in enumerate(flat):
        if place.names[0] in known.state:
            trees[number] = _as_kept(known.state[place.names[0]], place.parameter, known, templates)
    if info.full_state_dict:
        trees = placed(trees, saved.state, [(place.parameter, place.names[0]) for place in flat], templates, info)
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


def _as_kept(tree: dict[Any, Any], parameter: torch.Tensor, saved: Saved, templates: Templates) -> dict[Any, Any]:
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
        given = at(tree, path)
        if isinstance(given, (str, bytes)):
            return given
        if not isinstance(given, torch.Tensor) or not isinstance(value, torch.Tensor) or path[-1] == STEP:
            return value
        like = at(template, path)
        if not isinstance(like, torch.Tensor):
            keep = given.is_floating_point() or given.is_complex() or given.dtype == value.dtype
            return value if keep else given.to(value.device)
        device = like.device if given.dim() == 0 else value.device
        if value.dtype == like.dtype and value.device == device:
            return value
        return given.to(device=device, dtype=like.dtype)

    result: dict[Any, Any] = mapped(loaded, own)
    return result


def _load_by_fsdp1(model: nn.Module, plan: Plan, saved: Saved, info: StateDictInfo) -> None:
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
        converted = fsdp1.optimizer_state_to_load(model, plan.optimizer, packed)
    own_method(plan.optimizer, "load_state_dict")(state_dict=converted)
