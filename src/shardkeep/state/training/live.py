"""
What a module holds right now: every parameter, persistent buffer and extra state, by name.

Nothing is copied or gathered, unlike with `state_dict()`, and no hook runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardkeep.state.training.names import EXTRA_STATE, FQN_MODIFIERS, names_and_keys


@dataclass(frozen=True)
class LiveItem:
    """One thing a module holds."""

    name: str
    """Its canonical name."""
    key: str
    """Its key in `state_dict()` of the module."""
    value: Any
    """The tensor itself; None for extra state, which a module makes only when asked."""


def live_state(module: nn.Module, fqn_modifiers: str = FQN_MODIFIERS) -> Iterator[LiveItem]:
    """
    Go through all that `module.state_dict()` would hold, without calling it.

    What is reachable by several names comes once for each. A flat parameter of FSDP1 comes once for each parameter
    in it, the value being the flat parameter.
    """
    for prefix, part in module.named_modules(remove_duplicate=False):
        for own_name, value in _own(part):
            raw = f"{prefix}.{own_name}" if prefix else own_name
            for name, key in names_and_keys(module, raw, fqn_modifiers=fqn_modifiers):
                yield LiveItem(name, key, value)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield EXTRA_STATE, None
