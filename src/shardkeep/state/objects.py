"""
Modules in a state: their parameters and buffers are saved under canonical names and filled where they are.

A parameter on the meta device gets its memory from the load, so that no full copy exists anywhere, and stays the same
object: an optimizer that holds it holds the filled one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import StateError, StateMismatch
from shardkeep.format.tree import join
from shardkeep.state.flatten import flatten
from shardkeep.state.fsdp1 import fsdp_modules
from shardkeep.state.leaves import (
    EveryRank,
    PerRank,
    describe_leaf,
    is_dtensor,
    is_tensor,
    materialize,
    needs_memory,
    with_attributes_of,
)
from shardkeep.state.modules import StateDictOptions, module_state, set_model_state_dict
from shardkeep.state.names import EXTRA_STATE, live_state
from shardkeep.state.optimizers import (
    ParameterNames,
    SavedGroups,
    dry_step,
    groups_by_first,
    is_fresh,
    name_parameters,
    set_hyper_parameters,
)
from shardkeep.state.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from shardkeep.state.stored import UNFILLED, Selected, StatefulObject, StoredLeaf, StoredState, allocate_leaf, digest_of


class ModuleObject:
    """How a module is saved and loaded."""

    def __init__(self, name: str, module: nn.Module, memory: dict[int, Any], *, communicates: bool) -> None:
        """
        Take the module, and where new memory for parameters is noted, so that one that is in two has one.

        A module of which FSDP1 has flattened a part communicates.
        """
        self.name = name
        self._module = module
        self._memory = memory
        self.communicates = communicates

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: replicas of a module are replicas."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by canonical name, in its own memory."""
        return module_state(self._module)

    def template(self, stored: StoredState, selected: Selected) -> dict[str, Any]:
        """
        Return the same: that is what is filled.

        What is on the meta device gets memory, one for each parameter, so that ties are those of the module. Extra
        state is what was saved, whatever the module would return now.
        """
        state = module_state(self._module)
        for item in live_state(self._module):
            if item.name == EXTRA_STATE or item.name.endswith(f".{EXTRA_STATE}"):
                if stored.has(f"{self.name}.{item.name}"):
                    state[item.name] = stored.nest(f"{self.name}.{item.name}", lambda leaf: allocate_leaf(stored, leaf))
            elif item.name in state and needs_memory(state[item.name]) and selected(f"{self.name}.{item.name}"):
                _refuse_observed(f"{self.name}.{item.name}", item.value)
                if id(item.value) not in self._memory:
                    self._memory[id(item.value)] = materialize(item.name, state[item.name])
                state[item.name] = self._memory[id(item.value)]
        return dict(state)

    def take(self, state: dict[str, Any]) -> None:
        """Put in what was not filled in place: tensors that had no memory, extra state, and what hooks made."""
        if not self.communicates:
            own = {item.name: item.value for item in live_state(self._module) if item.value is not None}
            through_itself = _has_own_ways(self._module)
            for name, tensor in own.items():
                if tensor.is_meta and (name in state or through_itself):
                    # What is saved may have another form or name than the parameter: then memory alone comes from here.
                    _become(tensor, materialize(name, tensor) if through_itself else state[name])
            filled = all(name in own and _same_memory(own[name], leaf) for name, leaf in state.items())
            if filled and not through_itself:
                return
        # What state_dict() made for the occasion goes back the way it came, and hooks that wait for a load get theirs;
        # whether everything is there was settled before.
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=False))


_WAYS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _has_own_ways(module: nn.Module) -> bool:
    """Say whether hooks or methods that are not torch's have a part in giving or taking a module's state."""
    for part in module.modules():
        ways = [part.__dict__.get(name, getattr(type(part), name)) for name in _WAYS]
        hooks = [hook for name in _HOOKS for hook in getattr(part, name).values()]
        if not all(map(_is_torchs, [*ways, *hooks])):
            return True
    return False


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "hook", function)  # of a wrapper that torch puts around hooks
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _refuse_observed(name: str, parameter: torch.Tensor) -> None:
    why = "something holds a weak reference to it" if weakref.getweakrefs(parameter) else ""
    if parameter._is_view():
        why = "it is a view of another tensor"
    if why:
        raise StateError(
            f"{name!r} is on the meta device and cannot be given memory: {why}",
            hint="give the module memory before the load: module.to_empty(device=...)",
            key=name,
        )


