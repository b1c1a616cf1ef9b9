"""
What a checkpoint holds below a name, so that an object can be given all of it, whatever the object has by now.

Names are those the load gives them (`rename=`); the nesting is the one that was saved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from shardkeep.format.dtypes import to_torch
from shardkeep.format.index import Index
from shardkeep.format.tree import Container, Node, Part, decode_tree, join, part_name
from shardkeep.format.values import decode_value
from shardkeep.state.kinds import EveryRank

Selected = Callable[[str], bool]
"""Tells the names that are to be loaded."""
Step = tuple[str, Part]
"""A kind of container, and the key in it."""


def is_each_ranks_own(name: str, rank: int) -> bool:
    """Say whether a flat name stands for something inside a `PerRank` of this rank."""
    return part_name("ranks", rank) in name.split(".")


class _Unfilled:
    """The one value that stands where a stored value will be put."""

    def __repr__(self) -> str:
        return "UNFILLED"


UNFILLED: Final = _Unfilled()
_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": dict,
    "odict": OrderedDict,
    "list": list,
    "tuple": tuple,
    "ranks": lambda values: EveryRank(dict(values)),
}


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of a checkpoint."""

    name: str
    path: tuple[Step, ...]
    """From the root to it."""
    row: int
    """Of its tensor, or of its value."""
    is_tensor: bool
    order: int
    """Its place in the state that was saved."""
    empty: str = ""
    """The kind of a container that has nothing in it, for there is no other sign of it."""


class Stored:
    """The leaves of a checkpoint by name."""

    def __init__(
        self,
        index: Index,
        tensor_rows: Mapping[str, int],
        value_rows: Mapping[str, int],
        rename: Callable[[str], str | None],
    ) -> None:
        """Take an index, the names that its tensors and values are to have, and what gave them these."""
        self._index = index
        self.renamed = rename
        names = {(True, row): name for name, row in tensor_rows.items()}
        names |= {(False, row): name for name, row in value_rows.items()}
        found = []
        for order, (name, path, empty) in enumerate(_leaves(decode_tree(index.tree), None, ())):
            if empty:
                found.append(StoredLeaf(name, path, -1, False, order, empty))
            elif (at := self._find(name)) in names:
                found.append(StoredLeaf(names[at], path, at[1], at[0], order))
        self._leaves = sorted(found, key=lambda leaf: leaf.name)
        self._names = [leaf.name for leaf in self._leaves]

    def _find(self, name: str) -> tuple[bool, int]:
        row = self._index.tensor_rows.get(name)
        return (False, self._index.value_rows.get(name, -1)) if row is None else (True, row)

    def below(self, name: str) -> list[tuple[tuple[Step, ...], StoredLeaf]]:
        """Return the leaves whose names begin with `name` and a dot, each with its path from there on."""
        prefix = f"{name}."
        first = bisect_left(self._names, prefix)
        # The character behind the dot: every name that begins with the prefix sorts before this.
        last = bisect_left(self._names, f"{name}/", lo=first)
        found = sorted(self._leaves[first:last], key=lambda leaf: leaf.order)
        return [(_tail(leaf, prefix), leaf) for leaf in found]

    def has(self, name: str) -> bool:
        """Say whether there is anything of this name or below it."""
        return self.find(name) is not None or bool(self.below(name))

    @cached_property
    def _former_names(self) -> list[str]:
        return sorted([*self._index.tensor_rows, *self._index.value_rows])

    def was(self, name: str) -> bool:
        """Say whether the checkpoint has anything below a name of its own, before the load renames or drops it."""
        at = bisect_left(self._former_names, f"{name}.")
        return at < len(self._former_names) and self._former_names[at].startswith(f"{name}.")

    def find(self, name: str) -> StoredLeaf | None:
        """Return the leaf of exactly this name."""
        at = bisect_left(self._names, name)
        return self._leaves[at] if at < len(self._names) and self._names[at] == name else None

    def shape(self, leaf: StoredLeaf) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._index.shape(leaf.row)

    def dtype(self, leaf: StoredLeaf) -> torch.dtype:
        """Return the dtype of a tensor."""
        return to_torch(self._index.dtype(leaf.row))

    def from_numpy(self, leaf: StoredLeaf) -> bool:
        """Say whether a tensor was a numpy array."""
        return bool(self._index.tensors.origin[leaf.row])

    def value(self, leaf: StoredLeaf) -> Any:
        """Decode a plain value that decides how the rest is loaded."""
        return decode_value(self._index.value_data.raw(leaf.row), key=leaf.name)

    def raw(self, leaf: StoredLeaf) -> bytes:
        """Return a plain value as it is stored, to compare it with another."""
        return self._index.value_data.raw(leaf.row)

    def nest(self, name: str, make: Callable[[StoredLeaf], Any]) -> Any:
        """
        Rebuild the containers below a name, asking `make` for each leaf.

        Per-rank state becomes an `EveryRank`. Where the name itself is a leaf, that leaf is returned.
        """
        own = self.find(name)
        items = [((), own)] if own is not None else self.below(name)
        made = [(tail, _CONTAINERS[leaf.empty]([]) if leaf.empty else make(leaf)) for tail, leaf in items]
        return made[0][1] if own is not None else nested(made)


def nested(leaves: list[tuple[tuple[Step, ...], Any]], depth: int = 0) -> Any:
    """Build containers from the paths of their leaves, which are in order."""
    kind = leaves[0][0][depth][0]
    groups: dict[Part, list[tuple[tuple[Step, ...], Any]]] = {}
    for path, leaf in leaves:
        groups.setdefault(path[depth][1], []).append((path, leaf))
    made = {
        part: group[0][1] if len(group[0][0]) == depth + 1 else nested(group, depth + 1)
        for part, group in groups.items()
    }
    if kind in ("list", "tuple"):
        return _CONTAINERS[kind](made[at] for at in sorted(made))
    return _CONTAINERS[kind](made)


def _leaves(node: Node, name: str | None, path: tuple[Step, ...]) -> Iterator[tuple[str, tuple[Step, ...], str]]:
    """Give each leaf's name, path and "", and each empty container's name, path and kind."""
    if not isinstance(node, Container):
        return
    for part, child in node.children:
        own, steps = join(name, node.kind, part), (*path, (node.kind, part))
        if child is None:
            yield own, steps, ""
        elif not child.children:
            yield own, steps, child.kind
        else:
            yield from _leaves(child, own, steps)


def _tail(leaf: StoredLeaf, prefix: str) -> tuple[Step, ...]:
    """Return the last steps of a leaf's path, those that spell what comes behind the prefix."""
    rest = leaf.name[len(prefix) :]
    length = -1
    for count in range(1, len(leaf.path) + 1):
        kind, part = leaf.path[-count]
        length += 1 + len(part_name(kind, part))
        if length >= len(rest):
            break
    steps = leaf.path[-count:]
    if ".".join(part_name(kind, part) for kind, part in steps) == rest:
        return steps
    return (("dict", rest),)  # renamed in the middle of a key
