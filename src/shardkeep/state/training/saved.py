"""
Optimizer state dicts as they are passed around: nested, flat, or as the optimizer itself gives them.

Whatever the form, `read_saved` gives one picture of it: the state of each parameter and the hyper-parameters of each
parameter, by canonical name. Pure functions of dicts; state dicts passed in are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardkeep.state.training.options import PARAM_GROUPS, PARAMS, STATE
from shardkeep.state.training.problems import BadState, MissingKey, UnsupportedValue

Path = tuple[Any, ...]
_FLAT_LEAVES = (torch.Tensor, int, float, str, bytes, list, tuple, type(None))


@dataclass(frozen=True)
class WholeTensor:
    """Stands for a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Saved:
    """The state of one or several optimizers."""

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """For each parameter that has state: the tree of it."""
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each parameter: the hyper-parameters of its group, one dict for all in the group."""
    empty_groups: list[dict[str, Any]] = field(default_factory=list)
    """Hyper-parameters of groups that hold no parameter."""
    was_flat: bool = False
    """Keys of dicts inside the state of a parameter were joined, so that 0 and "0" look the same."""


def read_saved(state_dict: Mapping[str, Any], names: Collection[str], in_order: Sequence[str]) -> Saved:
    """
    Understand an optimizer state dict in any of its forms.

    Args:
        state_dict: Nested by canonical names, flat, or by numbers as `Optimizer.state_dict()` gives it.
        names: All canonical names of the model's parameters.
        in_order: The names of the optimizers' parameters in the order of their groups: what the numbers mean.

    Raises:
        BadState: (RuntimeError) it has none of these forms.

    """
    if STATE in state_dict:
        return _read_nested(state_dict, in_order)
    return _read_flat(state_dict, names)


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """
    Turn the nested form into the flat one: `state.<name>.<key>` and `param_groups.<name>.<key>`.

    Each parameter has the hyper-parameters of its group by itself, so that parts of a model that are on different
    ranks (pipeline stages) have keys of their own.

    Raises:
        UnsupportedValue: (NotImplementedError) state that is no tensor, number, string, list or dict.

    """
    flat: dict[str, Any] = {}
    for name, tree in state_dict[STATE].items():
        for path, value in leaves(tree):
            key = ".".join([STATE, name, *map(str, path)])
            if not isinstance(value, _FLAT_LEAVES):
                raise UnsupportedValue(
                    f"{key!r} is a {type(value).__qualname__}, which the flat form of optimizer state does not hold",
                    hint="leave flatten_optimizer_state_dict out",
                )
            if key in flat:
                raise BadState(
                    f"two values of optimizer state are both {key!r} in the flat form",
                    hint="leave flatten_optimizer_state_dict out",
                )
            flat[key] = value
    for group in state_dict[PARAM_GROUPS]:
        for name in group[PARAMS]:
            flat.update({f"{PARAM_GROUPS}.{name}.{key}": value for key, value in group.items() if key != PARAMS})
    return flat


def leaves(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Go through all values of nested dicts, with the keys that lead to each."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def tensor_leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Go through all tensors, and stand-ins for tensors, of nested dicts, lists and tuples."""
    if isinstance(tree, (torch.Tensor, WholeTensor)):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensor_leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from tensor_leaves(value, (*path, number))


def mapped(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same nesting of dicts, lists and tuples with each value in it changed."""
    if isinstance(tree, Mapping):
        return {key: mapped(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [mapped(value, change, (*path, number)) for number, value in enumerate(tree)]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return change(path, tree)


def at(tree: Any, path: Path) -> Any:
    """Return what is at the end of a path, or None."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def with_keys_of(tree: Mapping[str, Any], template: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give state that was flat the keys it had: numbers, and strings with dots, are known from a template only."""
    known = {".".join(map(str, path)): path for path, _ in leaves(template)}
    result: dict[Any, Any] = {key: {} for key, value in template.items() if isinstance(value, Mapping) and not value}
    for path, value in leaves(tree):
        _put(result, known.get(".".join(path), path), value)
    return result


def skeleton(saved: Saved) -> Saved:
    """Return the same with a stand-in for each tensor that is more than one number, and all else on the CPU."""

    def stand_in(_: Path, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return WholeTensor(tuple(value.shape), value.dtype)
        return on_cpu(_, value)

    def on_cpu(_: Path, value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    hyper = {id(group): mapped(group, on_cpu) for group in saved.groups.values()}  # one dict for a group, as before
    return replace(
        saved,
        state={name: mapped(tree, stand_in) for name, tree in saved.state.items()},
        groups={name: hyper[id(group)] for name, group in saved.groups.items()},
        empty_groups=[mapped(group, on_cpu) for group in saved.empty_groups],
    )


def _read_nested(state_dict: Mapping[str, Any], in_order: Sequence[str]) -> Saved:
    groups = state_dict.get(PARAM_GROUPS)
    if groups is None:
        raise MissingKey(
            f"the optimizer state dict has {STATE!r} and no {PARAM_GROUPS!r}",
            hint="pass all of what get_optimizer_state_dict returned",
        )
    state = state_dict[STATE]
    given = [name for group in groups for name in group[PARAMS]]
    renamed: dict[Any, str] = {}
    if any(isinstance(name, int) for name in (*state, *given)):
        if len(given) != len(in_order):
            raise BadState(
                f"the optimizer state dict is by numbers and has {len(given)} parameters, the optimizer {len(in_order)}",
                hint="pass what get_optimizer_state_dict returned: it is by name",
            )
        renamed = dict(zip(given, in_order, strict=True))
    result = Saved(state={renamed.get(name, name): tree for name, tree in state.items()})
    for group in groups:
        hyper = {key: value for key, value in group.items() if key != PARAMS}
        if not group[PARAMS]:
            result.empty_groups.append(hyper)
        result.groups.update(dict.fromkeys((renamed.get(name, name) for name in group[PARAMS]), hyper))
    return result


def _read_flat(state_dict: Mapping[str, Any], names: Collection[str]) -> Saved:
    result = Saved(was_flat=True)
    known = set(names)
    for key, value in state_dict.items():
        head, *parts = key.split(".")
        if head not in (STATE, PARAM_GROUPS):
            raise BadState(
                f"{key!r} is no key of an optimizer state dict: expected {STATE!r} and {PARAM_GROUPS!r}, or keys that "
                f"begin with one of them",
                hint="pass what get_optimizer_state_dict returned",
            )
        length = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in known), 0)
        if not length:
            continue  # of a parameter that this rank has not
        name, path = ".".join(parts[:length]), tuple(parts[length:])
        if head == STATE:
            _put(result.state.setdefault(name, {}), path, value)
        else:
            result.groups.setdefault(name, {})[".".join(path)] = value
    return result


def _put(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise BadState(f"optimizer state has a value and a dict at {'.'.join(map(str, path))!r}")
    tree[path[-1]] = value
