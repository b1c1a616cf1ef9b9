"""
Canonical names: the names that things in a module have in the plain module, without any wrapper around its parts.

Wrappers are DDP, FSDP1, `torch.compile` and activation checkpointing, in any nesting. A flat parameter of FSDP1 stands for
all parameters in it. A module may also hide children from names: it has a method (`fqn_modifiers`) that maps the name of
an attribute to the child that holds it. Only attributes of modules are read: nothing is copied or gathered, no hook runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import contains, itemgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkeep.errors import BadState, UnknownName

DDP_MODULE = "module"
COMPILED_MODULE = "_orig_mod"
FSDP_MODULE = "_fsdp_wrapped_module"
CHECKPOINT_MODULE = "_checkpoint_wrapped_module"
FLAT_PARAM = "_flat_param"
EXTRA_STATE = "_extra_state"
FQN_MODIFIERS = "_fqn_modifiers"

PATCHED = "_shardkeep_patched"
"""Marks functions that replace an object's own `state_dict` and `load_state_dict`."""
_IN_KEYS = (DDP_MODULE, COMPILED_MODULE)
"""The wrappers whose names are part of keys in `state_dict()`; the others remove theirs."""
_NAMED_MODULES = nn.Module.named_modules

# Importing these modules takes long. If one was never imported, there is no object of its class.
_LATE_WRAPPERS = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", FSDP_MODULE),
    ("torch._dynamo.eval_frame", "OptimizedModule", COMPILED_MODULE),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", CHECKPOINT_MODULE),
)


def get_fqns(
    model: nn.Module,
    name: str,
    dsd_fqn_modifiers: str = FQN_MODIFIERS,
    skip_ddp_prefix: bool = True,
    skip_compiler_prefix: bool = True,
) -> set[str]:
    """
    Return the canonical names of the thing called `name` in `model`; the arguments are torch's.

    The name may contain all, some or none of the wrappers on its way. A flat parameter of FSDP1 has the names of all
    parameters in it, everything else has one name. If `skip_ddp_prefix` or `skip_compiler_prefix` is False, the `module` of
    DDP or the `_orig_mod` of torch.compile is kept (or added). A name that leads to nothing is an `UnknownName`.
    """
    kept = (*(() if skip_ddp_prefix else (DDP_MODULE,)), *(() if skip_compiler_prefix else (COMPILED_MODULE,)))
    return set(_resolve(model, name, dsd_fqn_modifiers, kept, lenient=False))


def canonical_key(module: nn.Module, key: str, *, fqn_modifiers: str = FQN_MODIFIERS) -> str:
    """Return the canonical name for one key of `module.state_dict()`; a part that hooks added stays as it is."""
    found = _resolve(module, key, fqn_modifiers, (), lenient=True)
    if len(found) != 1:
        raise BadState(
            f"{key!r} is a flat parameter that stands for {len(found)} parameters",
            hint="call this on the root module that FSDP wraps, not on a part of it",
        )
    return found[0]


def state_dict_key(module: nn.Module, name: str, *, fqn_modifiers: str = FQN_MODIFIERS) -> str:
    """Return the key in `module.state_dict()` for a name; unknown names stay as they are."""
    return _resolve(module, name, fqn_modifiers, _IN_KEYS, lenient=True)[0]


class ModuleTree:
    """Every module inside a module, itself included."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.named: list[tuple[str, nn.Module]] = []
        """Under every name that it has."""
        # Without torch's generator for every level, and without recursion: training waits for this.
        left = [("", root)]
        while left:
            prefix, part = left.pop()
            own = part.__dict__
            if type(part).named_modules is not _NAMED_MODULES or "named_modules" in own:
                self.named += part.named_modules(set(), prefix, remove_duplicate=False)
                continue
            self.named.append((prefix, part))
            if children := own["_modules"]:
                start = f"{prefix}." if prefix else ""
                left += [(start + name, child) for name, child in children.items() if child is not None][::-1]
        self.modules = list(dict.fromkeys([part for _, part in self.named]))


def all_canonical(tree: ModuleTree, *, fqn_modifiers: str = FQN_MODIFIERS) -> bool:
    """Return True if every name in a module is canonical, because nothing in it wraps or hides anything."""
    if any(_wrapped_attribute(kind) is not None or hasattr(kind, fqn_modifiers) for kind in {*map(type, tree.modules)}):
        return False
    parts = list(map(vars, tree.modules))
    hides = any(map(contains, map(itemgetter("_parameters"), parts), repeat(FLAT_PARAM)))
    wraps = any(map(contains, map(itemgetter("_modules"), parts), repeat(CHECKPOINT_MODULE)))
    return not (hides or wraps or any(map(contains, parts, repeat(fqn_modifiers))))


def parameter_names(items: Iterable[LiveItem]) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return all canonical names of each parameter, the one that `named_parameters()` of the plain module uses first."""
    names: dict[nn.Parameter, dict[str, None]] = {}
    for item in items:
        if isinstance(item.value, nn.Parameter):
            names.setdefault(item.value, {})[item.name] = None
    return {parameter: tuple(found) for parameter, found in names.items()}


