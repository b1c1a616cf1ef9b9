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
from shardkeep.state.training.live import live_state
from shardkeep.state.training.model import module_state, set_model_state_dict
from shardkeep.state.training.names import EXTRA_STATE
from shardkeep.state.training.options import StateDictOptions


class ModuleObject:
    """How a module is saved and loaded."""

    def __init__(self, name: str, module: nn.Module, memory: dict[int, Any], *, communicates: bool) -> None:
        """
        Take the module, and where new memory for parameters is noted, so that one that is in two has one.

        A module of which FSDP1 has flattened a part communicates.
        """
        self.name = name
        self._module = module
        self._memory = memory
        self.communicates = communicates

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return nothing: replicas of a module are replicas."""
        return {}

    def give(self, differing: Collection[str]) -> dict[str, Any]:  # noqa: ARG002
        """Return its state by canonical name, in its own memory."""
        return module_state(self._module)

    def template(self, stored: Stored, selected: Selected) -> dict[str, Any]:
        """
        Return the same: that is what is filled.

        What is on the meta device gets memory, one for each parameter, so that ties are those of the module. Extra
        state is what was saved, whatever the module would return now.
        """
        state = module_state(self._module)
        for item in live_state(self._module):
            if item.name == EXTRA_STATE or item.name.endswith(f".{EXTRA_STATE}"):
                if stored.has(f"{self.name}.{item.name}"):
                    state[item.name] = stored.nest(f"{self.name}.{item.name}", lambda leaf: place_for(stored, leaf))
            elif item.name in state and needs_memory(state[item.name]) and selected(f"{self.name}.{item.name}"):
                _refuse_observed(f"{self.name}.{item.name}", item.value)
                if id(item.value) not in self._memory:
                    self._memory[id(item.value)] = materialize(item.name, state[item.name])
                state[item.name] = self._memory[id(item.value)]
        return dict(state)

    def take(self, state: dict[str, Any]) -> None:
        """Put in what was not filled in place: tensors that had no memory, extra state, and what hooks made."""
        if not self.communicates:
            own = {item.name: item.value for item in live_state(self._module) if item.value is not None}
            through_itself = _has_own_ways(self._module)
            for name, tensor in own.items():
                if tensor.is_meta and (name in state or through_itself):
                    # What is saved may have another form or name than the parameter: then memory alone comes from here.
                    _become(tensor, materialize(name, tensor) if through_itself else state[name])
            filled = all(name in own and _same_memory(own[name], leaf) for name, leaf in state.items())
            if filled and not through_itself:
                return
        # What state_dict() made for the occasion goes back the way it came, and hooks that wait for a load get theirs;
        # whether everything is there was settled before.
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=False))


_WAYS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _has_own_ways(module: nn.Module) -> bool:
    """Say whether hooks or methods that are not torch's have a part in giving or taking a module's state."""
    for part in module.modules():
        ways = [part.__dict__.get(name, getattr(type(part), name)) for name in _WAYS]
        hooks = [hook for name in _HOOKS for hook in getattr(part, name).values()]
        if not all(map(_is_torchs, [*ways, *hooks])):
            return True
    return False


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "hook", function)  # of a wrapper that torch puts around hooks
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _refuse_observed(name: str, parameter: torch.Tensor) -> None:
    why = "something holds a weak reference to it" if weakref.getweakrefs(parameter) else ""
    if parameter._is_view():
        why = "it is a view of another tensor"
    if why:
        raise StateError(
            f"{name!r} is on the meta device and cannot be given memory: {why}",
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
