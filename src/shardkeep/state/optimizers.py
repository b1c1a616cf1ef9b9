"""
Optimizer state dicts as they are passed around: nested, flat, or as the optimizer itself gives them.

Whatever the form, `read_saved` gives one picture of it: the state of each parameter and the hyper-parameters of each
parameter, by canonical name. Pure functions of dicts; state dicts passed in are never changed.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizers

from shardkeep.errors import BadOptions, BadState, MissingKey, StateError, StateMismatch, UnsupportedValue
from shardkeep.format.tree import part_name
from shardkeep.state.collectives import broadcast_state_dict, distribute_state_dict
from shardkeep.state.flatten import is_per_rank_name
from shardkeep.state.leaves import is_dtensor
from shardkeep.state.modules import PARAM_GROUPS, PARAMS, STATE, StateDictInfo
from shardkeep.state.names import parameter_names
from shardkeep.state.stored import (
    UNFILLED,
    PathStep,
    Selected,
    StoredLeaf,
    StoredState,
    allocate_leaf,
    build_containers,
)

TreePath = tuple[Any, ...]
_FLAT_LEAVES = (torch.Tensor, int, float, str, bytes, list, tuple, type(None))


@dataclass(frozen=True)
class RemoteTensor:
    """Stands for a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class SavedOptimizers:
    """The state of one or several optimizers."""

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """For each parameter that has state: the tree of it."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each parameter: the hyper-parameters of its group, one dict for all in the group."""
    empty_groups: list[dict[str, Any]] = field(default_factory=list)
    """Hyper-parameters of groups that hold no parameter."""
    was_flat: bool = False
    """Keys of dicts inside the state of a parameter were joined, so that 0 and "0" look the same."""


def parse_optimizer_state(
    state_dict: Mapping[str, Any], names: Collection[str], in_order: Sequence[str]
) -> SavedOptimizers:
    """
    Understand an optimizer state dict in any of its forms.

    Args:
        state_dict: Nested by canonical names, flat, or by numbers as `Optimizer.state_dict()` gives it.
        names: All canonical names of the model's parameters.
        in_order: The names of the optimizers' parameters in the order of their groups: what the numbers mean.

    Raises:
        BadState: (RuntimeError) it has none of these forms.

    """
    if STATE in state_dict:
        return _read_nested(state_dict, in_order)
    return _read_flat(state_dict, names)


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """
    Turn the nested form into the flat one: `state.<name>.<key>` and `param_groups.<name>.<key>`.

    Each parameter has the hyper-parameters of its group by itself, so that parts of a model that are on different
    ranks (pipeline stages) have keys of their own.

    Raises:
        UnsupportedValue: (NotImplementedError) state that is no tensor, number, string, list or dict.

    """
    flat: dict[str, Any] = {}
    for name, tree in state_dict[STATE].items():
        for path, value in dict_leaves(tree):
            key = ".".join([STATE, name, *map(str, path)])
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


