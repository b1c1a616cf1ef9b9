"""
Tensors on the meta device of a state that is about to be loaded, given memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.state.toolkit.recognise import is_dtensor, is_sharded_tensor

Change = Callable[[Any], Any]


def _init_state_dict(state_dict: dict[str, Any]) -> Any:
    """
    Replace, in place, each tensor on meta by an empty one on the current device; leave everything else as it is.

    Raises:
        BrokenProtocol: (a RuntimeError) a ShardedTensor is on meta.

    """
    _iterate_state_dict(state_dict, _real_dtensor, _real_sharded_tensor, _real_tensor)


def _iterate_state_dict(
    iter_object: Any, dtensor_func: Change, sharded_tensor_func: Change, tensor_func: Change
) -> Any:
    """
    Put what the functions return in the place of each tensor, in nested dicts, lists and tuples.

    Dicts and lists are changed in place, and tuples replaced only if something in them was. Anything else stays the
    object it is, whatever its type.
    """
    if is_dtensor(iter_object):
        return dtensor_func(iter_object)
    if is_sharded_tensor(iter_object):
        return sharded_tensor_func(iter_object)
    if isinstance(iter_object, torch.Tensor):
        return tensor_func(iter_object)
    functions = (dtensor_func, sharded_tensor_func, tensor_func)
    if isinstance(iter_object, (MutableMapping, list)):
        places = list(iter_object.items() if isinstance(iter_object, MutableMapping) else enumerate(iter_object))
        for key, value in places:
            if (new := _iterate_state_dict(value, *functions)) is not value:
                iter_object[key] = new
        return iter_object
    if isinstance(iter_object, tuple):
        items = [_iterate_state_dict(value, *functions) for value in iter_object]
        if all(new is old for new, old in zip(items, iter_object, strict=True)):
            return iter_object
        return type(iter_object)(*items) if hasattr(iter_object, "_fields") else tuple(items)
    return iter_object


def device_of_group(group: Any = None) -> torch.device:
    """Return the device that a process group moves by default: its only one, or the CPU if that is among them."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    kinds = c10d._device_capability(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def current_device(kind: str) -> torch.device:
    """Return this process's device of a kind."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == kind:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(kind)


def _real_dtensor(value: Any) -> Any:
    if not value.is_meta:
        return value
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - loaded already

    local = torch.empty_like(value.to_local(), device=current_device(value.device_mesh.device_type))
    # Shape and stride are given: they do not follow from the local ones where shards are uneven.
    return DTensor.from_local(
        local,
        device_mesh=value.device_mesh,
        placements=value.placements,
        run_check=False,
        shape=value.size(),
        stride=value.stride(),
    )


def _real_sharded_tensor(value: Any) -> Any:
    if value.device == torch.device("meta"):
        raise BrokenProtocol(
            "a ShardedTensor on the meta device cannot be loaded into", hint="give it memory first, or use a DTensor"
        )
    return value


def _real_tensor(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device=_default_device()) if value.is_meta else value


def _default_device() -> torch.device:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return current_device(device_of_group().type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else current_device(accelerator.type)
