"""
What a module holds right now: every parameter, persistent buffer and extra state, by name.

Nothing is copied or gathered, unlike with `state_dict()`, and no hook runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardkeep.state.training.names import EXTRA_STATE, FLAT_PARAM, FQN_MODIFIERS, all_canonical, names_and_keys
from shardkeep.state.training.walk import named_modules


@dataclass(frozen=True, slots=True)
class LiveItem:
    """One thing a module holds."""

    name: str
    """Its canonical name."""
    key: str
    """Its key in `state_dict()` of the module."""
    value: Any
    """The tensor itself; None for extra state, which a module makes only when asked."""


def live_state(
    module: nn.Module, fqn_modifiers: str = FQN_MODIFIERS, *, canonical: bool | None = None
) -> Iterator[LiveItem]:
    """
    Go through all that `module.state_dict()` would hold, without calling it.

    What is reachable by several names comes once for each. A flat parameter of FSDP1 comes once for each parameter
    in it, the value being the flat parameter. `canonical` is `all_canonical` of the module, where it is known.
    """
    if canonical is None:
        canonical = all_canonical(module, fqn_modifiers=fqn_modifiers)
    for prefix, part in named_modules(module):
        names: tuple[str, str] | None = None
        for own_name, value in _own(part):
            raw = f"{prefix}.{own_name}" if prefix else own_name
            if canonical:
                yield LiveItem(raw, raw, value)
                continue
            if own_name == FLAT_PARAM:
                for name, key in names_and_keys(module, raw, fqn_modifiers=fqn_modifiers):
                    yield LiveItem(name, key, value)
                continue
            if names is None:  # the way to the module is followed once for all it holds
                name, key = next(names_and_keys(module, raw, fqn_modifiers=fqn_modifiers))
                names = name.removesuffix(own_name), key.removesuffix(own_name)
            yield LiveItem(names[0] + own_name, names[1] + own_name, value)


def names_of_parameters(items: Iterable[LiveItem]) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return the names of each parameter among what a module holds: `names.parameter_names`, from what is at hand."""
    names: dict[nn.Parameter, dict[str, None]] = {}
    for item in items:
        if isinstance(item.value, nn.Parameter):
            names.setdefault(item.value, {})[item.name] = None
    return {parameter: tuple(found) for parameter, found in names.items()}


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield EXTRA_STATE, None