def dict_leaves(tree: Mapping[Any, Any], path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Go through all values of nested dicts, with the keys that lead to each."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from dict_leaves(value, (*path, key))
        else:
            yield (*path, key), value


def tensor_leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Go through all tensors, and stand-ins for tensors, of nested dicts, lists and tuples."""
    if isinstance(tree, (torch.Tensor, RemoteTensor)):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensor_leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensor_leaves(value, (*path, number))


def map_tree(tree: Any, change: Callable[[TreePath, Any], Any], path: TreePath = ()) -> Any:
    """Return the same nesting of dicts, lists and tuples with each value in it changed."""
    if isinstance(tree, Mapping):
        return {key: map_tree(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [map_tree(value, change, (*path, number)) for number, value in enumerate(tree)]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return change(path, tree)


def value_at(tree: Any, path: TreePath) -> Any:
    """Return what is at the end of a path, or None."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def with_keys_of(tree: Mapping[str, Any], template: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give state that was flat the keys it had: numbers, and strings with dots, are known from a template only."""
    known = {".".join(map(str, path)): path for path, _ in dict_leaves(template)}
    result: dict[Any, Any] = {key: {} for key, value in template.items() if isinstance(value, Mapping) and not value}
    for path, value in dict_leaves(tree):
        _put(result, known.get(".".join(path), path), value)
    return result


def skeleton(saved: SavedOptimizers) -> SavedOptimizers:
    """Return the same with a stand-in for each tensor that is more than one number, and all else on the CPU."""

    def stand_in(_: TreePath, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return RemoteTensor(tuple(value.shape), value.dtype)
        return on_cpu(_, value)

    def on_cpu(_: TreePath, value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    hyper = {id(group): map_tree(group, on_cpu) for group in saved.groups.values()}  # one dict for a group, as before
    return replace(
        saved,
        state={name: map_tree(tree, stand_in) for name, tree in saved.state.items()},
        groups={name: hyper[id(group)] for name, group in saved.groups.items()},
        empty_groups=[map_tree(group, on_cpu) for group in saved.empty_groups],
    )


def _read_nested(state_dict: Mapping[str, Any], in_order: Sequence[str]) -> SavedOptimizers:
    groups = state_dict.get(PARAM_GROUPS)
    if groups is None:
        raise MissingKey(
            f"the optimizer state dict has {STATE!r} and no {PARAM_GROUPS!r}",
            hint="pass all of what get_optimizer_state_dict returned",
        )
    state = state_dict[STATE]
    given = [name for group in groups for name in group[PARAMS]]
    renamed: dict[Any, str] = {}
    if any(isinstance(name, int) for name in (*state, *given)):
        if len(given) != len(in_order):
            raise BadState(
                f"the optimizer state dict is by numbers and has {len(given)} parameters, the optimizer {len(in_order)}",
                hint="pass what get_optimizer_state_dict returned: it is by name",
            )
        renamed = dict(zip(given, in_order, strict=True))
    result = SavedOptimizers(state={renamed.get(name, name): tree for name, tree in state.items()})
    for group in groups:
        hyper = {key: value for key, value in group.items() if key != PARAMS}
        if not group[PARAMS]:
            result.empty_groups.append(hyper)
        result.groups.update(dict.fromkeys((renamed.get(name, name) for name in group[PARAMS]), hyper))
    return result


def _read_flat(state_dict: Mapping[str, Any], names: Collection[str]) -> SavedOptimizers:
    result = SavedOptimizers(was_flat=True)
    known = set(names)
    for key, value in state_dict.items():
        head, *parts = key.split(".")
        if head not in (STATE, PARAM_GROUPS):
            raise BadState(
                f"{key!r} is no key of an optimizer state dict: expected {STATE!r} and {PARAM_GROUPS!r}, or keys that "
                f"begin with one of them",
                hint="pass what get_optimizer_state_dict returned",
            )
        length = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in known), 0)
        if not length:
            continue  # of a parameter that this rank has not
        name, path = ".".join(parts[:length]), tuple(parts[length:])
        if head == STATE:
            _put(result.state.setdefault(name, {}), path, value)
        else:
            result.groups.setdefault(name, {})[".".join(path)] = value
    return result


def _put(tree: dict[Any, Any], path: TreePath, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise BadState(f"optimizer state has a value and a dict at {'.'.join(map(str, path))!r}")
    tree[path[-1]] = value


# State for an optimizer that has made no step yet: what a step with zero gradients and a learning rate of zero makes.
#
# The step is made by a stand-in on copies of the parameters, so that nothing of the real thing is touched: parameters
# (a step at rate zero turns -0.0 into 0.0), gradients, learning rates, counters, step hooks, schedulers that watch
# for
# steps, and the random number generators.

LR = "lr"
_SET_APART = {"state", "param_groups", "step"}
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def is_fresh(optimizer: Optimizer) -> bool:
    """
    Say whether an optimizer has no state yet and can be given some by a step with zero gradients.

    Gradients that are there mean that training is under way, with an optimizer that keeps no state.
    """
    return not optimizer.state and all(
        parameter.grad is None for group in optimizer.param_groups for parameter in group[PARAMS]
    )


def init_optim_state(optim: Optimizer) -> None:
    """
    Give a fresh optimizer the state of a step with zero gradients; leave one that is not fresh as it is.

    Parameters, gradients, learning rates and random number generators stay as they are, and no step hook runs.

    Raises:
        BadState: (RuntimeError) the optimizer cannot make such a step.

    """
    if is_fresh(optim):
        _install(optim, *dry_step(optim))


@contextmanager
def with_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Give a fresh optimizer initial state for as long as this is entered; it leaves as fresh as it came."""
    if not is_fresh(optimizer):
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    _install(optimizer, *dry_step(optimizer))
    try:
        yield
    finally:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def dry_step(optimizer: Optimizer) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]]]:
    """
    Return the state and the param groups an optimizer would have after a step with zero gradients.

    The optimizer is not changed. Needs memory for a copy of the parameters and for their gradients, for a while.

    Raises:
        BadState: (RuntimeError) its step fails.

    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    copies = {id(parameter): _copy_of(parameter) for parameter in parameters}
    stand_in = _stand_in_for(optimizer, copies)
    try:
        with _generators_kept(parameters), _hooks_away():
            _plain_step(stand_in)
    except Exception as exc:
        raise BadState(
            f"{type(optimizer).__qualname__} has no state yet, and a step with zero gradients, which makes it, "
            f"failed: {type(exc).__name__}: {exc}",
            hint="call this after the first step of training",
        ) from exc
    state = {
        parameter: stand_in.state[copies[id(parameter)]]
        for parameter in parameters
        if copies[id(parameter)] in stand_in.state
    }
    for group, real in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        group[PARAMS] = real[PARAMS]
        if LR in real:
            group[LR] = real[LR]
    return state, stand_in.param_groups


def _install(optimizer: Optimizer, state: dict[torch.Tensor, Any], groups: list[dict[str, Any]]) -> None:
    optimizer.state.update(state)
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group.update(new)


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    copied = parameter.detach().clone()
    if isinstance(parameter, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=parameter.requires_grad)
    # Marks that users put on parameters tell some optimizers what to do; what makes a tensor is its own already.
    copied.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(copied)})
    copied.requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        copied.grad = torch.zeros_like(parameter)
    return copied


