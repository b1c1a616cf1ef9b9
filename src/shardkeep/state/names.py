"""
The modules and parameters inside a module, in torch's order and by torch's names, in one loop.

Torch's own ways are a generator inside another for every level; a save goes through a model of some hundred modules
several times, and the training loop waits for it. A module that gives its modules or parameters in its own way is asked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.errors import BadState, UnknownName

_NAMED_MODULES = nn.Module.named_modules


def all_modules(module: nn.Module) -> list[nn.Module]:
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


def all_named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module inside a module, itself included, by every name that it has."""
    found: list[tuple[str, nn.Module]] = []
    _add_named(module, "", found)
    return found


def all_named_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return every parameter inside a module by every name that it has."""
    if not _is_torchs(module, "named_parameters") or not _is_torchs(module, "_named_members"):
        return module.named_parameters(remove_duplicate=False)
    return [
        (f"{prefix}.{name}" if prefix else name, parameter)
        for prefix, part in all_named_modules(module)
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


# Canonical names: what a parameter is called in the plain module, before any wrapper was put around a part of it.
#
# In comes a module as it is trained (DDP, FSDP, compiled, activation checkpointing, in any nesting) and a dotted name
# in it; out come the names a plain copy of the module would give. Nothing is read but attributes of modules.

DDP_MODULE = "module"
COMPILED_MODULE = "_orig_mod"
FSDP_MODULE = "_fsdp_wrapped_module"
CHECKPOINT_MODULE = "_checkpoint_wrapped_module"
FLAT_PARAM = "_flat_param"
EXTRA_STATE = "_extra_state"
FQN_MODIFIERS = "_fqn_modifiers"

_IN_KEYS = (DDP_MODULE, COMPILED_MODULE)
"""The wrappers that are a part of keys in `state_dict()`; the others take themselves out."""

# Importing these takes long, and where a module was never imported there is no object of its classes.
_LATE_WRAPPERS = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", FSDP_MODULE),
    ("torch._dynamo.eval_frame", "OptimizedModule", COMPILED_MODULE),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", CHECKPOINT_MODULE),
)


def canonical_names(
    module: nn.Module,
    name: str,
    *,
    fqn_modifiers: str = FQN_MODIFIERS,
    skip_ddp_prefix: bool = True,
    skip_compiler_prefix: bool = True,
) -> frozenset[str]:
    """
    Return what the thing called `name` in `module` is called in the plain module.

    Wrappers on the way are taken out wherever they are; a name that has none of them, or some, is understood as
    well. A flat parameter of FSDP1 gives the names of all the parameters in it, everything else gives one name. A
    module may have a method (called `fqn_modifiers`) that maps the name of an attribute to the child that hides it:
    that child is no part of names.

    Args:
        module: The root that `name` starts from.
        name: A dotted name of a parameter, a buffer, extra state or a submodule.
        fqn_modifiers: What the method is called by which modules hide children.
        skip_ddp_prefix: False keeps (or puts in) the `module` of DDP, as keys of `state_dict()` have it.
        skip_compiler_prefix: False keeps (or puts in) the `_orig_mod` of torch.compile, likewise.

    Raises:
        UnknownName: (AttributeError) the name leads to nothing.

    """
    skipped = (*((DDP_MODULE,) if skip_ddp_prefix else ()), *((COMPILED_MODULE,) if skip_compiler_prefix else ()))
    kept = tuple(wrapper for wrapper in _IN_KEYS if wrapper not in skipped)
    return frozenset(_resolve(module, name, fqn_modifiers, kept, lenient=False))


def canonical_key(module: nn.Module, key: str, *, fqn_modifiers: str = FQN_MODIFIERS) -> str:
    """
    Return the canonical name for one key of `module.state_dict()`.

    Hooks may add keys that no attribute stands behind; what cannot be followed of such a key stays as it is.
    """
    found = _resolve(module, key, fqn_modifiers, (), lenient=True)
    if len(found) != 1:
        raise BadState(
            f"{key!r} is a flat parameter that stands for {len(found)} parameters",
            hint="call this on the root module that FSDP wraps, not on a part of it",
        )
    return found[0]


def state_dict_key(module: nn.Module, name: str, *, fqn_modifiers: str = FQN_MODIFIERS) -> str:
    """Return the key under which `module.state_dict()` has what is called `name`; what is unknown stays as it is."""
    return _resolve(module, name, fqn_modifiers, _IN_KEYS, lenient=True)[0]


def names_and_keys(module: nn.Module, name: str, *, fqn_modifiers: str = FQN_MODIFIERS) -> Iterator[tuple[str, str]]:
    """Give the canonical name and the key in `state_dict()` of each thing that `name` stands for."""
    names = _resolve(module, name, fqn_modifiers, (), lenient=True)
    keys = _resolve(module, name, fqn_modifiers, _IN_KEYS, lenient=True)
    return zip(names, keys, strict=True)


def all_canonical(module: nn.Module, *, fqn_modifiers: str = FQN_MODIFIERS) -> bool:
    """Say whether every name in a module is canonical as it is: nothing in it wraps or hides anything."""
    parts = all_modules(module)
    if any(_wrapped_attribute_of(kind) is not None or hasattr(kind, fqn_modifiers) for kind in {*map(type, parts)}):
        return False
    return not any(
        FLAT_PARAM in part._parameters or CHECKPOINT_MODULE in part._modules or fqn_modifiers in part.__dict__
        for part in parts
    )


def parameter_names(module: nn.Module, *, fqn_modifiers: str = FQN_MODIFIERS) -> dict[nn.Parameter, tuple[str, ...]]:
    """
    Return all canonical names of each parameter object, tied ones under every name they have.

    The first name is the one that `named_parameters()` of the plain module gives.
    """
    names: dict[nn.Parameter, list[str]] = {}
    canonical = all_canonical(module, fqn_modifiers=fqn_modifiers)
    for name, parameter in all_named_parameters(module):
        found = names.setdefault(parameter, [])
        found += (name,) if canonical else _resolve(module, name, fqn_modifiers, (), lenient=True)
    return {
        parameter: tuple(found) if len(found) == 1 else tuple(dict.fromkeys(found))
        for parameter, found in names.items()
    }


def get_fqns(
    model: nn.Module,
    name: str,
    dsd_fqn_modifiers: str = FQN_MODIFIERS,
    skip_ddp_prefix: bool = True,
    skip_compiler_prefix: bool = True,
) -> set[str]:
    """Return `canonical_names`, with the arguments torch gives this function."""
    return set(
        canonical_names(
            model,
            name,
            fqn_modifiers=dsd_fqn_modifiers,
            skip_ddp_prefix=skip_ddp_prefix,
            skip_compiler_prefix=skip_compiler_prefix,
        )
    )


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return all FSDP1 wrappers in a module, itself included."""
    parts = all_modules(model)
    wrappers = {kind for kind in {*map(type, parts)} if _wrapped_attribute_of(kind) == FSDP_MODULE}
    return [part for part in parts if type(part) in wrappers] if wrappers else []