def _become(target: torch.Tensor, filled: torch.Tensor) -> None:
    """Give a tensor on the meta device the memory of another, keeping the object, its class, attributes and hooks."""
    fresh = with_attributes_of(target, filled.detach())
    hooks = list((target._backward_hooks or {}).values())
    after = list((getattr(target, "_post_accumulate_grad_hooks", None) or {}).values())
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]  # torch has no types for it
    # The hooks stay in Python's hands, and autograd does not know of them any more: they are registered again.
    target._backward_hooks = None
    target._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it is before the first hook
    for hook in hooks:
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _same_memory(one: Any, other: Any) -> bool:
    """Say whether two tensors are the same bytes, or both have none."""
    if not is_tensor(other):
        return False
    mine, its = (describe_leaf("", tensor, allow_meta=True) for tensor in (one, other))
    return mine.alias == its.alias and mine.shape == its.shape and mine.dtype == its.dtype


# Optimizers in a state: saved by parameter name, loaded from what was saved, whatever the optimizer has by now.
#
#     state.<parameter>.<key>            what the optimizer keeps for a parameter
#     param_groups.<first parameter>     hyper-parameters, and `params`, the names of the group's parameters
#     other.<key>                        what it keeps for no parameter
#
# A fresh optimizer needs no first step: memory for its state is made from the parameter and the checkpoint. Which
# groups were saved matters only for the parameters in them, so ranks that hold other layers (pipeline stages), or
# groups that are cut otherwise, find what is theirs.

_SINGLE = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, type(None)})