def _stand_in_for(optimizer: Optimizer, copies: dict[int, torch.Tensor]) -> Optimizer:
    """Make an optimizer of the same class that holds the copies; what it changes, it changes in itself alone."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in _SET_APART:
            stand_in.__dict__[name] = OrderedDict() if name.endswith("_hooks") else _copied(value, copies)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = _copied(optimizer.param_groups, copies)
    for group in stand_in.param_groups:
        if LR in group:
            rate = group[LR]
            group[LR] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return stand_in


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Copy tensors and containers, with copies of parameters in their place; other objects stay the same ones."""
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


def _plain_step(optimizer: Optimizer) -> None:
    """Call the class's own step, without the wrapping that runs hooks and profiling."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    with torch.no_grad():
        step(optimizer)


@contextmanager
def _hooks_away() -> Iterator[None]:
    """Take away the hooks that run at the step of every optimizer: a subclass's step may call one that runs them."""
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
    """Put all random number generators back to where they were."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else "cuda"
    numbers = {parameter.device.index for parameter in parameters if parameter.device.type == kind}
    devices = [torch.accelerator.current_device_index() if number is None else number for number in numbers]
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


# What an optimizer's state looks like: the state it has, or else the state its first step would make.


class Templates:
    """State of one optimizer to compare with; none is made before it is asked for."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Loading replaces the optimizer's state; what it had before is the template.
        self._live: dict[Any, Any] = dict(optimizer.state)
        self._made: dict[torch.Tensor, Any] | None = None

    def at_hand(self, parameter: torch.Tensor) -> Mapping[Any, Any] | None:
        """Return the state a parameter has; None where it has none and none was made for it."""
        return self._live.get(parameter) or (self._made or {}).get(parameter)

    def of(self, parameter: torch.Tensor) -> Mapping[Any, Any] | None:
        """Return the state a parameter has, or would have; None where that cannot be found out."""
        if self._live:
            return self._live.get(parameter)
        if self._made is None:
            try:
                self._made, _ = dry_step(self._optimizer)
            except BadState:
                self._made = {}
        return self._made.get(parameter)


