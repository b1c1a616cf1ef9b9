"""
Parameter groups of optimizers: stored under their first parameter, found again by any of their parameters.

Positions in a list would not do: ranks of a pipeline have different groups, and a script may cut them anew.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardkeep.errors import StateMismatch
from shardkeep.format.tree import part_name
from shardkeep.state.objects.stateful import place_for
from shardkeep.state.objects.stored import UNFILLED, Selected, Step, Stored, StoredLeaf, nested

OF_THIS_MACHINE = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
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

    def __init__(self, name: str, stored: Stored, selected: Selected) -> None:
        self._name = name
        self._leaves: dict[str, tuple[Any, tuple[Step, ...], StoredLeaf]] = {}
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
            elif key not in OF_THIS_MACHINE and not leaf.is_tensor and not leaf.empty and selected(leaf.name):
                self._hyper.setdefault(group, {})[".".join(str(part) for _, part in path)] = stored.raw(leaf)

    def places(self, stored: Stored) -> dict[str, Any]:
        """Return places for all of it, flat: names may have been changed in the middle of keys."""
        return {rest: place_for(stored, leaf) for rest, (_, _, leaf) in self._leaves.items() if not leaf.empty}

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def had_state(self, name: str, stored: Stored) -> bool:
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
            found = nested(items) if items else {}
            by_group[saved] = {key: value for key, value in found.items() if key not in OF_THIS_MACHINE}
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


def _new_name(stored: Stored, former: str, name: str, parameter: str) -> str:
    """Return what a parameter is called after the load's renaming of what the optimizer keeps for it."""
    renamed = stored.renamed(f"{former}.state.{parameter}.step")
    prefix, suffix = f"{name}.state.", ".step"
    if renamed is None or not (renamed.startswith(prefix) and renamed.endswith(suffix)):
        return parameter
    return renamed[len(prefix) : -len(suffix)]
