"""
The types of the state dicts that are read and set.

To import the classes of sharded tensors takes a second, so nothing but annotations and the drop-in imports this.
"""

from __future__ import annotations

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.tensor import DTensor

FQNS_T = set[str]
PrimitiveType = DTensor | ShardedTensor | torch.Tensor | int | float | str
ValueType = PrimitiveType | list[PrimitiveType] | tuple[PrimitiveType] | dict[str, "ValueType"]
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]
