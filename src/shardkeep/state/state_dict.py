"""
Torch's functions for the state of a model and its optimizers: get, set and patch, by canonical names.

Reading changes nothing, not even an optimizer without state. Setting never makes a step: only if the form of the state
cannot be derived from the state itself (its dtype or layout is not the parameter's) does an optimizer without state make a
dry step. State dicts that are passed in are never changed; an optimizer's may be nested or flat.

All ranks that hold a part of the model must call these functions. `optimizers` are one or several, and no parameter may be
in two of them; for `options` see `StateDictOptions`. `submodules` is deprecated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardkeep.display import some_of
from shardkeep.errors import BadState, BadValue, MissingKey, UnsupportedValue
from shardkeep.options import collector_paused
from shardkeep.state import modules
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict
from shardkeep.state.flatten import get_element, leaves_of, map_leaves
from shardkeep.state.leaves import TreePath, is_dtensor, path_name
from shardkeep.state.modules import PARAM_GROUPS, PARAMS, STATE, StateDictInfo, StateDictOptions
from shardkeep.state.names import FLAT_PARAM, PATCHED, canonical_key, own_method, state_dict_key
from shardkeep.state.optimizers import LIVE_KEYS, StateLayout, common_hyper, set_hyper_parameters, with_initial_state

STEP = "step"
_FLAT_LEAVES = (torch.Tensor, int, float, str, bytes, list, tuple, type(None))


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of a model, or of its `submodules`, by canonical names, whatever wrappers are around its parts."""
    return _get(model, (), optim_only=False, submodules=submodules, options=options)[0]


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Load what `get_model_state_dict` returned, here or under other wrappers; return missing and unexpected names."""
    return _set(model, (), model_state_dict, {}, optim_only=False, options=options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """
    Return the state of optimizers by the canonical names of the model's parameters.

    An optimizer that has made no step is read with the state that a step with zero gradients makes, and stays as it is.
    Containers in the result are new; tensors are the optimizer's own if the options allow it. `submodules` has no effect.
    """
    return _get(model, optimizers, optim_only=True, submodules=submodules, options=options)[1]


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """
    Load what `get_optimizer_state_dict` returned, here or under other wrappers.

    Optimizers need not have made a step; they take what belongs to their parameters and ignore the rest. Values keep the
    type in which the optimizer has them. As with `Optimizer.load_state_dict`, tensors that fit as they are become the
    optimizer's own without a copy: pass a copy to keep them, or to give them to two optimizers.
    """
    _set(model, optimizers, {}, optim_state_dict, optim_only=True, options=options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a model and that of its optimizers, both by canonical names."""
    return _get(model, optimizers, optim_only=False, submodules=submodules, options=options)


