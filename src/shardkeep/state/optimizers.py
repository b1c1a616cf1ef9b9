"""
Optimizer state by parameter name: the core below objects in a state and below torch's get and set functions.

The state of an optimizer that has made no step yet is what a step with zero gradients and a learning rate of zero makes.
A stand-in makes that step on copies of the parameters, so the optimizer itself does not change: not its parameters (a
step at rate zero turns -0.0 into 0.0), gradients, counters, hooks or schedulers, nor the random number generators.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import contains
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizers

from shardkeep.errors import BadState, StateError, StateMismatch
from shardkeep.format.values import KeyPath, part_name
from shardkeep.state.flatten import is_per_rank_name
from shardkeep.state.leaves import with_attributes_of
from shardkeep.state.modules import PARAM_GROUPS, PARAMS
from shardkeep.state.names import FQN_MODIFIERS, ModuleTree, live_state, parameter_names
from shardkeep.state.stored import UNFILLED, Selected, StoredLeaf, StoredState, allocate_leaf, build_containers

LR = "lr"
LIVE_KEYS = frozenset({PARAMS, "param_names"})
"""Keys of a group that describe the live optimizer and are never loaded."""
MACHINE_KEYS = LIVE_KEYS | {"foreach", "fused", "capturable"}
"""Keys of a group that `sk.load` does not load: they say how a step runs on this machine, not what it computes."""
_NOT_COPIED = {"state", "param_groups", "step"}
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class ParameterNames(NamedTuple):
    first: str
    forms: tuple[tuple[str, ...], ...]
    """
    Its names as a part of the state, those in its modules, and those with which the optimizer was built. The more specific
    form comes first; a checkpoint uses one form for all parameters.
    """


def name_parameters(
    name: str, optimizer: Optimizer, modules: Mapping[str, ModuleTree], rank: int
) -> dict[Any, ParameterNames]:
    """Name every parameter of the optimizer called `name` by the modules in the same state."""
    tables = {own: parameter_names(live_state(tree)) for own, tree in modules.items()}
    named = (zip(group[PARAMS], group.get("param_names", ()), strict=False) for group in optimizer.param_groups)
    given = {parameter: str(own) for pairs in named for parameter, own in pairs}
    per_rank = set() if is_per_rank_name(name, rank) else {own for own in modules if is_per_rank_name(own, rank)}
    names: dict[Any, ParameterNames] = {}
    seen: set[str] = set()
    for parameter in [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]:
        homes = [(own, found) for own, table in tables.items() if (found := table.get(parameter))]
        if per_rank and not per_rank.isdisjoint([home for home, _ in homes]):
            raise StateError(
                f"{name!r} optimizes parameters of {homes[0][0]!r}, which is inside a PerRank, and is not itself",
                hint="put the optimizer into a PerRank too",
                key=name,
            )
        if not homes and parameter not in given:
            raise StateError(
                f"{name!r} optimizes a parameter of shape {tuple(parameter.shape)} that no module in the state has, so it"
                " has no name to be saved under",
                hint="put the module into the same state, or build the optimizer from named_parameters()",
                key=name,
            )
        in_state = tuple(f"{home}.{one}" for home, found in homes for one in found)
        in_modules = tuple(dict.fromkeys(one for _, found in homes for one in found))
        as_given = (given[parameter],) if parameter in given else ()
        first = (*(in_state if len(modules) > 1 else in_modules), *as_given)[0]
        if first in seen:
            raise StateError(f"{name!r} optimizes two parameters that are both called {first!r}", key=name)
        seen.add(first)
        names[parameter] = ParameterNames(first, (in_state, in_modules, as_given))
    return names


KeptNames = WeakKeyDictionary[Optimizer, tuple[Any, dict[Any, ParameterNames], dict[int, str]]]
"""The names of the last save of each optimizer, and all that they follow from."""


def kept_names(
    kept: KeptNames, name: str, optimizer: Optimizer, modules: Mapping[str, ModuleTree], rank: int
) -> tuple[dict[Any, ParameterNames], dict[int, str]]:
    """Return what `name_parameters` does, and the first names by id: those of the last save, if the places are the same."""
    places = _places(name, optimizer, modules, rank)
    known, names, firsts = kept.get(optimizer, (None, {}, {}))
    if known is None or known != places:
        names = name_parameters(name, optimizer, modules, rank)
        firsts = {id(parameter): found.first for parameter, found in names.items()}
        kept[optimizer] = places, names, firsts  # keeps the parameters: no other one gets the id of one of them
    return names, firsts


def _places(name: str, optimizer: Optimizer, modules: Mapping[str, ModuleTree], rank: int) -> Any:
    """Return all that the names of the optimizer's parameters follow from; None if a module chooses names for what it hides."""
    groups = [([*map(id, group[PARAMS])], [*group.get("param_names", ())]) for group in optimizer.param_groups]
    places: list[Any] = [name, rank, groups]
    for own, tree in modules.items():
        kinds = [type(part) for _, part in tree.named]
        if any(hasattr(kind, FQN_MODIFIERS) for kind in {*kinds}):
            return None
        if any(map(contains, map(vars, tree.modules), repeat(FQN_MODIFIERS))):
            return None
        held = [part._parameters for _, part in tree.named]
        places += (
            own,
            [prefix for prefix, _ in tree.named],
            kinds,
            list(map(len, held)),
            list(chain.from_iterable(held)),
        )
        places.append(list(map(id, chain.from_iterable([parameters.values() for parameters in held]))))
    return places


