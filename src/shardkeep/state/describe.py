"""
A state as columns: which tensors it has, which boxes of them this rank holds, and which memory those are.

Saving sends the columns to rank 0; loading compares them with the index. Nothing is copied and no rank is spoken to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.format.columns import Boxes, IntArray, matrix_of
from shardkeep.format.dtypes import of_torch
from shardkeep.format.tree import Container, Node, leaf_keys, part_name
from shardkeep.state.flatten import flatten
from shardkeep.state.leaves import describe_leaf, is_tensor
from shardkeep.state.objects.find import is_tensor_or_object


@dataclass(frozen=True)
class Description:
    """What one rank's state holds."""

    tree: Node
    values: dict[str, Any]
    """Leaves that are not tensors."""
    leaves: dict[str, Any]
    """Leaves that are, as the state has them."""
    keys: list[str]
    dtype: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    shape: IntArray
    origin: npt.NDArray[np.uint8]
    alias: IntArray
    """For each tensor, the position of the first one that is the same memory."""
    row_tensor: IntArray
    boxes: Boxes
    pieces: list[torch.Tensor]
    """For each row, the memory of its box."""


def describe(
    state: Mapping[str, Any],
    *,
    rank: int,
    in_place_of: Mapping[str, Any] | None = None,
    filling: bool = False,
    selected: Callable[[str], bool] | None = None,
) -> Description:
    """
    Describe a state that is to be saved, or (`filling`) one that is to be loaded into.

    `in_place_of` has, by flat name, what stands for objects in the state. Leaves that are not `selected` stand in the
    tree alone, and are not looked at.
    """
    flat, tree = flatten(state, rank=rank, is_tensor=is_tensor_or_object, in_place_of=in_place_of or {})
    if selected is not None:
        flat = {key: leaf for key, leaf in flat.items() if selected(key)}
    tensors = {key: leaf for key, leaf in flat.items() if is_tensor(leaf)}
    values = {key: leaf for key, leaf in flat.items() if key not in tensors}
    return describe_leaves(tensors, tree=tree, values=values, filling=filling)


def describe_leaves(
    tensors: dict[str, Any], *, tree: Node = None, values: dict[str, Any] | None = None, filling: bool = False
) -> Description:
    """Describe tensor leaves alone."""
    dtype, shapes, alias, origin = bytearray(), [], [], bytearray()
    row_tensor, offsets, sizes, pieces = [], [], [], []
    first: dict[Any, int] = {}
    codes: dict[torch.dtype, int] = {}
    for at, (key, obj) in enumerate(tensors.items()):
        leaf = describe_leaf(key, obj, allow_meta=filling, writable=filling)
        code = codes.get(leaf.dtype)
        if code is None:
            code = codes[leaf.dtype] = of_torch(leaf.dtype).code
        dtype.append(code)
        shapes.append(leaf.shape)
        origin.append(isinstance(obj, np.ndarray))
        alias.append(at if leaf.alias is None else first.setdefault(leaf.alias, at))
        for piece in leaf.pieces:
            row_tensor.append(at)
            offsets.append(piece.offsets)
            sizes.append(tuple(piece.tensor.shape))
            pieces.append(piece.tensor)
    axes = max(map(len, shapes), default=0)
    return Description(
        tree=tree,
        values=values or {},
        leaves=tensors,
        keys=list(tensors),
        dtype=np.frombuffer(dtype, np.uint8),
        ndim=np.array([len(shape) for shape in shapes], np.uint8),
        shape=matrix_of(shapes, axes, 1),
        origin=np.frombuffer(origin, np.uint8),
        alias=np.array(alias, np.int64),
        row_tensor=np.array(row_tensor, np.int64),
        boxes=Boxes(matrix_of(offsets, axes, 0), matrix_of(sizes, axes, 1)),
        pieces=pieces,
    )


def file_groups(description: Description) -> list[str]:
    """
    Name the group of files each tensor belongs to: the top-level container it is in.

    So model and optimizer go to separate files, and either can be dropped. Tensors at the top level are "state".
    """
    groups: dict[str, str] = {}
    if isinstance(description.tree, Container):
        for part, node in description.tree.children:
            if isinstance(node, Container):
                name = part_name(description.tree.kind, part)
                groups.update((f"{name}.{key}", name) for key in leaf_keys(node))
    return [groups.get(key, "state") for key in description.keys]