def fsdp_modules(tree: ModuleTree) -> list[nn.Module]:
    kinds = {kind for kind in set(map(type, tree.modules)) if _wrapped_attribute(kind) == FSDP_MODULE}
    return [part for part in tree.modules if type(part) in kinds] if kinds else []


@functools.lru_cache(maxsize=4096)  # the bases of a class never change, and were imported before it was made
def _wrapped_attribute(kind: type) -> str | None:
    """Return the attribute that holds the module inside a wrapper of this class; None if it wraps nothing."""
    if issubclass(kind, DistributedDataParallel):
        return DDP_MODULE
    for source, class_name, attribute in _LATE_WRAPPERS:
        wrapper = getattr(sys.modules.get(source), class_name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    return None


def _resolve(module: nn.Module, name: str, modifiers: str, kept: Container[str], *, lenient: bool) -> list[str]:
    """Follow `name` from `module` on, without wrappers other than `kept`; `lenient` keeps what leads nowhere."""
    if not name:
        return [name]
    found: list[str] = []
    current: Any = module
    parts = name.split(".")
    at = 0
    while at < len(parts):
        part = parts[at]
        if part == FLAT_PARAM:
            # A compiled module looks up attributes only in what it wraps, but has this one itself.
            flat = getattr(current, "_parameters", {}).get(FLAT_PARAM, getattr(current, FLAT_PARAM, None))
            if inner := getattr(flat, "_fqns", ()):
                ways = [_resolve(current, one, modifiers, kept, lenient=True) for one in inner]
                return [".".join([*found, one]) for way in ways for one in way]
        kind: Any = type(current)
        wrapped = _wrapped_attribute(kind)
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
        hidden = _hidden_children(current, modifiers)
        if part in hidden.values() and at < len(parts) - 1:
            current = getattr(current, part)
            at += 1
            continue
        found.append(part)
        if part in hidden:
            current = getattr(current, hidden[part], current)
        children = getattr(current, "_modules", {})
        if part in children:
            current = children[part]
        elif part != EXTRA_STATE and hasattr(current, part):
            current = getattr(current, part)
        elif lenient or (part == EXTRA_STATE and at == len(parts) - 1):
            return [".".join([*found, *parts[at + 1 :]])]
        else:
            raise UnknownName(
                f"{name!r}: there is no {part!r} in the {type(current).__qualname__} at {'.'.join(parts[:at]) or 'the root'}",
                hint="names start at the module that was passed, and are those of named_parameters() or state_dict()",
            )
        at += 1
    return [".".join(found)]


def _hidden_children(module: Any, modifiers: str) -> dict[str, str]:
    """Return the attributes that a module hides in children: name of the attribute -> child."""
    # Looked up on the class: a module's own lookup is slow to fail, and may reach into what it wraps.
    hides = hasattr(type(module), modifiers) or modifiers in vars(module)
    return dict(getattr(module, modifiers)()) if hides else {}


@dataclass(frozen=True, slots=True)
class LiveItem:
    name: str
    key: str
    value: Any
    """The tensor itself; None for extra state, which a module makes only when asked."""


def live_state(
    tree: ModuleTree, fqn_modifiers: str = FQN_MODIFIERS, *, canonical: bool | None = None
) -> Iterator[LiveItem]:
    """Yield everything that `state_dict()` of a module would hold, under each of its names, without calling it."""
    if canonical is None:
        canonical = all_canonical(tree, fqn_modifiers=fqn_modifiers)
    for prefix, part in tree.named:
        names: tuple[str, str] | None = None
        for own_name, value in _own_items(part):
            raw = f"{prefix}.{own_name}" if prefix else own_name
            if canonical:
                yield LiveItem(raw, raw, value)
                continue
            if names is None or own_name == FLAT_PARAM:  # the way to the module is followed once for all it holds
                found = [_resolve(tree.root, raw, fqn_modifiers, kept, lenient=True) for kept in ((), _IN_KEYS)]
                if own_name == FLAT_PARAM:
                    yield from (LiveItem(name, key, value) for name, key in zip(*found, strict=True))
                    continue
                names = found[0][0].removesuffix(own_name), found[1][0].removesuffix(own_name)
            yield LiveItem(names[0] + own_name, names[1] + own_name, value)


def _own_items(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield EXTRA_STATE, None


_SAYS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_modules")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


def plain_state(tree: ModuleTree) -> dict[str, Any] | None:
    """Return the tensors of `state_dict()` of a module, not detached; None if a class or a hook has a say in what it returns."""
    if any(
        getattr(kind, name) is not getattr(nn.Module, name) for kind in {*map(type, tree.modules)} for name in _SAYS
    ):
        return None
    parts = list(map(vars, tree.modules))
    if any(any(map(itemgetter(name), parts)) for name in _HOOKS) or any(
        any(map(contains, parts, repeat(name))) for name in _SAYS
    ):
        return None
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in tree.named
        for name, value in (_own_items(part) if part._buffers else part._parameters.items())
        if value is not None
    }


def own_method(obj: Any, name: str) -> Callable[..., Any]:
    """Return a method of an object; the method of its class if `patch_*_state_dict` replaced it."""
    found: Callable[..., Any] = getattr(obj, name)
    if getattr(found, PATCHED, False):
        found = getattr(type(obj), name).__get__(obj)
    return found
