"""
Companions: tensors kept aside, into which those of a state dict are copied again and again.

Here is when a companion fits, and how one leaf is copied into it. Checking changes nothing and reads no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from shardkeep.errors import StateError
from shardkeep.state.overlap import overlaps_itself
from shardkeep.state.toolkit.bits import copy_bits
from shardkeep.state.toolkit.recognise import Path, awaited, is_dtensor, is_sharded_tensor, spell


class CompanionMismatch(StateError, ValueError):
    """A companion tree does not fit the state dict; names the path at which they differ."""


def check_keys(value: Mapping[Any, Any], companion: Any, path: Path) -> None:
    """Raise `CompanionMismatch` unless `companion` is a mapping with the keys of `value`."""
    if not isinstance(companion, Mapping):
        _refuse(path, f"is a dict, its companion a {_name(companion)}")
    if value.keys() != companion.keys():
        missing = [spell((*path, key)) for key in value if key not in companion]
        extra = [spell((*path, key)) for key in companion if key not in value]
        _refuse(path, f"has other keys than its companion; missing there: {missing}, only there: {extra}")


def check_length(value: list[Any] | tuple[Any, ...], companion: Any, path: Path) -> None:
    """Raise `CompanionMismatch` unless `companion` is a list or tuple as long as `value`."""
    if not isinstance(companion, (list, tuple)):
        _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
    if len(value) != len(companion):
        _refuse(path, f"has {len(value)} items, its companion {len(companion)}")


def check_leaf(value: Any, companion: Any, path: Path) -> None:
    """Raise `CompanionMismatch` unless `value` can be copied into `companion` bit for bit."""
    if not isinstance(value, torch.Tensor):
        if isinstance(companion, (torch.Tensor, Mapping)):
            _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
        return
    if not isinstance(companion, torch.Tensor) or _family(value) != _family(companion):
        _refuse(path, f"is a {_name(value)}, its companion a {_name(companion)}")
    if value.dtype != companion.dtype:
        _refuse(path, f"is {value.dtype}, its companion {companion.dtype}")
    if value.size() != companion.size():
        _refuse(path, f"has size {tuple(value.size())}, its companion {tuple(companion.size())}")
    if is_dtensor(value):
        _check_dtensors(value, companion, path)
    elif is_sharded_tensor(value):
        _check_shards(value, companion, path)
    else:
        _check_memory(companion, path)


def copy_leaf(value: Any, companion: Any, *, non_blocking: bool) -> None:
    """Copy a tensor into the companion that `check_leaf` found to fit."""
    with torch.no_grad():
        if is_dtensor(value):
            copy_bits(awaited(companion)._local_tensor, awaited(value)._local_tensor, non_blocking=non_blocking)
        elif is_sharded_tensor(value):
            for source, target in zip(value.local_shards(), companion.local_shards(), strict=True):
                copy_bits(target.tensor, awaited(source.tensor), non_blocking=non_blocking)
        else:
            copy_bits(companion, awaited(value), non_blocking=non_blocking)


def same_layout(a: Any, b: Any) -> bool:
    """Say whether two DTensors are cut in the same way over the same ranks."""
    same_mesh = a.device_mesh is b.device_mesh or torch.equal(a.device_mesh.mesh, b.device_mesh.mesh)
    same_parts = a._local_tensor.shape == b._local_tensor.shape
    return a.size() == b.size() and a.placements == b.placements and same_mesh and same_parts


def _check_dtensors(value: Any, companion: Any, path: Path) -> None:
    if not same_layout(value, companion):
        _refuse(path, f"is cut as {_layout(value)}, its companion as {_layout(companion)}")
    _check_memory(companion._local_tensor, path)


def _check_shards(value: Any, companion: Any, path: Path) -> None:
    ours, theirs = _shards(value), _shards(companion)
    if ours != theirs:
        _refuse(path, f"has local shards (offsets, size) {ours}, its companion {theirs}")
    for shard in companion.local_shards():
        _check_memory(shard.tensor, path)


def _check_memory(memory: torch.Tensor, path: Path) -> None:
    if memory.is_meta:
        _refuse(path, "has a companion on the meta device, which holds no values")
    if memory.layout is torch.strided and overlaps_itself(memory):
        _refuse(path, "has a companion that is expanded: several of its elements share memory")


def _layout(dtensor: Any) -> str:
    return f"{dtensor.placements} over {dtensor.device_mesh}, local part {tuple(dtensor._local_tensor.shape)}"


def _shards(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in tensor.local_shards()]


def _family(tensor: torch.Tensor) -> str:
    return "DTensor" if is_dtensor(tensor) else "ShardedTensor" if is_sharded_tensor(tensor) else "Tensor"


def _refuse(path: Path, what: str) -> NoReturn:
    raise CompanionMismatch(
        f"{spell(path)!r} {what}", hint="make a new companion: create_cpu_state_dict(state_dict)", key=spell(path)
    )


def _name(obj: Any) -> str:
    return type(obj).__qualname__