def hidden_children(module: nn.Module, fqn_modifiers: str = FQN_MODIFIERS) -> dict[str, str]:
    """Return what a module says of itself: name of an attribute -> child that hides it."""
    return dict(getattr(module, fqn_modifiers)()) if _hides_children(module, fqn_modifiers) else {}


def _hides_children(module: nn.Module, fqn_modifiers: str) -> bool:
    # Not of the module itself: what a module lacks it looks for long, and what it wraps may have it.
    return hasattr(type(module), fqn_modifiers) or fqn_modifiers in vars(module)


def _wrapped_attribute(module: Any) -> str | None:
    """Return the attribute that holds the module inside a wrapper; None for a module that wraps nothing."""
    kind: Any = type(module)
    return _wrapped_attribute_of(kind)


@functools.lru_cache(maxsize=4096)  # a class has its bases for good, and those were imported before it was made
def _wrapped_attribute_of(kind: type) -> str | None:
    if issubclass(kind, DistributedDataParallel):
        return DDP_MODULE
    for source, class_name, attribute in _LATE_WRAPPERS:
        wrapper = getattr(sys.modules.get(source), class_name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    return None


def _resolve(module: nn.Module, name: str, modifiers: str, kept: Container[str], *, lenient: bool) -> list[str]:
    """Follow `name` from `module` on; with `lenient`, what leads nowhere is kept as it is."""
    if not name:
        return [name]
    found: list[str] = []
    current: Any = module
    parts = name.split(".")
    at = 0
    while at < len(parts):
        part = parts[at]
        if part == FLAT_PARAM and (inner := list(_names_in_flat_parameter(current, modifiers, kept))):
            return [".".join([*found, one]) for one in inner]
        wrapped = _wrapped_attribute(current)
        if wrapped is not None:
            if wrapped in kept:
                found.append(wrapped)
            at += part == wrapped
            current = getattr(current, wrapped)
            continue
        if part == CHECKPOINT_MODULE:  # of a wrapper that is none of torch's
            current = getattr(current, part, current)
            at += 1
            continue
        hidden = hidden_children(current, modifiers)
        if part in hidden.values() and at < len(parts) - 1:
            current = getattr(current, part)
            at += 1
            continue
        found.append(part)
        current, known = _step(current, part, hidden)
        if not known:
            if lenient or (part == EXTRA_STATE and at == len(parts) - 1):
                return [".".join([*found, *parts[at + 1 :]])]
            raise UnknownName(
                f"{name!r}: there is no {part!r} in the {type(current).__qualname__} at {'.'.join(parts[:at]) or 'the root'}",
                hint="names start at the module that was passed, and are those of named_parameters() or state_dict()",
            )
        at += 1
    return [".".join(found)]


def _step(current: Any, part: str, hidden: dict[str, str]) -> tuple[Any, bool]:
    if part in hidden:
        current = getattr(current, hidden[part], current)
    children = getattr(current, "_modules", {})
    if part in children:
        return children[part], True
    if part != EXTRA_STATE and hasattr(current, part):
        return getattr(current, part), True
    return current, False


def _names_in_flat_parameter(owner: Any, modifiers: str, kept: Container[str]) -> Iterator[str]:
    # A compiled module looks up attributes in what it wraps alone, and has this one itself.
    flat = getattr(owner, "_parameters", {}).get(FLAT_PARAM, getattr(owner, FLAT_PARAM, None))
    for name in getattr(flat, "_fqns", ()):
        yield from _resolve(owner, name, modifiers, kept, lenient=True)


# What a module holds right now: every parameter, persistent buffer and extra state, by name.
#
# Nothing is copied or gathered, unlike with `state_dict()`, and no hook runs.


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
    for prefix, part in all_named_modules(module):
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
