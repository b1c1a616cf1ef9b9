"""
A full state dict taken apart into what is sent as bytes, its tensors, and what is sent as it is, the rest.

Dicts, lists and tuples are gone through; any other container is one value. Putting together builds new containers
and leaves those that came in as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from shardkeep.errors import UnsupportedLeaf
from shardkeep.state.leaves import describe_leaf
from shardkeep.state.toolkit.recognise import Path, is_plain, spell
from shardkeep.state.toolkit.stream import Cargo

CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple})
"""Exactly these are gone through: what a subclass does beyond them is its own business."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a skeleton for the tensor of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """A state dict, taken apart."""

    skeleton: dict[str, Any]
    """The tree, with a `Slot` in place of each tensor."""
    cargoes: list[Cargo]
    sources: list[torch.Tensor] | None
    """The tensors, plain and detached; None on ranks that wait for them."""

    def without_values(self) -> Parcel:
        """Return what the other ranks need to know."""
        return replace(self, sources=None)


def take_apart(state_dict: Mapping[str, Any]) -> Parcel:
    """
    Take a full state dict apart; nothing is copied.

    Raises:
        UnsupportedLeaf: a tensor is sharded, on meta, or of no plain form.

    """
    cargoes: list[Cargo] = []
    sources: list[torch.Tensor] = []

    def take(value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            source = plain_source(value, path)
            cargoes.append(Cargo(spell(path), tuple(source.shape), source.dtype))
            sources.append(source)
            return Slot(len(sources) - 1)
        if type(value) in CONTAINERS:
            return rebuilt(value, lambda key, child: take(child, (*path, key)))
        return value

    return Parcel({key: take(value, (key,)) for key, value in state_dict.items()}, cargoes, sources)


def put_together(part: Any, tensors: Mapping[int, Any]) -> Any:
    """Return a part of a skeleton with its slots filled."""
    if isinstance(part, Slot):
        return tensors[part.number]
    if type(part) in CONTAINERS:
        return rebuilt(part, lambda _, child: put_together(child, tensors))
    return part


def plain_source(value: Any, path: Path) -> torch.Tensor:
    """
    Return a full tensor as a plain detached one over the same memory.

    Raises:
        UnsupportedLeaf: it is sharded, on meta, or of no plain form.

    """
    name = spell(path)
    if not is_plain(value):
        raise UnsupportedLeaf(
            f"{name!r} is a {type(value).__qualname__}, expected a full tensor",
            hint="gather the state dict first (gather_state_dict, or full_state_dict=True)",
            key=name,
        )
    leaf = describe_leaf(name, value)
    return leaf.pieces[0].tensor if leaf.pieces else torch.empty(leaf.shape, dtype=leaf.dtype)


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return keys and values of a dict, or indices and items of a list or tuple."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def child_of(container: Any, key: Any) -> Any:
    """Return what stands at a key or index; None where there is no such place."""
    if isinstance(container, Mapping):
        return container.get(key)
    if isinstance(container, (list, tuple)) and isinstance(key, int) and key < len(container):
        return container[key]
    return None


def rebuilt(container: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a new container of the same type, whose values are those that `change` made of key and value."""
    made = [(key, change(key, child)) for key, child in items_of(container)]
    return type(container)(made if isinstance(container, dict) else [child for _, child in made])
