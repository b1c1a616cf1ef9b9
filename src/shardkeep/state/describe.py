"""
A state as columns: its tensors, the boxes of them that this rank holds, and the memory of each box.

Saving sends the columns to rank 0; loading compares them with the index. Nothing is copied or communicated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.format.boxes import Boxes, IntArray, Ints, matrix_of
from shardkeep.format.dtypes import of_torch
from shardkeep.format.values import Container, Node, leaf_keys, part_name
from shardkeep.state.flatten import KeptForms, flatten
from shardkeep.state.leaves import (
    OrdinaryLeaf,
    OrdinaryLeaves,
    TensorLeaf,
    describe_all_ordinary,
    describe_leaf,
    describe_ordinary,
    is_tensor,
    split_dtensors,
)
from shardkeep.state.names import ModuleTree
from shardkeep.state.objects import is_tensor_or_object


@dataclass(frozen=True)
class Description:
    tree: Node
    values: dict[str, Any]
    leaves: dict[str, Any]
    keys: list[str]
    dtype: npt.NDArray[np.uint8]
    ndim: npt.NDArray[np.uint8]
    shape: IntArray
    origin: npt.NDArray[np.uint8]
    alias: IntArray
    """For each tensor, the position of the first one with the same memory."""
    row_tensor: IntArray
    boxes: Boxes
    pieces: list[torch.Tensor]
    """For each row, the memory of its box."""
    derived: dict[str, Any] = field(default_factory=dict)
    """What the steps of a save have derived from the columns, by name; kept with them (`KeptDescriptions`)."""


class KeptDescriptions:
    """The columns of the last states: describing a state with the same tensors as before costs a comparison. Keeps no tensor."""

    _MOST = 2

    def __init__(self) -> None:
        self.forms: KeptForms = []
        self._kept: list[tuple[OrdinaryLeaves, Description]] = []

    def find(self, keys: list[str], leaves: OrdinaryLeaves) -> Description | None:
        return next((columns for known, columns in self._kept if known == leaves and columns.keys == keys), None)

    def keep(self, leaves: OrdinaryLeaves, description: Description) -> None:
        known = leaves._replace(shapes=list(map(tuple, leaves.shapes)))  # the cycle collector visits no tuples
        columns = replace(description, tree=None, values={}, leaves={}, pieces=[])
        self._kept = [(known, columns), *self._kept][: self._MOST]

    def clear(self) -> None:
        self.forms = []
        self._kept = []


def describe(
    state: Mapping[str, Any],
    *,
    rank: int,
    in_place_of: Mapping[str, Any] | None = None,
    flattened: tuple[dict[str, Any], Node] | None = None,
    filling: bool = False,
    selected: Callable[[str], bool] | None = None,
    kept: KeptDescriptions | None = None,
) -> Description:
    """Describe a state to save, or, if `filling`, to load into; `flattened` is its leaves and skeleton, if they are known."""
    flat, tree = flattened or flatten(
        state,
        rank=rank,
        is_tensor=is_tensor_or_object,
        in_place_of=in_place_of or {},
        kept=kept.forms if kept else None,
    )
    if selected is not None:
        flat = {key: leaf for key, leaf in flat.items() if selected(key)}
    kinds = list(map(type, flat.values()))
    always = {kind for kind in {*kinds} if issubclass(kind, torch.Tensor)}
    values = {
        key: leaf
        for (key, leaf), kind in zip(flat.items(), kinds, strict=True)
        if kind not in always and not is_tensor(leaf)
    }
    tensors = {**flat}
    deque(map(tensors.__delitem__, values), maxlen=0)
    return describe_leaves(tensors, tree=tree, values=values, filling=filling, kept=kept)


def describe_leaves(
    tensors: dict[str, Any],
    *,
    tree: Node = None,
    values: dict[str, Any] | None = None,
    filling: bool = False,
    kept: KeptDescriptions | None = None,
) -> Description:
    """Describe tensor leaves; with what was `kept` of the same ones, if that is given, and keep it."""
    keys, leaves = list(tensors), list(tensors.values())
    found: Sequence[OrdinaryLeaf | TensorLeaf]
    local, specs = split_dtensors(leaves)
    held: list[torch.Tensor] = []
    if (ordinary := describe_all_ordinary(local, specs)) is not None:
        plain = torch.Tensor
        held = [leaf.detach() if leaf.requires_grad or type(leaf) is not plain else leaf for leaf in local]
        if kept is not None and (columns := kept.find(keys, ordinary)) is not None:
            return replace(columns, tree=tree, values=values or {}, leaves=tensors, pieces=held)
    if ordinary is not None and not specs:
        found = list(zip(ordinary.dtypes, ordinary.shapes, ordinary.starts, held, strict=True))
    else:
        found = [
            describe_ordinary(leaf) or describe_leaf(key, leaf, allow_meta=filling, writable=filling)
            for key, leaf in tensors.items()
        ]
    # Those that needed a closer look: in most states none.
    closer = {at: each for at, each in enumerate(found) if type(each) is TensorLeaf}
    dtypes, shapes = [each[0] for each in found], [each[1] for each in found]
    codes = {dtype: of_torch(dtype).code for dtype in set(dtypes)}
    axes = max(map(len, shapes), default=0)
    shape = matrix_of(shapes, axes, 1)
    origin = np.zeros(len(leaves), np.uint8)
    origin[[at for at in closer if isinstance(leaves[at], np.ndarray)]] = 1
    row_tensor, boxes, pieces = _rows(found, closer, shape)
    description = Description(
        tree=tree,
        values=values or {},
        leaves=tensors,
        keys=keys,
        dtype=np.array([codes[dtype] for dtype in dtypes], np.uint8),
        ndim=np.array(list(map(len, shapes)), np.uint8),
        shape=shape,
        origin=origin,
        alias=_aliases(leaves, found, closer),
        row_tensor=row_tensor,
        boxes=boxes,
        pieces=pieces,
    )
    # Not if a rank holds several boxes of a local tensor: `held` are the local tensors.
    if kept is not None and ordinary is not None and [each.shape for each in pieces] == [each.shape for each in held]:
        kept.keep(ordinary, description)
    return description


def _rows(
    found: Sequence[OrdinaryLeaf | TensorLeaf], closer: Mapping[int, TensorLeaf], shape: IntArray
) -> tuple[IntArray, Boxes, list[torch.Tensor]]:
    if not closer:  # the rest says the same of these too
        whole: list[Any] = [each[3] for each in found]
        return np.arange(len(found), dtype=np.int64), Boxes(np.zeros_like(shape), shape.copy()), whole
    axes = shape.shape[1]
    rows: list[tuple[int, Ints, Ints, torch.Tensor]] = []
    for at, each in enumerate(found):
        if isinstance(each, TensorLeaf):
            rows += [(at, offsets, tuple(tensor.shape), tensor) for offsets, tensor in each.pieces]
        else:
            rows.append((at, (0,) * len(each[1]), each[1], each[3]))
    boxes = Boxes(matrix_of([row[1] for row in rows], axes, 0), matrix_of([row[2] for row in rows], axes, 1))
    return np.array([row[0] for row in rows], np.int64), boxes, [row[3] for row in rows]


def _aliases(
    leaves: Sequence[Any], found: Sequence[OrdinaryLeaf | TensorLeaf], closer: Mapping[int, TensorLeaf]
) -> IntArray:
    # Most tensors begin at an address of their own, and need no comparison.
    starts = Counter([each[2] for at, each in enumerate(found) if at not in closer])
    often = {start for start, times in starts.items() if times > 1}
    often.update([piece.tensor.data_ptr() for leaf in closer.values() for piece in leaf.pieces])
    aliases = np.arange(len(found), dtype=np.int64)
    first: dict[Any, int] = {}
    for at, each in enumerate(found) if often else ():
        if isinstance(each, TensorLeaf):
            alias = each.alias
        else:
            alias = describe_leaf("", leaves[at]).alias if each[2] in often else None
        if alias is not None:
            aliases[at] = first.setdefault(alias, at)
    return aliases


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that torch's own layers change in a forward pass, by which they are known in a plain state dict."""


