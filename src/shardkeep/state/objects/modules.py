"""
Modules in a state: their parameters and buffers are saved under canonical names and filled where they are.

A parameter on the meta device gets its memory from the load, so that no full copy exists anywhere, and stays the same
object: an optimizer that holds it holds the filled one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shardkeep.errors import StateError
from shardkeep.state.leaves import describe_leaf, dressed_like, is_tensor, materialize, needs_memory
from shardkeep.state.objects.stateful import place_for
from shardkeep.state.objects.stored import Selected, Stored
from shardkeep.state.training.fsdp1 import fsdp_modules
from shardkeep.state.training.live import live_state
from shardkeep.state.training.model import module_state, set_model_state_dict
from shardkeep.state.training.names import EXTRA_STATE
from shardkeep.state.training.options import StateDictOptions


class ModuleObject:
    """How a module is saved and loaded."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = module
        self._memory: dict[int, Any] = {}
        self.communicates = bool(fsdp_modules(module))

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: replicas of a module are replicas."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by canonical name, in its own memory."""
        return module_state(self._module)

    def template(self, stored: Stored, selected: Selected) -> dict[str, Any]:  # noqa: ARG002 - it knows what it needs
        """
        Return the same: that is what is filled.

        What is on the meta device gets memory, one for each parameter, so that ties are those of the module. Extra
        state is what was saved, whatever the module would return now.
        """
        state = module_state(self._module)
        self._memory = {}
        for item in live_state(self._module):
            if item.name == EXTRA_STATE or item.name.endswith(f".{EXTRA_STATE}"):
                if stored.has(f"{self.name}.{item.name}"):
                    state[item.name] = stored.nest(f"{self.name}.{item.name}", lambda leaf: place_for(stored, leaf))
            elif item.name in state and needs_memory(state[item.name]):
                _refuse_observed(f"{self.name}.{item.name}", item.value)
                if id(item.value) not in self._memory:
                    self._memory[id(item.value)] = materialize(item.name, state[item.name])
                state[item.name] = self._memory[id(item.value)]
        return dict(state)

    def take(self, state: dict[str, Any]) -> None:
        """Put in what was not filled in place: tensors that had no memory, extra state, and what hooks made."""
        if not self.communicates:
            own = {item.name: item.value for item in live_state(self._module) if item.value is not None}
            made = _changes_state(self._module)
            for name, tensor in own.items():
                if name in state and tensor.is_meta:
                    # Hooks may have given another form to what is saved: then memory alone, and load_state_dict.
                    _become(tensor, materialize(name, tensor) if made else state[name])
            filled = all(name in own and _same_memory(own[name], leaf) for name, leaf in state.items())
            if filled and not any(part._load_state_dict_post_hooks for part in self._module.modules()):
                return
        # What state_dict() made for the occasion goes back the way it came, and hooks that wait for a load get theirs;
        # whether everything is there was settled before.
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=False))


def _changes_state(module: nn.Module) -> bool:
    """Say whether a module's own hooks or methods may give its state another form than its parameters have."""
    for part in module.modules():
        hooks = (getattr(hook, "hook", hook) for hook in part._state_dict_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            return True
        if not str(getattr(type(part)._save_to_state_dict, "__module__", "")).startswith("torch."):
            return True
    return False


def _refuse_observed(name: str, parameter: torch.Tensor) -> None:
    if weakref.getweakrefs(parameter):
        raise StateError(
            f"{name!r} is on the meta device and cannot be given memory: something holds a weak reference to it",
            hint="give the module memory before the load: module.to_empty(device=...)",
            key=name,
        )


def _become(target: torch.Tensor, filled: torch.Tensor) -> None:
    """Give a tensor on the meta device the memory of another, keeping the object, its class, attributes and hooks."""
    fresh = dressed_like(target, filled.detach())
    hooks = list((target._backward_hooks or {}).values())
    after = list((getattr(target, "_post_accumulate_grad_hooks", None) or {}).values())
    torch.utils.swap_tensors(target, fresh)  # type: ignore[no-untyped-call]  # torch has no types for it
    # The hooks stay in Python's hands, and autograd does not know of them any more: they are registered again.
    target._backward_hooks = None
    target._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it is before the first hook
    for hook in hooks:
        target.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        target.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _same_memory(one: Any, other: Any) -> bool:
    """Say whether two tensors are the same bytes, or both have none."""
    if not is_tensor(other):
        return False
    mine, its = (describe_leaf("", tensor, allow_meta=True) for tensor in (one, other))
    return mine.alias == its.alias and mine.shape == its.shape and mine.dtype == its.dtype