# Hyper-parameters: each group of a live optimizer gets those that its parameters were saved with.
#
# Groups are found by the names in them, so they may come in another order, or from several optimizers.

_OF_THE_LIVE_GROUP = (PARAMS, "param_names")


def group_for_load(
    group: Mapping[str, Any], names: Sequence[str], saved: SavedOptimizers, optimizer: Optimizer, *, strict: bool
) -> dict[str, Any]:
    """
    Return the hyper-parameters a live group is to have: those saved, and its own where nothing was saved.

    Args:
        group: The live group.
        names: The names its parameters were saved under.
        saved: What was saved.
        optimizer: The optimizer of the group.
        strict: Every parameter of the group that is trained must have been saved, with the same values.

    Raises:
        BadState: (RuntimeError) a parameter has no hyper-parameters, or two of one group have different ones.
        BadOptions: (ValueError) a group without parameters cannot be told from others.

    """
    live = {key: value for key, value in group.items() if key not in _OF_THE_LIVE_GROUP}
    if not group[PARAMS]:
        return live | _fitted(_empty_group(group, saved, optimizer), live)
    found = [(name, saved.groups[name]) for name in names if name in saved.groups]
    missing = [name for name in names if name not in saved.groups]
    if strict and _some_trained(group, names, missing):
        raise BadState(
            f"the saved param groups do not hold {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="StateDictOptions(strict=False) loads the others, and leaves the hyper-parameters of groups it finds "
            "nothing for",
            missing=missing,
        )
    if not found:
        return live
    first, hyper = found[0]
    for name, other in found[1:]:
        if strict and other is not hyper:
            _check_same(first, hyper, name, other)
    return live | _fitted(hyper, live)


def _some_trained(group: Mapping[str, Any], names: Sequence[str], missing: Sequence[str]) -> bool:
    parameters = group[PARAMS]
    if len(parameters) != len(names):  # flat parameters hold several
        return bool(missing)
    return any(p.requires_grad for p, name in zip(parameters, names, strict=True) if name in missing)


def _empty_group(group: Mapping[str, Any], saved: SavedOptimizers, optimizer: Optimizer) -> dict[str, Any]:
    alike = [one for one in optimizer.param_groups if not one[PARAMS]]
    if not saved.empty_groups and saved.was_flat:
        return {}  # the flat form has nothing to say of groups without parameters
    if len(alike) != len(saved.empty_groups):
        raise BadOptions(
            f"the optimizer has {len(alike)} param groups without parameters, the state dict {len(saved.empty_groups)}: "
            f"there is no telling which belongs to which",
            hint="leave such groups out, or load each optimizer from a state dict of its own",
        )
    return saved.empty_groups[next(number for number, one in enumerate(alike) if one is group)]


