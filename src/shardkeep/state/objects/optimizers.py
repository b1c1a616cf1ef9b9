"""
Optimizers in a state: saved by parameter name, loaded from what was saved, whatever the optimizer has by now.

    state.<parameter>.<key>            what the optimizer keeps for a parameter
    param_groups.<first parameter>     hyper-parameters, and `params`, the names of the group's parameters
    other.<key>                        what it keeps for no parameter

A fresh optimizer needs no first step: memory for its state is made from the parameter and the checkpoint. Which
groups were saved matters only for the parameters in them, so ranks that hold other layers (pipeline stages), or
groups that are cut otherwise, find what is theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import StateError, StateMismatch
from shardkeep.state.kinds import EveryRank, PerRank
from shardkeep.state.leaves import describe_leaf, is_tensor
from shardkeep.state.objects.groups import SavedGroups, groups_by_first, set_hyper_parameters
from shardkeep.state.objects.naming import Names, names_of
from shardkeep.state.objects.stateful import digest_of, place_for
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored, StoredLeaf
from shardkeep.state.toolkit.recognise import is_dtensor
from shardkeep.state.training.fresh import is_fresh, rehearsed

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
    def _names(self) -> dict[Any, Names]:
        """What each parameter is called."""
        return names_of(self.name, self._optimizer, self._modules, self._rank)

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

    def template(self, stored: Stored, selected: Selected) -> Any:
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
            template["other"] = stored.nest(f"{self.name}.other", lambda leaf: place_for(stored, leaf))
        return template

    def _resolve(self, stored: Stored) -> dict[Any, str]:
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
            return rehearsed(optimizer)[0]
        except StateError:
            return optimizer.state

    def _layout(self, parameter: torch.Tensor, base: str = "") -> dict[str, Any]:
        return dict(_flat(self._present.get(parameter, {}), base))

    def _places(self, stored: Stored, saved: str, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
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
    stored: Stored,
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


def _own_shards(places: Any, stored: Stored, name: str, parameter: torch.Tensor, rank: int) -> Any:
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
