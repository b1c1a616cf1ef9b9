"""
Tensors of every kind, taken apart into plain ones and put together again over copies of those.

A DTensor is its local part, a ShardedTensor its local shards, a wrapping subclass what it wraps; any of these may be
one of the others. What is put together never requires a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardkeep.state.toolkit.offload import _sharded_like
from shardkeep.state.toolkit.recognise import awaited, is_dtensor, is_sharded_tensor

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Opened:
    """A tensor taken apart."""

    parts: Tensors
    """Strided tensors with memory of their own."""
    rebuild: Callable[[Tensors], Any]
    """Makes the tensor again, over one new tensor for each part."""


def open_tensor(tensor: Any) -> Opened:
    """Take a tensor apart. One that an asynchronous collective still writes is waited for."""
    tensor = awaited(tensor)
    if is_sharded_tensor(tensor):
        return _open_all([shard.tensor for shard in tensor.local_shards()], lambda made: _sharded_like(tensor, made))
    if is_dtensor(tensor):
        return _open_all([tensor._local_tensor], lambda made: dtensor_over(made[0], tensor._spec, type(tensor)))
    if is_traceable_wrapper_subclass(tensor):
        return _open_wrapper(tensor)
    if tensor.is_meta:
        return Opened([], lambda _: tensor.detach())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        # There is no one run of memory to copy; torch knows how.
        copied = tensor.detach().to("cpu", copy=True)
        return Opened([], lambda _: copied)
    return Opened([tensor], lambda made: _as_kind_of(tensor, made[0]))


def _open_all(inner: list[Any], rebuild: Callable[[Tensors], Any]) -> Opened:
    opened = [open_tensor(each) for each in inner]

    def assemble(made: Tensors) -> Any:
        rest = iter(made)
        return rebuild([each.rebuild([next(rest) for _ in each.parts]) for each in opened])

    return Opened([part for each in opened for part in each.parts], assemble)


def _open_wrapper(tensor: Any) -> Opened:
    names, context = tensor.__tensor_flatten__()
    fields = {name: getattr(tensor, name) for name in names}
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    def wrap(made: Tensors) -> Any:
        inner = fields | dict(zip(tensors, made, strict=True))
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())

    return _open_all(list(tensors.values()), wrap)


def dtensor_over(local: torch.Tensor, spec: Any, kind: Any) -> Any:
    """Return a DTensor, or one of a class derived from it, over a local part."""
    # The offset of the tensor it is made with becomes its own, and torch then takes it for one with memory: to pickle
    # it is a crash. So it is made with a blank, which has none.
    blank = local.new_empty(()).expand(local.shape)
    made = kind(blank, spec, requires_grad=False)
    made._local_tensor = local
    return made


def _as_kind_of(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    return made if plain else made.as_subclass(type(tensor))