def _check_same(first: str, hyper: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> None:
    for key in hyper.keys() | other.keys():
        if key not in _OF_THE_LIVE_GROUP and not _equal_values(hyper.get(key), other.get(key)):
            raise BadState(
                f"{first!r} and {name!r} are in one param group, but were saved with different {key!r}: "
                f"{hyper.get(key)!r} and {other.get(key)!r}",
                hint="group the parameters as they were; StateDictOptions(strict=False) takes the first value for all",
            )


def _equal_values(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            bool(torch.as_tensor(one).cpu().equal(torch.as_tensor(other).cpu())) if None not in (one, other) else False
        )
    return bool(one == other)


def _fitted(hyper: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values in the form the live group has: a rate that is a tensor stays one, where it is."""
    result = {}
    for key, value in hyper.items():
        if key in _OF_THE_LIVE_GROUP:
            continue
        held = live.get(key)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.detach().to(held.device)  # noqa: PLW2901 - goes into the result
        elif isinstance(held, torch.Tensor) and isinstance(value, (int, float)):
            value = torch.full_like(held, value)  # noqa: PLW2901 - goes into the result
        result[key] = value
    return result


# Whole tensors of optimizer state, cut to the part each rank keeps.

_WHOLE = object()
"""Stands for a place that takes a tensor as it is."""


def shard_full_state(
    trees: Mapping[int, Any],
    whole: Mapping[str, Any],
    parameters: Sequence[tuple[torch.Tensor, str]],
    templates: Templates,
    info: StateDictInfo,
) -> dict[int, Any]:
    """
    Return state trees with each whole tensor cut to this rank's part of it.

    State of the parameter's own shape is laid out as the parameter is; other state as the optimizer does it.

    Args:
        trees: By number of the parameter, with stand-ins for tensors that only rank 0 has.
        whole: By name, the state of these and any other parameters, where this rank has it: others may want it.
        parameters: Each parameter and its name.
        templates: What the optimizer's state looks like.
        info: The options.

    """
    places = {(number, path): leaf for number, tree in trees.items() for path, leaf in tensor_leaves(tree)}
    spread = {place: leaf for place, leaf in places.items() if len(leaf.shape) > 0}
    labels = {place: _label(parameters[place[0]][1], place[1]) for place in spread}
    local: dict[str, Any] = {}
    for (number, path), leaf in spread.items():
        local[labels[number, path]] = _destination(parameters[number][0], path, tuple(leaf.shape), templates)
    full = {_label(name, path): leaf for name, tree in whole.items() for path, leaf in tensor_leaves(tree)}
    device = _device(parameters)
    if info.broadcast_from_rank0:
        broadcast_state_dict(full, local, device=device)
    else:
        distribute_state_dict(full, local, device=device)

    def arrived(number: int, tree: Any) -> Any:
        def leaf(path: TreePath, value: Any) -> Any:
            return local[labels[number, path]] if (number, path) in labels else value

        return map_tree(tree, leaf)

    return {number: arrived(number, tree) for number, tree in trees.items()}


def _label(name: str, path: TreePath) -> str:
    return ".".join([STATE, name, *map(str, path)])


def _destination(parameter: torch.Tensor, path: TreePath, shape: tuple[int, ...], templates: Templates) -> Any:
    if not is_dtensor(parameter):
        return _WHOLE
    like = value_at(templates.at_hand(parameter), path)
    if like is None and shape == tuple(parameter.shape):
        like = parameter
    if like is None:
        like = value_at(templates.of(parameter), path)
    # On meta: memory for this rank's part is made when it arrives, and nothing that is in use is written to.
    return torch.empty_like(like, device="meta", requires_grad=False) if is_dtensor(like) else _WHOLE


def _device(parameters: Sequence[tuple[torch.Tensor, str]]) -> torch.device:
    devices = {parameter.device: name for parameter, name in parameters}
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise BadOptions(
            f"the optimizer's parameters are on several devices: {found}",
            hint="whole state can be spread over parameters on one device; load state that is sharded instead",
        )
    return next(iter(devices), torch.device("cpu"))


# Parameter groups of optimizers: stored under their first parameter, found again by any of their parameters.
#
# Positions in a list would not do: ranks of a pipeline have different groups, and a script may cut them anew.

MACHINE_KEYS = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""What a group holds and a checkpoint does not decide: how a step is carried out here, not what it does."""
_PART = "param_groups"


def groups_by_first(groups: Iterable[tuple[list[str], Mapping[str, Any]]]) -> dict[str, Any]:
    """Put groups, each with the names of its parameters, into the form in which they are saved."""
    saved = {}
    for names, group in groups:
        if names:
            hyper = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            saved[names[0]] = hyper | {"params": names}
    return saved


class SavedGroups:
    """
    The parameter groups that were saved.

    Which parameters were in which group is read from the index at once, whatever is selected; names of parameters are
    those that the load gives them. Groups in a list, as a state dict by names has them, are understood too.
    """

    def __init__(self, name: str, stored: StoredState, selected: Selected) -> None:
        self._name = name
        self._leaves: dict[str, tuple[Any, tuple[PathStep, ...], StoredLeaf]] = {}
        """By what comes behind the prefix: the group, the path inside it, and the leaf."""
        self._of: dict[str, Any] = {}
        """Parameter -> its group."""
        self._former: dict[str, str] = {}
        """Parameter -> what its state was saved under."""
        self._hyper: dict[Any, dict[str, bytes]] = {}
        prefix = f"{name}.{_PART}."
        for _, leaf in stored.below(f"{name}.{_PART}"):
            parts = [part for _, part in leaf.path]
            if _PART not in parts[:-2]:
                continue
            at = parts.index(_PART)
            group, path = parts[at + 1], leaf.path[at + 2 :]
            self._leaves[leaf.name[len(prefix) :]] = (group, path, leaf)
            key = str(path[0][1])
            if key == "params":
                former = ".".join(part_name(kind, part) for kind, part in leaf.path[:at])
                for one in stored.value(leaf):
                    new = _new_name(stored, former, name, one)
                    self._of[new] = group
                    self._former[new] = f"{former}.state.{one}"
            elif key not in MACHINE_KEYS and not leaf.is_tensor and not leaf.empty and selected(leaf.name):
                self._hyper.setdefault(group, {})[".".join(str(part) for _, part in path)] = stored.raw(leaf)

    def places(self, stored: StoredState) -> dict[str, Any]:
        """Return places for all of it, flat: names may have been changed in the middle of keys."""
        return {rest: allocate_leaf(stored, leaf) for rest, (_, _, leaf) in self._leaves.items() if not leaf.empty}

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def had_state(self, name: str, stored: StoredState) -> bool:
        """Say whether state was saved for a parameter, also if the load drops it."""
        return stored.was(self._former[name])

    def of(self, names: Iterable[str]) -> Any:
        """Return the group a parameter was saved in; None if it was in none."""
        return next((self._of[name] for name in names if name in self._of), None)

    def check(self, group: Iterable[tuple[str, ...]]) -> None:
        """Refuse to give one group, told by all names of each of its parameters, the hyper-parameters of two."""
        first: tuple[str, Any] | None = None
        for names in group:
            saved = self.of(names)
            if saved is None:
                continue
            if first is None:
                first = (names[0], saved)
            mine, other = self._hyper.get(first[1], {}), self._hyper.get(saved, {})
            if mine != other:
                keys = sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))
                self._refuse(first[0], names[0], keys)

    def _refuse(self, one: str, other: str, keys: list[str]) -> None:
        raise StateMismatch(
            f"{self._name!r}: {one!r} and {other!r} are in one parameter group here, and were saved in two with different"
            f" {', '.join(keys)}",
            hint=f"build the optimizer with the groups it was saved with, or exclude '{self._name}.{_PART}' and set"
            " hyper-parameters yourself",
            key=self._name,
        )

    def hyper_parameters(self, group: Sequence[tuple[str, ...]], filled: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was filled for a group of these parameters."""
        by_group: dict[Any, dict[str, Any]] = {}
        for names in group:
            saved = self.of(names)
            if saved is None or saved in by_group:
                continue
            items = [
                (path, filled[rest])
                for rest, (own, path, _) in self._leaves.items()
                if own == saved and rest in filled and filled[rest] is not UNFILLED
            ]
            found = build_containers(items) if items else {}
            by_group[saved] = {key: value for key, value in found.items() if key not in MACHINE_KEYS}
            first = next(iter(by_group.values()))
            tensors = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
            if different := [key for key in tensors if not _equal(first[key], by_group[saved].get(key))]:
                self._refuse(group[0][0], names[0], different)
        return next(iter(by_group.values()), {})


def set_hyper_parameters(groups: Sequence[dict[str, Any]], group: dict[str, Any], hyper: Mapping[str, Any]) -> None:
    """Give one of the groups of an optimizer its hyper-parameters; a tensor keeps its memory, unless groups share it."""
    for key, value in hyper.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
            if sum(other.get(key) is present for other in groups) > 1:
                group[key] = present = present.clone()
            present.copy_(torch.as_tensor(value))
        else:  # a group that was cut in two has two of everything
            group[key] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _equal(one: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and torch.equal(one, other)


def _new_name(stored: StoredState, former: str, name: str, parameter: str) -> str:
    """Return what a parameter is called after the load's renaming of what the optimizer keeps for it."""
    renamed = stored.renamed(f"{former}.state.{parameter}.step")
    prefix, suffix = f"{name}.state.", ".step"
    if renamed is None or not (renamed.startswith(prefix) and renamed.endswith(suffix)):
        return parameter
    return renamed[len(prefix) : -len(suffix)]


# What the parameters of an optimizer are called: by their modules in the state, or as the optimizer was told.


class ParameterNames(NamedTuple):
    """All names of a parameter, in each of the forms in which optimizers are saved."""

    homes: list[tuple[str, tuple[str, ...]]]
    """The modules in the state that have it, each with its names there."""
    given: tuple[str, ...]
    """Those the optimizer was built with."""
    several: bool
    """Whether there are several modules in the state."""

    @property
    def in_state(self) -> tuple[str, ...]:
        """Its flat names in the state, as a part of its modules."""
        return tuple(f"{home}.{one}" for home, found in self.homes for one in found)

    @property
    def in_modules(self) -> tuple[str, ...]:
        """Its names in its modules."""
        return tuple(dict.fromkeys(one for _, found in self.homes for one in found))

    @property
    def usual(self) -> tuple[str, ...]:
        """Those of which the first is the one it is saved under, if it has a module."""
        return self.in_state if self.several else self.in_modules

    @property
    def other(self) -> tuple[str, ...]:
        """Those it would be saved under with another number of modules in the state."""
        return self.in_modules if self.several else self.in_state

    @property
    def first(self) -> str:
        """The one it is saved under."""
        if not self.homes:
            return self.given[0]
        home, found = self.homes[0]
        return f"{home}.{found[0]}" if self.several else found[0]


def name_parameters(
    name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module], rank: int
) -> dict[Any, ParameterNames]:
    """
    Name every parameter.

    As its module does, if that is the only one in the state; with the module's own name in front if there are several,
    on every rank alike: which of them a rank's optimizer has parameters of is that rank's affair.
    """
    tables = {own: parameter_names(module) for own, module in modules.items()}
    given = _given_names(optimizer)
    several = len(modules) > 1
    closed = set() if is_per_rank_name(name, rank) else {own for own in modules if is_per_rank_name(own, rank)}
    names: dict[Any, ParameterNames] = {}
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        homes = [(own, found) for own, table in tables.items() if (found := table.get(parameter))]
        if closed and not closed.isdisjoint([home for home, _ in homes]):
            raise StateError(
                f"{name!r} optimizes parameters of {homes[0][0]!r}, which is inside a PerRank, and is not itself",
                hint="put the optimizer into a PerRank too",
                key=name,
            )
        own = (given[parameter],) if given and parameter in given else ()
        if not homes and not own:
            raise StateError(
                f"{name!r} optimizes a parameter of shape {tuple(parameter.shape)} that no module in the state has, so it"
                " has no name to be saved under",
                hint="put the module into the same state, or build the optimizer from named_parameters()",
                key=name,
            )
        names[parameter] = ParameterNames(homes, own, several)
    _refuse_equal_names(name, names)
    return names


def _given_names(optimizer: Optimizer) -> dict[Any, str]:
    """Return the names an optimizer was built with."""
    return {
        parameter: str(own)
        for group in optimizer.param_groups
        for parameter, own in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def _refuse_equal_names(name: str, names: Mapping[Any, ParameterNames]) -> None:
    seen: set[str] = set()
    for own in names.values():
        if own.first in seen:
            raise StateError(f"{name!r} optimizes two parameters that are both called {own.first!r}", key=name)
        seen.add(own.first)
