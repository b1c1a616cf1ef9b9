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


def modules(module: nn.Module) -> list[nn.Module]:
    """Return every module inside a module, itself included, once."""
    if not _is_torchs(module, "modules"):
        return list(module.modules())
    seen: set[nn.Module] = set()
    found: list[nn.Module] = []
    ahead = [module]
    while ahead:
        part = ahead.pop()
        if getattr(part.named_modules, "__func__", None) is not _NAMED_MODULES:
            found += [each for _, each in part.named_modules(seen)]
        elif part not in seen:
            seen.add(part)
            found.append(part)
            if part._modules:
                ahead += [child for child in part._modules.values() if child is not None][::-1]
    return found


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module inside a module, itself included, by every name that it has."""
    found: list[tuple[str, nn.Module]] = []
    _add_named(module, "", found)
    return found


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


def _add_named(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    if getattr(module.named_modules, "__func__", None) is not _NAMED_MODULES:
        found += module.named_modules(set(), prefix, remove_duplicate=False)
        return
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _add_named(child, f"{prefix}.{name}" if prefix else name, found)


def _is_torchs(module: nn.Module, method: str) -> bool:
    own: Any = getattr(module, method)
    return getattr(own, "__func__", None) is getattr(nn.Module, method)
