"""The objects of a state: which leaves are objects, and what stands in their place when they are saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import StateMismatch
from shardkeep.format.tree import join
from shardkeep.state.flatten import flatten
from shardkeep.state.kinds import EveryRank, PerRank
from shardkeep.state.leaves import is_tensor
from shardkeep.state.objects.flat_optimizers import FlatOptimizerObject
from shardkeep.state.objects.modules import ModuleObject
from shardkeep.state.objects.optimizers import OptimizerObject
from shardkeep.state.objects.stateful import StatefulObject
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored
from shardkeep.state.training.fsdp1 import fsdp_modules

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

    def template(self, stored: Stored, selected: Selected) -> Any:
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

    def templates(self, stored: Stored, selected: Selected, *, communicating: bool) -> dict[str, Any]:
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
