"""
Hyper-parameters: each group of a live optimizer gets those that its parameters were saved with.

Groups are found by the names in them, so they may come in another order, or from several optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardkeep.state.training.options import PARAMS
from shardkeep.state.training.problems import BadOptions, BadState
from shardkeep.state.training.saved import Saved

_OF_THE_LIVE_GROUP = (PARAMS, "param_names")


def group_for_load(
    group: Mapping[str, Any], names: Sequence[str], saved: Saved, optimizer: Optimizer, *, strict: bool
) -> dict[str, Any]:
    """
    Return the hyper-parameters a live group is to have: those saved, and its own where nothing was saved.

    Args:
        group: The live group.
        names: The names its parameters were saved under.
        saved: What was saved.
        optimizer: The optimizer of the group.
        strict: Every parameter of the group that is trained must have been saved, with the same values.

    Raises:
        BadState: (RuntimeError) a parameter has no hyper-parameters, or two of one group have different ones.
        BadOptions: (ValueError) a group without parameters cannot be told from others.

    """
    live = {key: value for key, value in group.items() if key not in _OF_THE_LIVE_GROUP}
    if not group[PARAMS]:
        return live | _fitted(_empty_group(group, saved, optimizer), live)
    found = [(name, saved.groups[name]) for name in names if name in saved.groups]
    missing = [name for name in names if name not in saved.groups]
    if strict and _some_trained(group, names, missing):
        raise BadState(
            f"the saved param groups do not hold {missing[0]!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="StateDictOptions(strict=False) loads the others, and leaves the hyper-parameters of groups it finds "
            "nothing for",
            missing=missing,
        )
    if not found:
        return live
    first, hyper = found[0]
    for name, other in found[1:]:
        if strict and other is not hyper:
            _check_same(first, hyper, name, other)
    return live | _fitted(hyper, live)


def _some_trained(group: Mapping[str, Any], names: Sequence[str], missing: Sequence[str]) -> bool:
    parameters = group[PARAMS]
    if len(parameters) != len(names):  # flat parameters hold several
        return bool(missing)
    return any(p.requires_grad for p, name in zip(parameters, names, strict=True) if name in missing)


def _empty_group(group: Mapping[str, Any], saved: Saved, optimizer: Optimizer) -> dict[str, Any]:
    alike = [one for one in optimizer.param_groups if not one[PARAMS]]
    if not saved.empty_groups and saved.was_flat:
        return {}  # the flat form has nothing to say of groups without parameters
    if len(alike) != len(saved.empty_groups):
        raise BadOptions(
            f"the optimizer has {len(alike)} param groups without parameters, the state dict {len(saved.empty_groups)}: "
            f"there is no telling which belongs to which",
            hint="leave such groups out, or load each optimizer from a state dict of its own",
        )
    return saved.empty_groups[next(number for number, one in enumerate(alike) if one is group)]


def _check_same(first: str, hyper: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> None:
    for key in hyper.keys() | other.keys():
        if key not in _OF_THE_LIVE_GROUP and not _equal(hyper.get(key), other.get(key)):
            raise BadState(
                f"{first!r} and {name!r} are in one param group, but were saved with different {key!r}: "
                f"{hyper.get(key)!r} and {other.get(key)!r}",
                hint="group the parameters as they were; StateDictOptions(strict=False) takes the first value for all",
            )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            bool(torch.as_tensor(one).cpu().equal(torch.as_tensor(other).cpu())) if None not in (one, other) else False
        )
    return bool(one == other)


def _fitted(hyper: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved values in the form the live group has: a rate that is a tensor stays one, where it is."""
    result = {}
    for key, value in hyper.items():
        if key in _OF_THE_LIVE_GROUP:
            continue
        held = live.get(key)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.detach().to(held.device)  # noqa: PLW2901 - goes into the result
        elif isinstance(held, torch.Tensor) and isinstance(value, (int, float)):
            value = torch.full_like(held, value)  # noqa: PLW2901 - goes into the result
        result[key] = value
    return result
