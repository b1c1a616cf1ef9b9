"""
Which kind of tensor a leaf is, and tensors that are still on their way.

DTensor, ShardedTensor and AsyncCollectiveTensor are looked for only where their modules are loaded already: importing
them takes a second, and where they were never imported there is none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

Path = tuple[Any, ...]
"""Keys and indices that lead from the root of a tree to one of its values."""


def is_dtensor(obj: Any) -> bool:
    """Say whether this is a DTensor."""
    return _is_a(obj, "torch.distributed.tensor", "DTensor")


def is_sharded_tensor(obj: Any) -> bool:
    """Say whether this is a ShardedTensor."""
    return _is_a(obj, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


def is_plain(obj: Any) -> bool:
    """Say whether this is a tensor that one rank holds as a whole."""
    return isinstance(obj, torch.Tensor) and not is_dtensor(obj) and not is_sharded_tensor(obj)


def awaited(tensor: Any) -> Any:
    """
    Return the tensor once its values are there.

    A tensor that an asynchronous collective is still writing is waited for. A DTensor over such a tensor comes back
    as a new DTensor over the finished one; anything else as it is.
    """
    if is_dtensor(tensor):
        local = tensor._local_tensor
        if not is_pending(local):
            return tensor
        return type(tensor)(local.trigger_wait(), tensor._spec, requires_grad=tensor.requires_grad)
    return tensor.trigger_wait() if is_pending(tensor) else tensor


def spell(path: Path) -> str:
    """Write a path as errors show it."""
    return ".".join(map(str, path)) if path else "the state dict itself"


def is_pending(obj: Any) -> bool:
    """Say whether this is a tensor that an asynchronous collective may still be writing."""
    return _is_a(obj, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _is_a(obj: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    # A module that is still being imported, by another thread, has not all its names yet.
    kind = getattr(loaded, name, None)
    return kind is not None and isinstance(obj, kind)
