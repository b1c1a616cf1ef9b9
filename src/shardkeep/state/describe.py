"""
A state as columns: its tensors, the boxes of them that this rank holds, and the memory of each box.

Saving sends the columns to rank 0; loading compares them with the index. Nothing is copied or communicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.format.boxes import Boxes, IntArray, Ints, matrix_of
from shardkeep.format.dtypes import of_torch
from shardkeep.format.values import Container, Node, leaf_keys, part_name
from shardkeep.state.flatten import FlatState, KeptForms, flatten
from shardkeep.state.leaves import (
    OrdinaryLeaf,
    OrdinaryLeaves,
    TensorLeaf,
    describe_blocks,
    describe_leaf,
    describe_ordinary,
    is_tensor,
)
from shardkeep.state.names import ModuleTree
from shardkeep.state.objects import is_tensor_or_object


@dataclass(frozen=True)
class Description:
    tree: Node
    values: dict[str, Any]
    leaves: dict[str, Any]
    """The tensors of a state to fill, by key; none of a state to save."""
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
        self.without_elements: set[str] = set()
        """Names of tensors that torch's layout stores apart, because they had no elements."""
        self._kept: list[tuple[list[OrdinaryLeaves], Description]] = []

    def find(self, keys: list[str], leaves: Sequence[Any]) -> Description | None:
        """Return the columns of the same tensors, with the pieces of these."""
        for blocks, columns in self._kept:
            if columns.keys != keys:
                continue
            pieces: list[torch.Tensor] = []
            for known, found in zip(blocks, describe_blocks(leaves), strict=True):
                if found is None or found[0] != known:
                    break
                pieces += found[1]
            else:
                return replace(columns, pieces=pieces)
        return None

    def keep(self, blocks: Iterable[OrdinaryLeaves], description: Description) -> None:
        # As tuples, because the cycle collector does not visit them.
        known = [each._replace(shapes=list(map(tuple, each.shapes))) for each in blocks]
        columns = replace(description, tree=None, values={}, leaves={}, pieces=[])
        self._kept = [(known, columns), *self._kept][: self._MOST]

    def clear(self) -> None:
        self.forms = []
        self.without_elements = set()
        self._kept = []


def describe(
    state: Mapping[str, Any],
    *,
    rank: int,
    in_place_of: Mapping[str, Any] | None = None,
    flattened: FlatState | None = None,
    filling: bool = False,
    selected: Callable[[str], bool] | None = None,
    kept: KeptDescriptions | None = None,
) -> Description:
    """Describe a state to save, or, if `filling`, to load into; `flattened` is the same state, if that is known."""
    names, leaves, classes, tree = flattened or flatten(
        state,
        rank=rank,
        is_tensor=is_tensor_or_object,
        in_place_of=in_place_of or {},
        kept=kept.forms if kept else None,
    )
    if selected is not None:
        flags = list(map(selected, names))
        names, leaves = list(compress(names, flags)), list(compress(leaves, flags))
    tensors, values = {cls for cls in classes if issubclass(cls, torch.Tensor)}, dict[str, Any]()
    if tensors != classes:
        flags = [cls in tensors or is_tensor(leaf) for cls, leaf in zip(map(type, leaves), leaves, strict=True)]
        values = {name: leaf for name, leaf, flag in zip(names, leaves, flags, strict=True) if not flag}
        names, leaves = list(compress(names, flags)), list(compress(leaves, flags))
    return _describe(names, leaves, tree, values, filling=filling, kept=kept)


def describe_leaves(
    tensors: dict[str, Any], *, filling: bool = False, kept: KeptDescriptions | None = None
) -> Description:
    """Describe tensor leaves; with what was `kept` of the same ones, if that is given, and keep it."""
    return _describe(list(tensors), list(tensors.values()), None, {}, filling=filling, kept=kept)


def _describe(
    keys: list[str],
    leaves: list[Any],
    tree: Node,
    values: dict[str, Any],
    *,
    filling: bool,
    kept: KeptDescriptions | None,
) -> Description:
    found: Sequence[OrdinaryLeaf | TensorLeaf]
    if kept is not None and (columns := kept.find(keys, leaves)) is not None:
        return replace(columns, tree=tree, values=values)
    blocks = list(describe_blocks(leaves))
    ordinary = [each for each in blocks if each is not None]
    if len(ordinary) == len(blocks) and not any(each.specs for each, _ in ordinary):
        found = [
            leaf for each, held in ordinary for leaf in zip(each.dtypes, each.shapes, each.starts, held, strict=True)
        ]
    else:
        found = [
            describe_ordinary(leaf) or describe_leaf(key, leaf, allow_meta=filling, writable=filling)
            for key, leaf in zip(keys, leaves, strict=True)
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
        values=values,
        leaves=dict(zip(keys, leaves, strict=True)) if filling else {},
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
    # Not if a rank holds several boxes of a local tensor: blocks say the shapes of the local tensors.
    local = [shape for each, _ in ordinary for shape in each.shapes]
    if kept is not None and len(ordinary) == len(blocks) and [each.shape for each in pieces] == local:
        kept.keep([each for each, _ in ordinary], description)
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
