"""
The modules and parameters inside a module, in torch's order and by torch's names, in one loop.

Torch's own ways are a generator inside another for every level; a save goes through a model of some hundred modules
several times, and the training loop waits for it. A module that gives its modules or parameters in its own way is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_NAMED_MODULES = nn.Module.named_modules


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module inside a module, itself included, by every name that it has."""
    return _found(module, None)


def modules(module: nn.Module) -> list[nn.Module]:
    """Return every module inside a module, itself included, once."""
    if not _is_torchs(module, "modules"):
        return list(module.modules())
    return [part for _, part in _found(module, set())]


def named_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return every parameter inside a module by every name that it has."""
    if not _is_torchs(module, "named_parameters") or not _is_torchs(module, "_named_members"):
        return module.named_parameters(remove_duplicate=False)
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, part in named_modules(module)
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]


def _found(module: nn.Module, seen: set[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """Go through a module; each module comes once if those that came are to be noted in `seen`."""
    found: list[tuple[str, nn.Module]] = []
    _walk(module, "", seen, found)
    return found


def _walk(module: nn.Module, prefix: str, seen: set[nn.Module] | None, found: list[tuple[str, nn.Module]]) -> None:
    if getattr(module.named_modules, "__func__", None) is not _NAMED_MODULES:
        found += module.named_modules(set() if seen is None else seen, prefix, remove_duplicate=seen is not None)
        return
    if seen is not None:
        if module in seen:
            return
        seen.add(module)
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, f"{prefix}.{name}" if prefix else name, seen, found)


def _is_torchs(module: nn.Module, method: str) -> bool:
    own: Any = getattr(module, method)
    return getattr(own, "__func__", None) is getattr(nn.Module, method)
