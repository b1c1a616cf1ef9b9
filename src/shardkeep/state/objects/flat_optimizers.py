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

from shardkeep.state.objects.groups import SavedGroups, groups_by_first, set_hyper_parameters
from shardkeep.state.objects.stateful import place_for
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored
from shardkeep.state.training.optimizer import get_optimizer_state_dict, set_optimizer_state_dict


class FlatOptimizerObject:
    """How an optimizer of an FSDP1 module is saved and loaded."""

    def __init__(self, name: str, optimizer: Optimizer, module: nn.Module) -> None:
        self.name = name
        self._optimizer = optimizer
        self._module = module
        self._groups: list[dict[str, Any]] = []

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: FSDP1 says what is whose."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by parameter name."""
        state: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = ((list(group["params"]), group) for group in state["param_groups"])
        return {"state": _parted(state["state"]), "param_groups": groups_by_first(groups)}

    def template(self, stored: Stored, selected: Selected) -> Any:
        """Return the state that is there, or would be after a step; `UNFILLED` where the checkpoint has none."""
        if not stored.has(self.name):
            return UNFILLED
        present: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        self._groups = present["param_groups"]
        saved = SavedGroups(self.name, stored, selected)
        for group in self._groups:
            saved.check((name,) for name in group["params"])
        groups = stored.nest(f"{self.name}.param_groups", lambda leaf: place_for(stored, leaf, None))
        return {"state": _parted(present["state"]), "param_groups": groups}

    def take(self, state: dict[str, Any]) -> None:
        """Give the optimizer what was loaded."""
        for group in self._groups:
            set_hyper_parameters(group, group["params"], state.get("param_groups", {}))
        loaded: Any = {"state": state.get("state", {}), "param_groups": self._groups}
        set_optimizer_state_dict(self._module, self._optimizer, loaded)


def _parted(state: dict[str, Any]) -> dict[str, Any]:
    """Give every parameter its own step counter: those of one flat parameter share theirs."""
    return {
        name: {
            key: value.clone() if type(value) is torch.Tensor and not value.dim() else value
            for key, value in kept.items()
        }
        for name, kept in state.items()
    }