def _get(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    optim_only: bool,
    submodules: set[nn.Module] | None,
    options: StateDictOptions | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    with collector_paused():
        given = _as_tuple(optimizers)
        info = modules.checked_options(model, given, optim_only, submodules=submodules, options=options)
        of_model = modules.model_state(model, info)
        of_optimizers = optimizer_state(model, given, info)
        modules.check_states(of_model, of_optimizers, info, reading=True)
        return of_model, of_optimizers


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load what `get_state_dict` returned, also for optimizers alone; return the model's missing and unexpected names."""
    return _set(model, optimizers, model_state_dict, optim_state_dict, optim_only=False, options=options)


def _set(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    model_state_dict: dict[str, Any],
    optim_state_dict: dict[str, Any],
    *,
    optim_only: bool,
    options: StateDictOptions | None,
) -> _IncompatibleKeys:
    state = modules.by_submodule(model, model_state_dict)
    with collector_paused():
        given = _as_tuple(optimizers)
        info = modules.checked_options(model, given, optim_only, options=options)
        if given and not optim_only:
            # If only rank 0 has the state, only rank 0 knows whether there is any for the model.
            has_model = modules.from_rank0(lambda: bool(state)) if info.broadcast_from_rank0 else bool(state)
            info = replace(info, handle_model=has_model)
        modules.check_states(state, optim_state_dict, info)
        load_optimizers(model, given, optim_state_dict, info)
        return modules.set_model_state(model, state, info)


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make `model.state_dict()` and `model.load_state_dict(state)` call the functions here, with these options."""
    _replace_methods(
        model,
        lambda: get_model_state_dict(model, options=options),
        lambda state_dict: set_model_state_dict(model, state_dict, options=options),
    )


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizer | tuple[Optimizer, ...], options: StateDictOptions | None = None
) -> None:
    """Make `state_dict()` and `load_state_dict(state)` of each optimizer call the functions here, for all of them."""
    for optimizer in _as_tuple(optimizers):
        _replace_methods(
            optimizer,
            lambda: get_optimizer_state_dict(model, optimizers, options=options),
            lambda state_dict: set_optimizer_state_dict(model, optimizers, state_dict, options=options),
        )


def _replace_methods(obj: Any, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], Any]) -> None:
    for name, function in (("state_dict", state_dict), ("load_state_dict", load_state_dict)):
        setattr(function, PATCHED, True)
        setattr(obj, name, function)


def _as_tuple(optimizers: Optimizer | Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer], info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        with with_initial_state(optimizer):
            named = _named(model, optimizer, info)
        for name, tree in named.get(STATE, {}).items():
            if name in state:
                raise BadState(f"two of the optimizers have state for {name!r}", hint="read their states one by one")
            # New dicts, so that changes to the result do not change the optimizer.
            flat = isinstance(tree, dict) and not any(isinstance(value, dict) for value in tree.values())
            state[name] = dict(tree) if flat else map_leaves(tree, lambda _, value: value, _is_mapping)
        groups += named.get(PARAM_GROUPS, [])
    whole: dict[str, Any] = {STATE: state, PARAM_GROUPS: groups}
    made = flatten_optimizer_state(whole) if info.flatten_optimizer_state_dict else whole
    return modules.gathered_or_offloaded(made, info)


def _named(model: nn.Module, optimizer: Optimizer, info: StateDictInfo) -> dict[str, Any]:
    """Return an optimizer's state dict with canonical names in place of numbers, or of FSDP1's names."""
    packed = own_method(optimizer, "state_dict")()
    names: dict[Any, str]
    if info.fsdp_modules:
        with info.fsdp_context():
            packed = modules.fsdp1_optimizer_state(model, optimizer, packed, to_load=False)
        if not packed:
            return {}
        keys = {*packed[STATE], *(name for group in packed[PARAM_GROUPS] for name in group[PARAMS])}
        names = {key: canonical_key(model, key, fqn_modifiers=info.dsd_fqn_modifiers) for key in keys}
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
        names = {number: _names_of(parameter, info)[0] for number, parameter in enumerate(parameters)}
        if foreign := [key for key in packed[STATE] if key not in names]:
            raise MissingKey(
                f"{type(optimizer).__qualname__} keeps state under {foreign[0]!r}, which is none of its parameters",
                hint="save such state by itself",
            )
    groups = packed[PARAM_GROUPS]
    members = [[names[key] for key in group[PARAMS]] for group in groups]
    return _packed({names[key]: tree for key, tree in packed[STATE].items()}, groups, members)


def _packed(state: dict[Any, Any], groups: Sequence[Mapping[str, Any]], members: Sequence[list[Any]]) -> dict[str, Any]:
    """Return a state dict in the form of an optimizer's own, given what stands for the parameters of each group."""
    rows = [{**group, PARAMS: own} for group, own in zip(groups, members, strict=True)]
    return {STATE: state, PARAM_GROUPS: rows}


def _names_of(parameter: Any, info: StateDictInfo) -> tuple[str, ...]:
    if parameter not in info.param_names:
        raise MissingKey(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model",
            hint="pass the model that holds all parameters of the optimizer, as it is after wrapping",
        )
    return info.param_names[parameter]


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the nested form into the flat one: `state.<name>.<key>` and `param_groups.<name>.<key>` for each parameter."""
    flat: dict[str, Any] = {}
    for name, tree in state_dict[STATE].items():
        for path, value in leaves_of(tree, _is_mapping):
            key = path_name((STATE, name, *path))
            if not isinstance(value, _FLAT_LEAVES):
                raise UnsupportedValue(
                    f"{key!r} is a {type(value).__qualname__}, which the flat form of optimizer state does not hold",
                    hint="leave flatten_optimizer_state_dict out",
                )
            if key in flat:
                raise BadState(
                    f"two values of optimizer state are both {key!r} in the flat form",
                    hint="leave flatten_optimizer_state_dict out",
                )
            flat[key] = value
    for group in state_dict[PARAM_GROUPS]:
        for name in group[PARAMS]:
            flat.update({f"{PARAM_GROUPS}.{name}.{key}": value for key, value in group.items() if key != PARAMS})
    return flat


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


@dataclass(frozen=True)
class SavedOptimizers:
    """The saved state of one or several optimizers, by canonical names, whatever its form was."""

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """For each parameter that has state: its tree."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each parameter: the hyper-parameters of its group, one dict for all parameters of a group."""
    empty_groups: list[dict[str, Any]] = field(default_factory=list)
    was_flat: bool = False
    """Keys inside the state of a parameter were joined, so that 0 and "0" look the same."""


def _parse_nested(state_dict: Mapping[str, Any]) -> SavedOptimizers:
    if PARAM_GROUPS not in state_dict:
        raise MissingKey(
            f"the optimizer state dict has {STATE!r} and no {PARAM_GROUPS!r}",
            hint="pass all of what get_optimizer_state_dict returned",
        )
    result = SavedOptimizers(state=dict(state_dict[STATE]))
    for group in state_dict[PARAM_GROUPS]:
        if any(isinstance(name, int) for name in group[PARAMS]):
            raise BadState(
                "the optimizer state dict is by numbers, as Optimizer.state_dict() returns it",
                hint="pass what get_optimizer_state_dict returned: it is by name",
            )
        hyper = {key: value for key, value in group.items() if key not in LIVE_KEYS}
        if not group[PARAMS]:
            result.empty_groups.append(hyper)
        result.groups.update(dict.fromkeys(group[PARAMS], hyper))
    return result


def _parse_flat(state_dict: Mapping[str, Any], names: set[str]) -> SavedOptimizers:
    result = SavedOptimizers(was_flat=True)
    for key, value in state_dict.items():
        head, *parts = key.split(".")
        if head not in (STATE, PARAM_GROUPS):
            raise BadState(
                f"{key!r} is no key of an optimizer state dict: expected {STATE!r} and {PARAM_GROUPS!r}, or keys that "
                f"begin with one of them",
                hint="pass what get_optimizer_state_dict returned",
            )
        length = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in names), 0)
        if not length:
            continue  # a parameter that this rank does not have
        name, path = ".".join(parts[:length]), tuple(parts[length:])
        if head == STATE:
            _put(result.state.setdefault(name, {}), path, value)
        elif path[0] not in LIVE_KEYS:
            result.groups.setdefault(name, {})[".".join(path)] = value
    return result