class OptimizerObject:
    """How an optimizer is saved and loaded."""

    def __init__(self, name: str, optimizer: Optimizer, modules: Mapping[str, nn.Module], *, rank: int) -> None:
        self.name = name
        self.communicates = False
        self._optimizer = optimizer
        self._modules = modules
        self._rank = rank
        # Known after `template`.
        self._groups: SavedGroups
        self._asked: dict[str, Any] = {}
        self._without_state: list[Any] = []
        self._saved_as: dict[Any, str] = {}

    @cached_property
    def _names(self) -> dict[Any, ParameterNames]:
        """What each parameter is called."""
        return name_parameters(self.name, self._optimizer, self._modules, self._rank)

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """
        Sum up plain tensors that are kept for a sharded parameter.

        They may be what the rank worked out for its shard alone (blocks of an 8-bit optimizer), or factors of the whole
        parameter, whatever their shape.
        """
        return {
            name: digest_of(name, value, allow_pickle=allow_pickle)
            for parameter, kept in self._kept()
            if is_dtensor(parameter)
            for name, value in _flat(kept, f"{self.name}.state.{self._names[parameter].first}")
            if _of_one_shard(value, parameter)
        }

    def _kept(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for parameter, kept in self._optimizer.state.items():
            if parameter in self._names and kept:
                yield parameter, kept

    def give(self, differing: Collection[str]) -> dict[str, Any]:
        """Return its state by parameter name."""
        firsts = {parameter: names.first for parameter, names in self._names.items()}
        prefix = f"{self.name}.state."
        mine = {name for name in differing if name.startswith(prefix)}
        state = {}
        for parameter, kept in self._kept():
            name = firsts[parameter]
            if mine or not _is_flat(kept):
                state[name] = _portable(kept, prefix + name, parameter, mine)
            else:
                state[name] = {**kept}
        groups = [
            ([firsts[parameter] for parameter in group["params"]], group) for group in self._optimizer.param_groups
        ]
        given: dict[str, Any] = {"state": state, "param_groups": groups_by_first(groups)}
        if other := {key: value for key, value in self._optimizer.state.items() if not isinstance(key, torch.Tensor)}:
            given["other"] = other
        return given

    def template(self, stored: StoredState, selected: Selected) -> Any:
        """Return what was saved for this rank's parameters, with places for it; `UNFILLED` where nothing was."""
        if not stored.has(self.name):
            return UNFILLED
        self._groups = SavedGroups(self.name, stored, selected)
        self._saved_as = self._resolve(stored)
        self._asked = state = {}
        self._without_state = []
        for group in self._optimizer.param_groups:
            self._groups.check((self._saved_as[p],) for p in group["params"] if p in self._saved_as)
            for parameter in group["params"]:
                saved = self._saved_as.get(parameter)
                if saved is None:
                    state[self._names[parameter].first] = UNFILLED
                elif stored.has(f"{self.name}.state.{saved}"):
                    state[saved] = self._places(stored, saved, parameter, group)
                elif selected(f"{self.name}.state.{saved}.step") and not self._groups.had_state(saved, stored):
                    self._without_state.append(parameter)
        if selected(f"{self.name}.other"):
            self._without_state += [key for key in self._optimizer.state if not isinstance(key, torch.Tensor)]
        template: dict[str, Any] = {"state": state, "param_groups": self._groups.places(stored)}
        if stored.below(f"{self.name}.other"):
            template["other"] = stored.nest(f"{self.name}.other", lambda leaf: allocate_leaf(stored, leaf))
        return template

    def _resolve(self, stored: StoredState) -> dict[Any, str]:
        """
        Find the name each parameter was saved under; those that were not saved are left out.

        One form of names is taken for all: the one that most of them are found by, and of two the longer, which says
        more. A name is one parameter's alone.
        """
        best: dict[Any, str] = {}
        for form in ("in_state", "usual", "other", "given"):
            found: dict[Any, str] = {}
            taken: set[str] = set()
            for parameter, names in self._names.items():
                for name in getattr(names, form):
                    if name not in taken and (name in self._groups or stored.has(f"{self.name}.state.{name}")):
                        found[parameter] = name
                        taken.add(name)
                        break
            if len(found) > len(best):
                best = found
        return best

    @cached_property
    def _present(self) -> Mapping[Any, Any]:
        """
        The state that is there, to be filled in place or to learn from how it is laid out.

        Optimizers of torch keep what has the parameter's shape as they keep the parameter. Of others, where that makes
        a difference, a fresh one is asked what it would make.
        """
        optimizer = self._optimizer
        spread = any(_shard_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if not spread or type(optimizer).__module__.startswith("torch.optim") or not is_fresh(optimizer):
            return optimizer.state
        try:
            return dry_step(optimizer)[0]
        except StateError:
            return optimizer.state

    def _layout(self, parameter: torch.Tensor, base: str = "") -> dict[str, Any]:
        return dict(_flat(self._present.get(parameter, {}), base))

    def _places(self, stored: StoredState, saved: str, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        base = f"{self.name}.state.{saved}"
        present = self._layout(parameter, base)
        itself = next((leaf for name in self._names[parameter].in_state if (leaf := stored.find(name))), None)
        places = stored.nest(base, lambda leaf: _place(stored, leaf, itself, parameter, group, present.get(leaf.name)))
        return _own_shards(places, stored, base, parameter, self._rank)

    def take(self, state: dict[str, Any]) -> None:
        """Give the optimizer what was loaded. Its parameters, and what was left out of the load, stay as they are."""
        optimizer = self._optimizer
        by_name = {name: kept for name, kept in state.get("state", {}).items() if kept is not UNFILLED}
        saved_as = self._saved_as
        groups = [[(saved_as[p],) for p in group["params"] if p in saved_as] for group in optimizer.param_groups]
        hyper = [self._groups.hyper_parameters(names, state.get("param_groups", {})) for names in groups]
        layouts = {
            parameter: self._layout(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for key in self._without_state:  # nor had it any when it was saved
            optimizer.state.pop(key, None)
        for group, values in zip(optimizer.param_groups, hyper, strict=True):
            for parameter in group["params"]:
                name = saved_as.get(parameter)
                if name is not None and name in by_name:
                    # What was left out of the load stays; what the checkpoint never had goes.
                    left = {} if by_name[name] is self._asked[name] else optimizer.state.get(parameter, {})
                    optimizer.state[parameter] = {**left, **_local_form(by_name[name], layouts[parameter])}
            set_hyper_parameters(optimizer.param_groups, group, values)
        optimizer.state.update(state.get("other", {}))
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)


def _is_flat(kept: Any) -> bool:
    """Say whether what is kept for a parameter is a dict of values that hold no others, as it nearly always is."""
    return type(kept) is dict and _SINGLE.issuperset(map(type, kept.values()))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is None:
        yield name, value
        return
    for key, child in children.items():
        yield from _flat(child, f"{name}.{key}")


def _children(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _mapped(value: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    """Build the same containers with other leaves."""
    children = _children(value)
    if children is None:
        return change(value, name)
    made = {key: _mapped(child, f"{name}.{key}", change) for key, child in children.items()}
    if isinstance(value, Mapping):
        return made
    return list(made.values()) if isinstance(value, list) else tuple(made.values())


def _place(
    stored: StoredState,
    leaf: StoredLeaf,
    itself: StoredLeaf | None,
    parameter: torch.Tensor,
    group: dict[str, Any],
    present: Any,
) -> Any:
    """
    Make room for one piece of state: where it is already, or laid out as its parameter, or plain.

    `itself` is the parameter in the checkpoint: what had its shape and dtype then has the parameter's now, or does not
    fit, which the load says.
    """
    if not leaf.is_tensor:
        return UNFILLED
    shape, dtype = stored.shape(leaf), stored.dtype(leaf)
    counter = leaf.path[-1][1] == "step" and not shape
    like_it = not counter and shape == (tuple(parameter.shape) if itself is None else stored.shape(itself))
    if is_tensor(present) and not _is_part_of(present, parameter):
        here = describe_leaf(leaf.name, present, allow_meta=True)
        # A plain tensor that is this rank's shard was saved as a part of the whole, and is loaded as one.
        if not (like_it and _of_one_shard(present, parameter) and here.shape != shape):
            if here.shape != shape and not like_it:
                _refuse_other_shape(leaf, shape, here.shape, parameter)
            if here.shape == shape or like_it:
                return present  # of another shape or dtype: the load says so, or casts
    if like_it:
        same = itself is not None and dtype == stored.dtype(itself)
        return torch.empty_like(parameter, dtype=parameter.dtype if same else dtype, requires_grad=False)
    with_parameter = not counter or group.get("capturable") or group.get("fused")  # kept where a step reads it
    return torch.empty(shape, dtype=dtype, device=parameter.device if with_parameter else "cpu")


def _is_part_of(present: Any, parameter: torch.Tensor) -> bool:
    """Say whether state is the parameter's own memory, which is not the optimizer's to fill."""
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in (present, parameter)]
    if not all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return False
    one, other = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    return one == other != 0


def _refuse_other_shape(leaf: StoredLeaf, saved: Any, here: Any, parameter: torch.Tensor) -> None:
    """State that a sharded parameter's optimizer would make in another shape was made for another shard."""
    if "@" not in leaf.name and _shard_of(parameter) is not None:
        raise StateMismatch(
            f"{leaf.name!r} was saved with shape {tuple(saved)}, and this optimizer keeps {tuple(here)} there: it was made"
            " for another sharding and cannot be cut anew",
            hint="load it on the same number of ranks and the same mesh, or exclude it",
            key=leaf.name,
        )


def _of_one_shard(value: Any, parameter: torch.Tensor) -> bool:
    """Say whether a value may belong to this rank's shard of a parameter alone."""
    return type(value) is torch.Tensor and value.dim() > 0 and _shard_of(parameter) is not None


def _portable(kept: Any, name: str, parameter: Any, differing: Collection[str]) -> Any:
    """Say of plain tensors in a sharded parameter's state which shard they are of."""

    def change(value: Any, own: str) -> Any:
        if own not in differing:
            return value
        if value.shape == parameter.to_local().shape:
            return _like_parameter(value, parameter)
        return PerRank({"boxes": _shard_of(parameter), "tensor": value})

    return _mapped(kept, name, change)


def _own_shards(places: Any, stored: StoredState, name: str, parameter: torch.Tensor, rank: int) -> Any:
    """Keep, of state that each rank stored for its own shard, this rank's, and insist that the shard is the same."""

    def change(value: Any, own: str) -> Any:
        if not isinstance(value, EveryRank):
            return value
        saved = stored.find(f"{own}.@{rank}.boxes")
        if saved is None or stored.value(saved) != _shard_of(parameter):
            raise StateMismatch(
                f"{own!r} is state that each rank kept for its own shard of the parameter, in a form that cannot be cut"
                f" anew, and rank {rank} now holds another shard",
                hint="load it on the same number of ranks and the same mesh, or exclude it",
                key=own,
            )
        return PerRank(value.values[rank])

    return _mapped(places, name, change)


def _local_form(kept: Any, present: Mapping[str, Any]) -> Any:
    """Undo `_portable`; a shard becomes a plain tensor again where the optimizer keeps one."""

    def change(value: Any, own: str) -> Any:
        if isinstance(value, PerRank):
            return value.value["tensor"]
        plain = type(present.get(own)) is torch.Tensor
        return value.to_local() if plain and is_dtensor(value) else value

    return _mapped(kept, "", change)


def _shard_of(parameter: Any) -> list[list[list[int]]] | None:
    """Return the boxes of a sharded parameter that this rank holds; None for one that is here as a whole."""
    if not is_dtensor(parameter) or all(placement.is_replicate() for placement in parameter.placements):
        return None
    pieces = describe_leaf("", parameter, allow_meta=True).pieces
    return [[list(piece.offsets), list(piece.tensor.shape)] for piece in pieces]


def _like_parameter(local: torch.Tensor, parameter: Any) -> Any:
    # To import the class takes long, and it is loaded where there is a DTensor.
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


# Optimizers of FSDP1 modules, whose parameters are flattened: only FSDP1 can say what belongs to which of them.
#
# Saved and loaded in the same form as all others.


class FlatOptimizerObject:
    """How an optimizer of an FSDP1 module is saved and loaded."""

    def __init__(self, name: str, optimizer: Optimizer, module: nn.Module, prefix: str) -> None:
        """Take the optimizer and its module; `prefix` comes before names where the state has several modules."""
        self.name = name
        self._prefix = prefix
        self.communicates = True
        self._optimizer = optimizer
        self._module = module
        # Known after `template`.
        self._groups: list[dict[str, Any]]
        self._saved: SavedGroups
        self._empty = False

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: FSDP1 says what is whose."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by parameter name; none for one that has made no step."""
        self._refuse_others()
        fresh = is_fresh(self._optimizer)
        state: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = (([self._prefix + name for name in group["params"]], group) for group in state["param_groups"])
        kept = {self._prefix + name: values for name, values in _parted(state["state"]).items()}
        return {"state": {} if fresh else kept, "param_groups": groups_by_first(groups)}

    def template(self, stored: StoredState, selected: Selected) -> Any:
        """Return the state that is there, or would be after a step; `UNFILLED` where the checkpoint has none."""
        if not stored.has(self.name):
            return UNFILLED
        self._refuse_others()
        present: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        self._groups = present["param_groups"]
        self._saved = SavedGroups(self.name, stored, selected)
        names = [name for group in self._groups for name in group["params"]]
        # As it would be saved from this state, or from one with another number of modules.
        if not any(self._prefix + name in self._saved for name in names) and any(name in self._saved for name in names):
            self._prefix = ""
        for group in self._groups:
            self._saved.check((self._prefix + name,) for name in group["params"])
        state = {
            self._prefix + name: kept
            for name, kept in _parted(present["state"]).items()
            if stored.has(f"{self.name}.state.{self._prefix}{name}") or self._prefix + name not in self._saved
        }
        self._empty = not state and selected(f"{self.name}.state")
        return {"state": state, "param_groups": self._saved.places(stored)}

    def take(self, state: dict[str, Any]) -> None:
        """Give the optimizer what was loaded."""
        filled = state.get("param_groups", {})
        hyper = [
            self._saved.hyper_parameters([(self._prefix + name,) for name in group["params"]], filled)
            for group in self._groups
        ]
        if state.get("state"):
            for group, values in zip(self._groups, hyper, strict=True):
                set_hyper_parameters(self._groups, group, values)
            kept = {name[len(self._prefix) :]: values for name, values in state["state"].items()}
            loaded: Any = {"state": kept, "param_groups": self._groups}
            set_optimizer_state_dict(self._module, self._optimizer, loaded, options=StateDictOptions(strict=False))
            return
        if self._empty:
            self._optimizer.state.clear()
        for group, values in zip(self._optimizer.param_groups, hyper, strict=True):
            set_hyper_parameters(self._optimizer.param_groups, group, values)

    def _refuse_others(self) -> None:
        mine = {id(parameter) for parameter in self._module.parameters()}
        groups = self._optimizer.param_groups
        if any(id(parameter) not in mine for group in groups for parameter in group["params"]):
            raise StateError(
                f"{self.name!r} optimizes parameters of an FSDP1 module and others, and FSDP1 knows only its own",
                hint="use an optimizer for each, or FSDP2 (fully_shard)",
                key=self.name,
            )


def _parted(state: dict[str, Any]) -> dict[str, Any]:
    """Give every parameter its own step counter: those of one flat parameter share theirs."""
    return {
        name: {
            key: value.clone() if type(value) is torch.Tensor and not value.dim() else value
            for key, value in kept.items()
        }
        for name, kept in state.items()
    }


# The objects of a state: which leaves are objects, and what stands in their place when they are saved and loaded.

_KNOWN: dict[type, bool] = {}
_ORDINARY = (Optimizer.state_dict, Optimizer.load_state_dict)


class Adapter(Protocol):
    """How one object's state is had, and how it is put back."""

    name: str
    communicates: bool
    """Whether giving, asking and taking talk to other ranks, which must then all be there."""

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Return, by name, digests of state that may be one for all ranks, or each rank's own: none can say alone."""

    def give(self, differing: Collection[str]) -> Any:
        """Return the state to save: a mapping, or a `PerRank` of one; of what was unsure, these are each rank's own."""

    def template(self, stored: StoredState, selected: Selected) -> Any:
        """Return what is to be filled from a checkpoint; `UNFILLED` where it has nothing for this object."""

    def take(self, state: Any) -> None:
        """Give the object what was filled."""


def is_object(value: Any) -> bool:
    """Say whether a leaf is an object whose state is to be saved in its place."""
    cls = type(value)
    known = _KNOWN.get(cls)
    if known is None:
        stateful = callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None))
        known = _KNOWN[cls] = stateful and not issubclass(cls, (Mapping, torch.Tensor, type))
    return known


def is_tensor_or_object(value: Any) -> bool:
    """Say whether a leaf makes the list it is in one to be walked."""
    return is_tensor(value) or is_object(value)


class Objects:
    """The objects of one rank's state, by flat name."""

    def __init__(self, state: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Find them; nothing is asked of them yet."""
        self._rank = rank
        leaves, _ = flatten(state, rank=rank, is_tensor=is_tensor_or_object)
        found = {name: leaf for name, leaf in leaves.items() if is_object(leaf)}
        modules = {name: leaf for name, leaf in found.items() if isinstance(leaf, nn.Module)}
        self.optimizers = [leaf for leaf in found.values() if isinstance(leaf, Optimizer)]
        self._flattened = {name: module for name, module in modules.items() if fsdp_modules(module)}
        self._memory: dict[int, Any] = {}
        self._adapters: list[Adapter] = [self._adapter(name, leaf, modules, world_size) for name, leaf in found.items()]
        self._standing: dict[str, Any] = {}

    def _adapter(self, name: str, leaf: Any, modules: Mapping[str, nn.Module], world_size: int) -> Adapter:
        if isinstance(leaf, nn.Module):
            return ModuleObject(name, leaf, self._memory, communicates=name in self._flattened)
        # An optimizer with its own idea of a state dict is taken at its word.
        cls: Any = type(leaf)
        if isinstance(leaf, Optimizer) and (cls.state_dict, cls.load_state_dict) == _ORDINARY:
            home = _home_of(leaf, self._flattened)
            if home is None:
                return OptimizerObject(name, leaf, modules, rank=self._rank)
            return FlatOptimizerObject(name, leaf, modules[home], f"{home}." if len(modules) > 1 else "")
        return StatefulObject(name, leaf, rank=self._rank, world_size=world_size)

    def __bool__(self) -> bool:
        return bool(self._adapters)

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Return digests of what may be one for all ranks, or each rank's own, by flat name."""
        digests: dict[str, bytes] = {}
        for adapter in self._adapters:
            digests |= adapter.unsure(allow_pickle=allow_pickle)
        return digests

    @property
    def communicates(self) -> bool:
        """Say whether any of them talks to other ranks."""
        return any(adapter.communicates for adapter in self._adapters)

    @property
    def names(self) -> list[str]:
        """Their flat names, the same on all ranks for those inside a `PerRank`."""
        own = f"@{self._rank}"
        parts = ([("@" if part == own else part) for part in adapter.name.split(".")] for adapter in self._adapters)
        return sorted(".".join(each) for each in parts)

    def give(self, differing: Collection[str], *, communicating: bool) -> dict[str, Any]:
        """Return, by flat name, what is saved in place of those that do, or do not, talk to other ranks."""
        chosen = [adapter for adapter in self._adapters if adapter.communicates == communicating]
        return {adapter.name: adapter.give(differing) for adapter in chosen}

    def templates(self, stored: StoredState, selected: Selected, *, communicating: bool) -> dict[str, Any]:
        """Return, by flat name, what is filled in place of those that do, or do not, talk, if anything is selected."""
        for adapter in self._adapters:
            if adapter.communicates != communicating:
                continue
            if selected(adapter.name) or any(selected(leaf.name) for _, leaf in stored.below(adapter.name)):
                self._standing[adapter.name] = adapter.template(stored, selected)
        return self._standing

    def take(self, filled: set[str]) -> None:
        """
        Give every object what was filled of its state, if anything was.

        Those that talk to other ranks come first: one that fails alone must not leave them waiting.
        """
        for adapter in sorted(self._adapters, key=lambda adapter: not adapter.communicates):
            state = self._standing.get(adapter.name, UNFILLED)
            kept = UNFILLED if state is UNFILLED else _filled_part(state, adapter.name, filled, self._rank)
            if kept is not UNFILLED:
                adapter.take(kept)


def _home_of(optimizer: Optimizer, flattened: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the FSDP1 module whose parameters an optimizer has, if that is so."""
    if not flattened:
        return None
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in flattened.items():
        if any(id(parameter) in parameters for parameter in module.parameters()):
            return name
    return None


def _filled_part(value: Any, name: str, filled: set[str], rank: int) -> Any:
    """Return what was filled of a container: the container itself if all of it was, `UNFILLED` if nothing."""
    items: Mapping[Any, Any]
    if isinstance(value, EveryRank):
        items, kind = value.values, "ranks"
    elif isinstance(value, PerRank):
        items, kind = {rank: value.value}, "ranks"
    elif isinstance(value, Mapping):
        items, kind = value, "dict"
    elif isinstance(value, (list, tuple)) and name not in filled:
        items, kind = dict(enumerate(value)), "list"
    else:
        return value if name in filled else UNFILLED
    parts = {key: _filled_part(child, join(name, kind, key), filled, rank) for key, child in items.items()}
    if all(parts[key] is child is not UNFILLED for key, child in items.items()):
        return value
    kept = {key: part for key, part in parts.items() if part is not UNFILLED}
    if not kept:
        return UNFILLED
    if isinstance(value, EveryRank):
        return EveryRank(kept)
    if isinstance(value, PerRank):
        return PerRank(kept[rank])
    if kind == "list":
        raise StateMismatch(
            f"only a part of the list {name!r} is to be loaded, and an object would take it for all of it",
            hint="include or exclude the list as a whole",
            key=name,
        )
    return kept
