"""
Optimizers of FSDP1 modules, whose parameters are flattened: only FSDP1 can say what belongs to which of them.

Saved and loaded in the same form as all others.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardkeep.errors import StateError
from shardkeep.state.objects.groups import SavedGroups, groups_by_first, set_hyper_parameters
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored
from shardkeep.state.training.fresh import is_fresh
from shardkeep.state.training.optimizer import get_optimizer_state_dict, set_optimizer_state_dict
from shardkeep.state.training.options import StateDictOptions


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

    def template(self, stored: Stored, selected: Selected) -> Any:
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