def _put(tree: dict[Any, Any], path: TreePath, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise BadState(f"optimizer state has a value and a dict at {'.'.join(map(str, path))!r}")
    tree[path[-1]] = value


def _skeleton(saved: SavedOptimizers) -> SavedOptimizers:
    """Return the same with each tensor of at least one dimension on meta, and other tensors on the CPU."""

    def on_cpu(_: TreePath, value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def stand_in(path: TreePath, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return on_cpu(path, value)

    hyper = {id(group): map_leaves(group, on_cpu) for group in saved.groups.values()}  # still one dict for a group
    return replace(
        saved,
        state={name: map_leaves(tree, stand_in) for name, tree in saved.state.items()},
        groups={name: hyper[id(group)] for name, group in saved.groups.items()},
        empty_groups=[map_leaves(group, on_cpu) for group in saved.empty_groups],
    )


class _Entry(NamedTuple):
    parameter: torch.Tensor
    names: tuple[str, ...]
    """One name; several for a flat parameter of FSDP1, which holds several parameters."""


class _LoadPlan(NamedTuple):
    optimizer: Optimizer
    layout: StateLayout
    entries: list[list[_Entry]]
    groups: list[dict[str, Any]]


@torch.no_grad()
def load_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], state_dict: Mapping[str, Any], info: StateDictInfo
) -> None:
    if not info.handle_optim:
        return
    # FSDP1 broadcasts full state by itself if only one rank keeps it.
    from_first = info.broadcast_from_rank0 or bool(info.fsdp_modules and info.full_state_dict and info.cpu_offload)
    saved = SavedOptimizers()  # on ranks that do not read

    def skeleton() -> SavedOptimizers:
        nonlocal saved
        saved = _read(state_dict, info)
        return _skeleton(saved)

    if from_first and dist.is_initialized():
        known = modules.from_rank0(skeleton)
    else:
        known = saved = _read(state_dict, info)
    empty = sum(not group[PARAMS] for optimizer in optimizers for group in optimizer.param_groups)
    if empty and empty != len(known.empty_groups) and not known.was_flat:  # the flat form does not hold them
        raise BadValue(
            f"the optimizers have {empty} param groups without parameters, the state dict {len(known.empty_groups)}: they "
            f"cannot be matched",
            hint="leave such groups out",
        )
    # All plans are made, and checked, before the first optimizer is changed. Groups without parameters come in order.
    empty_groups = iter(known.empty_groups)
    plans = [_plan(optimizer, known, info, empty_groups) for optimizer in optimizers]
    for plan in plans:
        if info.fsdp_modules:
            _load_by_fsdp1(model, plan, saved, info)
        else:
            _load(plan, known, saved, info)


def _read(state_dict: Mapping[str, Any], info: StateDictInfo) -> SavedOptimizers:
    if STATE in state_dict:
        return _parse_nested(state_dict)
    return _parse_flat(state_dict, {name for found in info.param_names.values() for name in found})


def _plan(
    optimizer: Optimizer, known: SavedOptimizers, info: StateDictInfo, empty_groups: Iterator[dict[str, Any]]
) -> _LoadPlan:

    def entry(parameter: torch.Tensor) -> _Entry:
        names = _names_of(parameter, info)
        if not hasattr(parameter, "_fqns") and FLAT_PARAM not in names[0]:
            # A tied parameter is saved under one of its names.
            names = (next((name for name in names if name in known.groups or name in known.state), names[0]),)
        return _Entry(parameter, names)

    entries = [[entry(parameter) for parameter in group[PARAMS]] for group in optimizer.param_groups]
    layout = StateLayout(optimizer)
    if info.strict and known.state:
        _check_complete(optimizer, [entry for row in entries for entry in row], known, layout)
    groups = []
    for group, row in zip(optimizer.param_groups, entries, strict=True):
        hyper = _hyper_for_load(row, known, strict=info.strict) if row else next(empty_groups, {})
        live = {key: value for key, value in group.items() if key not in LIVE_KEYS}
        groups.append({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in live.items()})
        set_hyper_parameters(groups[-1:], [hyper])
    return _LoadPlan(optimizer, layout, entries, groups)


def _check_complete(
    optimizer: Optimizer, entries: Sequence[_Entry], saved: SavedOptimizers, layout: StateLayout
) -> None:
    trained = [entry for entry in entries if entry.parameter.requires_grad]
    found = any(name in saved.state for entry in trained for name in entry.names)
    for entry in trained:
        missing = [name for name in entry.names if name not in saved.state]
        if not missing or (optimizer.state and entry.parameter not in optimizer.state):
            continue
        if not found and not layout.of(entry.parameter):
            return  # an optimizer that keeps no state, beside others that do
        raise BadState(
            f"Missing optimizer state for parameter {some_of(list(map(repr, missing)), 1)}",
            hint="it requires gradients, and the state dict has no state for it (it was frozen, unused or not there "
            "when that was saved); StateDictOptions(strict=False) loads the state of the others",
            missing=missing,
        )


def _hyper_for_load(row: Sequence[_Entry], saved: SavedOptimizers, *, strict: bool) -> Mapping[str, Any]:
    """Return the hyper-parameters saved for a live group; if `strict`, for all its trained parameters the same ones."""
    # Groups are found by the names in them, so they may come in another order, or from several optimizers.
    trained = [name for entry in row if entry.parameter.requires_grad for name in entry.names]
    missing = [name for name in trained if name not in saved.groups]
    if strict and missing:
        raise BadState(
            f"the saved param groups do not hold {some_of(list(map(repr, missing)), 1)}",
            hint="StateDictOptions(strict=False) loads the others, and keeps the hyper-parameters of groups for which "
            "nothing was saved",
            missing=missing,
        )

    names = [name for entry in row for name in entry.names]
    hyper, conflict = common_hyper(names, saved.groups)
    if strict and conflict is not None:
        first, name, keys = conflict
        mine, other = (saved.groups[one].get(keys[0]) for one in (first, name))
        raise BadState(
            f"{first!r} and {name!r} are in one param group, but were saved with different {keys[0]!r}: "
            f"{mine!r} and {other!r}",
            hint="group the parameters as they were; StateDictOptions(strict=False) takes the first value for all",
        )
    return hyper


def _load(plan: _LoadPlan, known: SavedOptimizers, saved: SavedOptimizers, info: StateDictInfo) -> None:
    optimizer, layout = plan.optimizer, plan.layout
    flat = [entry for row in plan.entries for entry in row]  # positions are numbers in the optimizer's own state dict
    trees = {number: known.state[one.names[0]] for number, one in enumerate(flat) if one.names[0] in known.state}
    if info.full_state_dict:
        trees = _local_trees(trees, saved.state, flat, layout, info)
    if known.was_flat:
        trees = {number: _with_own_keys(tree, flat[number].parameter, layout) for number, tree in trees.items()}
    numbers = iter(range(len(flat)))
    packed = _packed(dict(trees), plan.groups, [[next(numbers) for _ in row] for row in plan.entries])
    own_method(optimizer, "load_state_dict")(state_dict=packed)
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for number, tree in trees.items():
            parameter = flat[number].parameter
            # Only the optimizer knows why state has a floating dtype other than the parameter's.
            tensors = [leaf for path, leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor) and path[-1] != STEP]
            unlike = any(leaf.is_floating_point() and leaf.dtype != parameter.dtype for leaf in tensors)
            template = layout.of(parameter) if unlike else layout.at_hand(parameter)
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _in_own_types(tree, loaded, template)


