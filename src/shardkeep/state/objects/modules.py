"""
Modules in a state: their parameters and buffers are saved under canonical names and filled where they are.

A parameter on the meta device gets its memory from the load, so that no full copy exists anywhere, and stays the same
object: an optimizer that holds it holds the filled one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shardkeep.state.leaves import describe_leaf, is_tensor
from shardkeep.state.objects.stored import Selected, Stored
from shardkeep.state.training.fsdp1 import fsdp_modules
from shardkeep.state.training.live import live_state
from shardkeep.state.training.model import module_state, set_model_state_dict
from shardkeep.state.training.options import StateDictOptions


class ModuleObject:
    """How a module is saved and loaded."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = module
        self._before: dict[str, Any] = {}

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: replicas of a module are replicas."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by canonical name, in its own memory."""
        return module_state(self._module)

    def template(self, stored: Stored, selected: Selected) -> dict[str, Any]:  # noqa: ARG002 - it knows what it needs
        """Return the same: that is what is filled."""
        self._before = module_state(self._module)
        return dict(self._before)

    def take(self, state: dict[str, Any]) -> None:
        """Put in what was not filled in place: tensors that had no memory, extra state, and what hooks made."""
        if not fsdp_modules(self._module):
            own = {item.name: item.value for item in live_state(self._module) if item.value is not None}
            for name, leaf in state.items():
                if leaf is not self._before[name] and name in own:
                    _become(own[name], leaf)
            filled = all(name in own and _same_memory(own[name], leaf) for name, leaf in state.items())
            if filled and not any(part._load_state_dict_post_hooks for part in self._module.modules()):
                return
        # What state_dict() made for the occasion goes back the way it came, and hooks that wait for a load get theirs;
        # whether everything is there was settled before.
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=False))


def _become(target: torch.Tensor, filled: torch.Tensor) -> None:
    """Give a tensor on the meta device the memory of another, keeping the object."""
    if target is filled or _same_memory(target, filled):
        return
    fresh = filled.detach()
    if isinstance(target, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]  # torch has no types for it


def _same_memory(one: Any, other: Any) -> bool:
    """Say whether two tensors are the same bytes, or both have none."""
    if not is_tensor(other):
        return False
    mine, its = (describe_leaf("", tensor, allow_meta=True) for tensor in (one, other))
    return mine.alias == its.alias and mine.shape == its.shape and mine.dtype == its.dtype
