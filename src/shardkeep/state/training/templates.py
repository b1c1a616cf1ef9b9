"""What an optimizer's state looks like: the state it has, or else the state its first step would make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardkeep.state.training.fresh import rehearsed
from shardkeep.state.training.problems import BadState


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
                self._made, _ = rehearsed(self._optimizer)
            except BadState:
                self._made = {}
        return self._made.get(parameter)
