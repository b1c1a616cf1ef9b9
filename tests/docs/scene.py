"""What every page may take for granted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    """Whatever a snippet calls `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute something."""
        for layer in self.layers:
            x = layer(x)
        return x


def names() -> dict[str, Any]:
    """Return the names that snippets have without a line that makes them: torch, a model and its optimizer."""
    torch.manual_seed(0)
    model = Model()
    return {"torch": torch, "nn": nn, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
