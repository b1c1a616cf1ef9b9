"""
State for an optimizer that has made no step yet: what a step with zero gradients and a learning rate of zero makes.

The step is made by a stand-in on copies of the parameters, so that nothing of the real thing is touched: parameters
(a step at rate zero turns -0.0 into 0.0), gradients, learning rates, counters, step hooks, schedulers that watch for
steps, and the random number generators.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizers

from shardkeep.state.training.options import PARAMS
from shardkeep.state.training.problems import BadState

LR = "lr"
_SET_APART = {"state", "param_groups", "step"}
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def is_fresh(optimizer: Optimizer) -> bool:
    """
    Say whether an optimizer has no state yet and can be given some by a step with zero gradients.

    Gradients that are there mean that training is under way, with an optimizer that keeps no state.
    """
    return not optimizer.state and all(
        parameter.grad is None for group in optimizer.param_groups for parameter in group[PARAMS]
    )


def init_optim_state(optim: Optimizer) -> None:
    """
    Give a fresh optimizer the state of a step with zero gradients; leave one that is not fresh as it is.

    Parameters, gradients, learning rates and random number generators stay as they are, and no step hook runs.

    Raises:
        BadState: (RuntimeError) the optimizer cannot make such a step.

    """
    if is_fresh(optim):
        _install(optim, *rehearsed(optim))


@contextmanager
def with_initial_state(optimizer: Optimizer) -> Iterator[None]:
    """Give a fresh optimizer initial state for as long as this is entered; it leaves as fresh as it came."""
    if not is_fresh(optimizer):
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    _install(optimizer, *rehearsed(optimizer))
    try:
        yield
    finally:
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def rehearsed(optimizer: Optimizer) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]]]:
    """
    Return the state and the param groups an optimizer would have after a step with zero gradients.

    The optimizer is not changed. Needs memory for a copy of the parameters and for their gradients, for a while.

    Raises:
        BadState: (RuntimeError) its step fails.

    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]
    copies = {id(parameter): _copy_of(parameter) for parameter in parameters}
    stand_in = _stand_in_for(optimizer, copies)
    try:
        with _generators_kept(parameters), _hooks_away():
            _plain_step(stand_in)
    except Exception as exc:
        raise BadState(
            f"{type(optimizer).__qualname__} has no state yet, and a step with zero gradients, which makes it, "
            f"failed: {type(exc).__name__}: {exc}",
            hint="call this after the first step of training",
        ) from exc
    state = {
        parameter: stand_in.state[copies[id(parameter)]]
        for parameter in parameters
        if copies[id(parameter)] in stand_in.state
    }
    for group, real in zip(stand_in.param_groups, optimizer.param_groups, strict=True):
        group[PARAMS] = real[PARAMS]
        if LR in real:
            group[LR] = real[LR]
    return state, stand_in.param_groups


def _install(optimizer: Optimizer, state: dict[torch.Tensor, Any], groups: list[dict[str, Any]]) -> None:
    optimizer.state.update(state)
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group.update(new)


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    copied = parameter.detach().clone()
    if isinstance(parameter, nn.Parameter):
        copied = nn.Parameter(copied, requires_grad=parameter.requires_grad)
    # Marks that users put on parameters tell some optimizers what to do; what makes a tensor is its own already.
    copied.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(copied)})
    copied.requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        copied.grad = torch.zeros_like(parameter)
    return copied


def _stand_in_for(optimizer: Optimizer, copies: dict[int, torch.Tensor]) -> Optimizer:
    """Make an optimizer of the same class that holds the copies; what it changes, it changes in itself alone."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name not in _SET_APART:
            stand_in.__dict__[name] = OrderedDict() if name.endswith("_hooks") else _copied(value, copies)
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = _copied(optimizer.param_groups, copies)
    for group in stand_in.param_groups:
        if LR in group:
            rate = group[LR]
            group[LR] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return stand_in


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Copy tensors and containers, with copies of parameters in their place; other objects stay the same ones."""
    if isinstance(value, torch.Tensor):
        return copies[id(value)] if id(value) in copies else value.detach().clone()
    if isinstance(value, Optimizer):
        return _stand_in_for(value, copies)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copied(one, copies) for key, one in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copied(one, copies) for one in value)
    return value


def _plain_step(optimizer: Optimizer) -> None:
    """Call the class's own step, without the wrapping that runs hooks and profiling."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    with torch.no_grad():
        step(optimizer)


@contextmanager
def _hooks_away() -> Iterator[None]:
    """Take away the hooks that run at the step of every optimizer: a subclass's step may call one that runs them."""
    found = [getattr(torch_optimizers, name, None) for name in _GLOBAL_HOOKS]
    hooks = [(table, dict(table)) for table in found if table]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, before in hooks:
            table.update(before)


@contextmanager
def _generators_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put all random number generators back to where they were."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = accelerator.type if accelerator is not None else "cuda"
    numbers = {parameter.device.index for parameter in parameters if parameter.device.type == kind}
    devices = [torch.accelerator.current_device_index() if number is None else number for number in numbers]
    try:
        with torch.random.fork_rng(devices=devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
