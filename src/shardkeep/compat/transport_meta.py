"""
What a state dict looks like when it is sent to a peer: its skeleton, its plain values, and what its tensors are.

Tensors go as their own bytes: dense ones as they lie in memory, others in order. The dataclasses have torch's names
and fields; `paths` are flat names, and `treespec` is our skeleton.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardkeep.errors import UnsupportedLeaf
from shardkeep.format.dtypes import of_torch
from shardkeep.format.tree import Container
from shardkeep.format.values import encode_value
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.stage.aliases import extent
from shardkeep.state.flatten import flatten
from shardkeep.state.toolkit.recognise import Path, awaited, is_dtensor, is_sharded_tensor, spell

_CONTAINERS: Final = (dict, OrderedDict, list, tuple, torch.Size)


@dataclass
class _TensorMeta:
    """A tensor whose bytes follow."""

    shape: torch.Size
    dtype: torch.dtype
    storage_offset: int
    """Always 0: no more is sent than the tensor's own bytes."""
    stride: tuple[int, ...]
    nbytes: int


@dataclass
class _DTensorMeta:
    """The local part of a DTensor, and how the whole is spread."""

    local: _TensorMeta
    spec: DTensorSpec


@dataclass
class _ShardedTensorMeta:
    """The local shards of a ShardedTensor, and where all of them are."""

    local_shards_meta: list[_TensorMeta]
    local_shards_shard_metadata: list[ShardMetadata]
    sharded_tensor_metadata: ShardedTensorMetadata


@dataclass
class _StateDictMeta:
    """All of a state dict but the bytes of its tensors."""

    treespec: Container
    paths: list[str]
    """The flat name of each leaf."""
    non_tensor_leaves: list[object | _TensorMeta | _DTensorMeta | _ShardedTensorMeta]
    bare: bool = False
    """What was sent is no mapping: it is the one value of the skeleton."""


def take_apart(state: object) -> tuple[dict[str, Any], Container, bool]:
    """Return the leaves of a state by flat name, its skeleton, and whether it is no mapping."""
    bare = not isinstance(state, Mapping)
    mapping: Any = {"": state} if bare else state
    leaves, tree = flatten(mapping, rank=0, is_tensor=lambda value: isinstance(value, torch.Tensor))
    return leaves, tree, bare


def _prepare_state_dict(state_dict: object, device: torch.device) -> tuple[_StateDictMeta, list[torch.Tensor]]:
    """
    Describe a state dict, and return the bytes of its tensors in the order in which they are described.

    Raises:
        UnsupportedLeaf: a value that is neither a tensor nor plain data, or a container of a class that cannot be
            made again; names its key.

    """
    del device
    _refuse_other_kinds(state_dict)
    leaves, tree, bare = take_apart(state_dict)
    described: list[object] = []
    tensors: list[torch.Tensor] = []
    for name, leaf in leaves.items():
        meta, parts = _describe(name, leaf)
        described.append(meta)
        tensors += parts
    return _StateDictMeta(tree, list(leaves), described, bare), tensors


def _refuse_other_kinds(value: object, path: Path = (), above: frozenset[int] = frozenset()) -> None:
    """Refuse containers that would arrive as others: classes are not sent, for they are code."""
    if isinstance(value, torch.Tensor) or not isinstance(value, (Mapping, list, tuple)) or id(value) in above:
        return  # one that contains itself is refused when it is taken apart
    if type(value) not in _CONTAINERS:
        raise UnsupportedLeaf(
            f"{spell(path)!r} is a {type(value).__qualname__}, which would arrive as another container",
            hint="make it a dict, an OrderedDict, a list or a tuple",
            key=spell(path),
        )
    for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
        _refuse_other_kinds(child, (*path, key), above | {id(value)})


def _describe(name: str, leaf: Any) -> tuple[object, list[torch.Tensor]]:
    if not isinstance(leaf, torch.Tensor):
        encode_value(leaf, key=name)  # refused here, before anything has been sent
        return leaf, []
    leaf = awaited(leaf)
    if is_dtensor(leaf):
        data, meta = _prepare_tensor(leaf._local_tensor, name)
        return _DTensorMeta(meta, leaf._spec), [data]
    if is_sharded_tensor(leaf):
        shards = leaf.local_shards()
        pairs = [_prepare_tensor(shard.tensor, name) for shard in shards]
        described = _ShardedTensorMeta([meta for _, meta in pairs], [s.metadata for s in shards], leaf.metadata())
        return described, [data for data, _ in pairs]
    data, meta = _prepare_tensor(leaf, name)
    return meta, [data]


def _prepare_tensor(tensor: torch.Tensor, name: str = "a tensor") -> tuple[torch.Tensor, _TensorMeta]:
    """Return a tensor's bytes as a row, on its own device, and what they mean."""
    if not (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)) or tensor.is_meta:
        what = "a tensor on the meta device" if tensor.is_meta else f"a {type(tensor).__qualname__}"
        raise UnsupportedLeaf(f"{name!r} is {what}, which cannot be sent", hint="send plain tensors")
    of_torch(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise UnsupportedLeaf(f"{name!r} is of layout {tensor.layout}, which cannot be sent", hint="send it dense")
    plain = tensor.detach().resolve_conj().resolve_neg()
    dense = plain if is_dense(plain) else plain.contiguous()
    return bytes_of(dense), _TensorMeta(dense.shape, dense.dtype, 0, dense.stride(), dense.nbytes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements fill one run of memory, in any order, each with its own place."""
    expected = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1 and step != expected:
            return tensor.numel() == 0
        expected *= n
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense tensor as a row of bytes."""
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    if tensor.numel() == 0:
        return row
    start, stop = extent(tensor)
    return row.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View all of the storage that a plain tensor lies in as elements of a type."""
    if type(tensor) is not torch.Tensor:
        raise BrokenProtocol(f"only plain tensors have one storage, not a {type(tensor).__qualname__}")
    storage = tensor.untyped_storage()
    row = torch.empty(0, dtype=dtype, device=tensor.device)
    return row.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