def _with_own_keys(tree: dict[Any, Any], parameter: torch.Tensor, layout: StateLayout) -> dict[Any, Any]:
    """Return state with the optimizer's keys: the flat form turned numbers into strings, and joined keys by dots."""
    nested = any(isinstance(value, Mapping) for value in tree.values())
    template = layout.of(parameter) if nested else layout.at_hand(parameter)
    if not template:
        return tree
    known = {path_name(path): path for path, _ in leaves_of(template, _is_mapping)}
    result: dict[Any, Any] = {key: {} for key, value in template.items() if isinstance(value, Mapping) and not value}
    for path, value in leaves_of(tree, _is_mapping):
        _put(result, known.get(path_name(path), path), value)
    return result


def _in_own_types(tree: dict[Any, Any], loaded: dict[Any, Any], template: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """Undo what `Optimizer.load_state_dict` does: it casts all tensors, even integers, and replaces strings."""

    def own(path: TreePath, value: Any) -> Any:
        given = get_element(tree, path)
        if isinstance(given, (str, bytes)):
            return given
        if not isinstance(given, torch.Tensor) or not isinstance(value, torch.Tensor) or path[-1] == STEP:
            return value
        like = get_element(template, path)
        if not isinstance(like, torch.Tensor):
            keep = given.is_floating_point() or given.is_complex() or given.dtype == value.dtype
            return value if keep else given.to(value.device)
        device = like.device if given.dim() == 0 else value.device
        if value.dtype == like.dtype and value.device == device:
            return value
        return given.to(device=device, dtype=like.dtype)

    result: dict[Any, Any] = map_leaves(loaded, own)
    return result


def _local_trees(
    trees: Mapping[int, Any], full: dict[str, Any], entries: Sequence[_Entry], layout: StateLayout, info: StateDictInfo
) -> dict[int, Any]:
    """
    Return state trees, by number, with each full tensor cut to this rank's part.

    Tensors that only rank 0 has are on meta; `full` is the state that this rank has, by name, which others may need.
    """

    def place(parameter: torch.Tensor, path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.shape:
            return leaf
        if not is_dtensor(parameter):
            return modules.TAKES_ANY
        like = _like(layout.at_hand(parameter), path)
        if like is None:
            like = parameter if leaf.shape == parameter.shape else _like(layout.of(parameter), path)
        # On meta: memory for this rank's part is made when it arrives, so that no memory in use is overwritten.
        return torch.empty_like(like, device="meta", requires_grad=False) if is_dtensor(like) else modules.TAKES_ANY

    names = {number: entries[number].names[0] for number in trees}
    local = {names[at]: map_leaves(tree, partial(place, entries[at].parameter)) for at, tree in trees.items()}
    put = broadcast_state_dict if info.broadcast_from_rank0 else distribute_state_dict
    device = modules.single_device({entry.names[0]: entry.parameter for entry in entries}) or torch.device("cpu")
    put(full, local, device=device)
    return {number: local[name] for number, name in names.items()}


def _like(template: Mapping[Any, Any] | None, path: TreePath) -> Any:
    """Return the value at a path, of which the flat form may have turned numbers into strings."""
    return {path_name(own): value for own, value in leaves_of(template or {})}.get(path_name(path))


def _load_by_fsdp1(model: nn.Module, plan: _LoadPlan, saved: SavedOptimizers, info: StateDictInfo) -> None:
    """Load into an optimizer that holds flat parameters, or parts of them, for which only FSDP1 can shard state."""

    def key(name: str) -> str:
        return state_dict_key(model, name, fqn_modifiers=info.dsd_fqn_modifiers)

    named = [[name for entry in row for name in entry.names] for row in plan.entries]
    state = {key(name): dict(saved.state[name]) for row in named for name in row if name in saved.state}
    packed = _packed(state, plan.groups, [[key(name) for name in row] for row in named])
    with info.fsdp_context():
        converted = modules.fsdp1_optimizer_state(model, plan.optimizer, packed, to_load=True)
    own_method(plan.optimizer, "load_state_dict")(state_dict=converted)