# Groups are saved under their first parameter and found by any of their parameters. Positions in a list would not do:
# ranks of a pipeline have different groups, and a script may cut its groups in another way.


def groups_by_first(groups: Iterable[tuple[list[str], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return groups, each given with the names of its parameters, in the form in which they are saved."""
    saved = {}
    for names, group in groups:
        if names:
            hyper = {key: value for key, value in group.items() if key not in LIVE_KEYS}
            saved[names[0]] = hyper | {PARAMS: names}
    return saved


def common_hyper(
    names: Iterable[str], groups: Mapping[str, Mapping[str, Any]]
) -> tuple[Mapping[str, Any], tuple[str, str, list[str]] | None]:
    """Return the hyper-parameters saved for the first of some parameters; and two that differ, with the keys, if any."""
    # `groups` has them by parameter, one mapping for all parameters of a saved group.
    known = [(name, groups[name]) for name in names if name in groups]
    if not known:
        return {}, None
    first, mine = known[0]
    for name, hyper in known:
        if hyper is not mine:
            keys = sorted(key for key in mine.keys() | hyper.keys() if not _equal(mine.get(key), hyper.get(key)))
            if keys:
                return mine, (first, name, keys)
    return mine, None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if one is None or other is None:
            return False
        return bool(torch.as_tensor(one).cpu().equal(torch.as_tensor(other).cpu()))
    return bool(one == other)


def set_hyper_parameters(groups: Sequence[dict[str, Any]], values: Iterable[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups their hyper-parameters; a tensor keeps its memory, unless groups share it."""
    for group, hyper in zip(groups, values, strict=True):
        for key, value in hyper.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
                if sum(other.get(key) is present for other in groups) > 1:
                    group[key] = present = present.clone()
                present.copy_(torch.as_tensor(value))
            else:  # several live groups may come from one saved group, so each gets a copy
                group[key] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class StoredGroups:
    """The parameter groups of an optimizer in a checkpoint, by the names that the load's `rename` gives them."""

    def __init__(self, name: str, stored: StoredState, selected: Selected) -> None:
        self._name = name
        self._leaves: dict[str, tuple[Any, KeyPath, StoredLeaf]] = {}
        """By the name behind the prefix: the group, the path inside it, and the leaf."""
        self._group_of: dict[str, Any] = {}
        self._former: dict[str, str] = {}  # parameter -> the name under which its state is in the checkpoint
        raw: dict[Any, dict[str, bytes]] = {}
        prefix = f"{name}.{PARAM_GROUPS}."
        for leaf in stored.below(f"{name}.{PARAM_GROUPS}"):
            parts = [part for _, part in leaf.path]
            if PARAM_GROUPS not in parts[:-2]:
                continue
            at = parts.index(PARAM_GROUPS)
            group, path = parts[at + 1], leaf.path[at + 2 :]
            self._leaves[leaf.name[len(prefix) :]] = (group, path, leaf)
            key = str(path[0][1])
            if key == PARAMS:
                former = ".".join(part_name(kind, part) for kind, part in leaf.path[:at])
                for one in stored.value(leaf):
                    # The name of the parameter after the load has renamed its optimizer state.
                    renamed = stored.renamed(f"{former}.state.{one}.step") or ""
                    inside = renamed.startswith(f"{name}.state.") and renamed.endswith(".step")
                    new = renamed[len(f"{name}.state.") : -len(".step")] if inside else one
                    self._group_of[new] = group
                    self._former[new] = f"{former}.state.{one}"
            elif key not in MACHINE_KEYS and not leaf.is_tensor and not leaf.empty and selected(leaf.name):
                value = stored.index.value_data.raw(leaf.row)  # compared as it is stored
                raw.setdefault(group, {})[".".join(str(part) for _, part in path)] = value
        self._raw = {parameter: raw.get(group, {}) for parameter, group in self._group_of.items()}

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._group_of

    def places(self, stored: StoredState) -> dict[str, Any]:
        """Return a template of all of it, flat: `rename` may change names in the middle of keys."""
        return {rest: allocate_leaf(stored, leaf) for rest, (_, _, leaf) in self._leaves.items() if not leaf.empty}

    def had_state(self, parameter: str, stored: StoredState) -> bool:
        """Return True if state was saved for a parameter, also if the load drops it."""
        return stored.was(self._former[parameter])

    def check(self, names: Iterable[str], hyper: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Refuse to give one live group the hyper-parameters of several saved ones, if they differ."""
        conflict = common_hyper(names, self._raw if hyper is None else hyper)[1]
        if conflict is not None:
            one, other, keys = conflict
            raise StateMismatch(
                f"{self._name!r}: {one!r} and {other!r} are in one parameter group here, and were saved in two with"
                f" different {', '.join(keys)}",
                hint=f"build the optimizer with the groups it was saved with, or exclude '{self._name}.{PARAM_GROUPS}' and"
                " set hyper-parameters yourself",
                key=self._name,
            )

    def hyper_parameters(self, members: Sequence[Sequence[str]], filled: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        items: dict[Any, list[tuple[KeyPath, Any]]] = {}
        for rest, (group, path, _) in self._leaves.items():
            if filled.get(rest, UNFILLED) is not UNFILLED:
                items.setdefault(group, []).append((path, filled[rest]))
        hyper: dict[Any, dict[str, Any]] = {group: {} for group in self._group_of.values()}
        for group, found in items.items():
            hyper[group] = {key: value for key, value in build_containers(found).items() if key not in MACHINE_KEYS}
        tensors = {
            group: {key: value for key, value in each.items() if isinstance(value, torch.Tensor)}
            for group, each in hyper.items()
        }
        tensors_of = {parameter: tensors[group] for parameter, group in self._group_of.items()}
        for names in members:  # all but tensors, whose values are known only now, have been compared as they are stored
            self.check(names, tensors_of)
        by_parameter = {parameter: hyper[group] for parameter, group in self._group_of.items()}
        return [common_hyper(names, by_parameter)[0] for names in members]


class StateLayout:
    """The state that an optimizer has, or that its first step would make; to learn kinds, dtypes and placements from."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._live: dict[Any, Any] = dict(optimizer.state)  # loading replaces the optimizer's own
        self._made: dict[torch.Tensor, Any] | None = None

    def at_hand(self, parameter: torch.Tensor) -> Mapping[Any, Any] | None:
        """Return the state of a parameter if it exists already; never makes a step."""
        return self._live.get(parameter) or (self._made or {}).get(parameter)

    def of(self, parameter: torch.Tensor) -> Mapping[Any, Any] | None:
        if self._live:
            return self._live.get(parameter)
        if self._made is None:
            try:
                self._made, _ = dry_step(self._optimizer)
            except BadState:
                self._made = {}
        return self._made.get(parameter)


def is_fresh(optimizer: Optimizer) -> bool:
    """Return True if an optimizer has no state and no gradients: with gradients, training is under way without state."""
    return not optimizer.state and all(p.grad is None for group in optimizer.param_groups for p in group[PARAMS])


def init_optim_state(optim: Optimizer) -> None:
    """Give a fresh optimizer the state of a step with zero gradients, and change nothing else."""
    if is_fresh(optim):
        state, groups = dry_step(optim)
        optim.state.update(state)
        for group, new in zip(optim.param_groups, groups, strict=True):
            group.update(new)


@contextmanager
def with_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Give a fresh optimizer initial state while this context is entered; it is fresh again afterwards."""
    if not is_fresh(optimizer):
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    init_optim_state(optimizer)
    try:
        yield
    finally:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def dry_step(optimizer: Optimizer) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]]]:
    """Return the state and the param groups an optimizer would have after a step with zero gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    copies = {id(parameter): _copy_of(parameter) for parameter in parameters}
    stand_in = _stand_in_for(optimizer, copies)
    try:
        with _generators_kept(parameters), _without_global_hooks(), torch.no_grad():
            # The class's own step, without the wrapper that runs hooks and profiling.
            step: Any = type(stand_in).step
            (getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step)(stand_in)
    except Exception as exc:
        raise BadState(
            f"{type(optimizer).__qualname__} has no state yet, and a step with zero gradients, which makes it, "
            f"failed: {type(exc).__name__}: {exc}",
            hint="call this after the first step of training",
        ) from exc
    made = ((parameter, stand_in.state.get(copies[id(parameter)])) for parameter in parameters)
    state = {parameter: kept for parameter, kept in made if kept is not None}
    for group, real in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        group[PARAMS] = real[PARAMS]
        if LR in real:
            group[LR] = real[LR]
    return state, stand_in.param_groups


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    # With its attributes, because some optimizers read those that users set on parameters.
    copied = with_attributes_of(parameter, parameter.detach().clone())
    if parameter.requires_grad:
        copied.grad = torch.zeros_like(parameter)
    return copied


def _stand_in_for(optimizer: Optimizer, copies: dict[int, torch.Tensor]) -> Optimizer:
    """Make an optimizer of the same class that holds the copies and shares nothing that a step changes."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in _NOT_COPIED:
            stand_in.__dict__[name] = OrderedDict() if name.endswith("_hooks") else _copied(value, copies)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = _copied(optimizer.param_groups, copies)
    for group in stand_in.param_groups:
        if LR in group:
            rate = group[LR]
            group[LR] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return stand_in


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Copy tensors, containers and inner optimizers, with copies of parameters in their place; share other objects."""
    if isinstance(value, torch.Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().clone()
    if isinstance(value, Optimizer):
        return _stand_in_for(value, copies)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copied(one, copies) for key, one in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copied(one, copies) for one in value)
    return value


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Remove the hooks that run at every optimizer's step, because a subclass's step may call one that runs them."""
    found = [getattr(torch_optimizers, name, None) for name in _GLOBAL_HOOKS]
    hooks = [(table, dict(table)) for table in found if table]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, before in hooks:
            table.update(before)


@contextmanager
def _generators_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what scripts use
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else "cuda"
    numbers = {parameter.device.index for parameter in parameters if parameter.device.type == kind}
    devices = [torch.accelerator.current_device_index() if number is None else number for number in numbers]
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
