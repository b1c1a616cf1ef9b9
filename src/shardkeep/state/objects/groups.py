"""
Parameter groups of optimizers: stored under their first parameter, found again by any of their parameters.

Positions in a list would not do: ranks of a pipeline have different groups, and a script may cut them anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shardkeep.errors import StateMismatch
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored

OF_THIS_MACHINE = frozenset({"params", "param_names", "foreach", "fused", "capturable"})
"""What a group holds and a checkpoint does not decide: how a step is carried out here, not what it does."""


def groups_by_first(groups: Iterable[tuple[list[str], Mapping[str, Any]]]) -> dict[str, Any]:
    """Put groups, each with the names of its parameters, into the form in which they are saved."""
    saved = {}
    for names, group in groups:
        if names:
            hyper = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            saved[names[0]] = hyper | {"params": names}
    return saved


def set_hyper_parameters(
    group: dict[str, Any], names: Sequence[str], saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> None:
    """
    Give a group what was saved for the first of these parameters that any saved group has.

    Groups in a list are those of a state dict by parameter names, saved as such.
    """
    groups = saved.values() if isinstance(saved, Mapping) else saved
    of = {name: hyper for hyper in groups for name in hyper.get("params", ())}
    for key, value in next((of[name] for name in names if name in of), {}).items():
        if key in OF_THIS_MACHINE or value is UNFILLED:
            continue
        present = group.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
            present.copy_(torch.as_tensor(value))
        else:
            group[key] = value


class SavedGroups:
    """The parameter groups that were saved."""

    def __init__(self, name: str, stored: Stored, selected: Selected) -> None:
        self._name = name
        self._of: dict[str, str] = {}
        """Parameter -> its group, named by its first parameter."""
        self._hyper: dict[str, dict[str, bytes]] = {}
        for tail, leaf in stored.below(f"{name}.param_groups"):
            first, key = tail[0][1], ".".join(str(part) for _, part in tail[1:])
            if key == "params":
                self._of |= dict.fromkeys(stored.value(leaf), first)
            elif key not in OF_THIS_MACHINE and not leaf.is_tensor and not leaf.empty and selected(leaf.name):
                self._hyper.setdefault(first, {})[key] = stored.raw(leaf)

    def of(self, names: tuple[str, ...]) -> str | None:
        """Return the group a parameter was saved in."""
        return next((self._of[name] for name in names if name in self._of), None)

    def check(self, group: Iterable[tuple[str, ...]]) -> None:
        """Refuse to give one group, told by all names of each of its parameters, the hyper-parameters of two."""
        first: tuple[str, str] | None = None
        for names in group:
            saved = self.of(names)
            if saved is None:
                continue
            if first is None:
                first = (names[0], saved)
            mine, other = self._hyper.get(first[1], {}), self._hyper.get(saved, {})
            if mine != other:
                keys = sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))
                raise StateMismatch(
                    f"{self._name!r}: {first[0]!r} and {names[0]!r} are in one parameter group here, and were"
                    f" saved in two with different {', '.join(keys)}",
                    hint="build the optimizer with the groups it was saved with, or exclude"
                    f" '{self._name}.param_groups' and set hyper-parameters yourself",
                    key=self._name,
                )