def find_buffers(d: Description, modules: Iterable[ModuleTree]) -> npt.NDArray[np.bool_]:
    """Return which tensors are buffers: of these modules, by their memory, or of a normalisation layer, by their name."""
    found = np.array([key.endswith(_STATISTICS) for key in d.keys], bool)
    buffers = [buffer for tree in modules for part in tree.modules for buffer in part._buffers.values()]
    plain = [each if type(each) is torch.Tensor else getattr(each, "_local_tensor", None) for each in buffers]
    memory = {each.data_ptr() for each in plain if type(each) is torch.Tensor} - {0}
    if memory:
        found[d.row_tensor[[row for row, piece in enumerate(d.pieces) if piece.data_ptr() in memory]]] = True
    return found


def file_groups(tree: Node, keys: Sequence[str]) -> list[str]:
    """Return the group of files of each tensor, its top-level container, so that model and optimizer go to separate files."""
    if not isinstance(tree, Container):
        return ["state"] * len(keys)
    tops = [(part_name(tree.kind, part), node) for part, node in tree.children]
    groups = {name: node for name, node in tops if isinstance(node, Container)}
    if any("." in name for name, _ in tops):  # then the first part of a key may not be the whole name of its container
        group_of = {f"{name}.{key}": name for name, node in groups.items() for key in leaf_keys(node)}
        return [group_of.get(key, "state") for key in keys]
    heads = [key.partition(".") for key in keys]
    return [head if dot and head in groups else "state" for head, dot, _ in heads]
