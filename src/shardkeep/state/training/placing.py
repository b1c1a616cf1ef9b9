"""Whole tensors of optimizer state, cut to the part each rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardkeep.state.toolkit.recognise import is_dtensor
from shardkeep.state.toolkit.spread import broadcast_state_dict, distribute_state_dict
from shardkeep.state.training.options import STATE, StateDictInfo
from shardkeep.state.training.problems import BadOptions
from shardkeep.state.training.saved import Path, at, mapped, tensor_leaves
from shardkeep.state.training.templates import Templates

_WHOLE = object()
"""Stands for a place that takes a tensor as it is."""


def placed(
    trees: Mapping[int, Any],
    whole: Mapping[str, Any],
    parameters: Sequence[tuple[torch.Tensor, str]],
    templates: Templates,
    info: StateDictInfo,
) -> dict[int, Any]:
    """
    Return state trees with each whole tensor cut to this rank's part of it.

    State of the parameter's own shape is laid out as the parameter is; other state as the optimizer does it.

    Args:
        trees: By number of the parameter, with stand-ins for tensors that only rank 0 has.
        whole: By name, the state of these and any other parameters, where this rank has it: others may want it.
        parameters: Each parameter and its name.
        templates: What the optimizer's state looks like.
        info: The options.

    """
    places = {(number, path): leaf for number, tree in trees.items() for path, leaf in tensor_leaves(tree)}
    spread = {place: leaf for place, leaf in places.items() if len(leaf.shape) > 0}
    labels = {place: _label(parameters[place[0]][1], place[1]) for place in spread}
    local: dict[str, Any] = {}
    for (number, path), leaf in spread.items():
        local[labels[number, path]] = _destination(parameters[number][0], path, tuple(leaf.shape), templates)
    full = {_label(name, path): leaf for name, tree in whole.items() for path, leaf in tensor_leaves(tree)}
    device = _device(parameters)
    if info.broadcast_from_rank0:
        broadcast_state_dict(full, local, device=device)
    else:
        distribute_state_dict(full, local, device=device)

    def arrived(number: int, tree: Any) -> Any:
        def leaf(path: Path, value: Any) -> Any:
            return local[labels[number, path]] if (number, path) in labels else value

        return mapped(tree, leaf)

    return {number: arrived(number, tree) for number, tree in trees.items()}


def _label(name: str, path: Path) -> str:
    return ".".join([STATE, name, *map(str, path)])


def _destination(parameter: torch.Tensor, path: Path, shape: tuple[int, ...], templates: Templates) -> Any:
    if not is_dtensor(parameter):
        return _WHOLE
    like = at(templates.at_hand(parameter), path)
    if like is None and shape == tuple(parameter.shape):
        like = parameter
    if like is None:
        like = at(templates.of(parameter), path)
    # On meta: memory for this rank's part is made when it arrives, and nothing that is in use is written to.
    return torch.empty_like(like, device="meta", requires_grad=False) if is_dtensor(like) else _WHOLE


def _device(parameters: Sequence[tuple[torch.Tensor, str]]) -> torch.device:
    devices = {parameter.device: name for parameter, name in parameters}
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise BadOptions(
            f"the optimizer's parameters are on several devices: {found}",
            hint="whole state can be spread over parameters on one device; load state that is sharded instead",
        )
    return next(iter(devices), torch.device("cpu"))
