"""An opened checkpoint without some of its leaves: a smaller index over the same files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardkeep.errors import StateError
from shardkeep.exchange.picking import selected
from shardkeep.format.columns import concat_ranges
from shardkeep.format.index import Index, decode_index, encode_index
from shardkeep.format.tree import Container, Node, decode_tree, encode_tree, join, leaf_keys
from shardkeep.plan.loads import chunk_rows
from shardkeep.run.read import Source
from shardkeep.state.names import Patterns


def without(source: Source, drop: Patterns) -> Source:
    """
    Leave out the leaves of these names.

    Raises:
        StateError: a pattern matches nothing, or some items of a list would go, and others change their numbers.

    """
    if drop is None:
        return source
    tree = decode_tree(source.index.tree)
    unwanted = selected(list(leaf_keys(tree)), "drop", drop)
    keep = {key for key in leaf_keys(tree) if not unwanted(key)}
    return replace(source, index=_smaller(source.index, _pruned(tree, None, keep), keep))


def _pruned(node: Node, name: str | None, keep: set[str]) -> Node:
    if node is None:
        return None
    children: list[tuple[Any, Node]] = []
    for part, child in node.children:
        own = join(name, node.kind, part)
        if child is None:
            if own in keep:
                children.append((part, child))
            continue
        smaller = _pruned(child, own, keep)
        # What was empty before stays.
        if smaller is not None and (smaller.children or not child.children):
            children.append((part, smaller))
    if node.kind in {"list", "tuple"} and children and len(children) < len(node.children):
        raise StateError(
            f"drop: {len(node.children) - len(children)} of the {len(node.children)} items of {name!r} would go, and"
            " the others change their numbers",
            hint=f"drop all of it: {name!r}",
        )
    return Container(node.kind, tuple(children))


def _smaller(index: Index, tree: Node, keep: set[str]) -> Index:
    rows = [row for key, row in index.tensor_rows.items() if key in keep]
    # Of tensors that share memory, the first that stays has it now.
    owner = np.asarray(index.tensors.alias, np.int64)[rows]
    first: dict[int, int] = {}
    for at, old in enumerate(owner.tolist()):
        first.setdefault(old, at)
    alias = np.array([first[old] for old in owner.tolist()], np.int64)
    own = alias == np.arange(len(rows))
    begin, count = chunk_rows(index, owner)
    count = np.where(own, count, 0)
    tensors = replace(index.tensors.take(np.array(rows, np.int64)), alias=alias)
    encoded = encode_index(
        keys=[index.keys.raw(row).decode() for row in rows],
        tensors=tensors,
        chunk_ends=np.cumsum(count, dtype=np.int64),
        chunks=index.chunks.take(concat_ranges(begin, count)),
        values=[(key, index.value_data.raw(row)) for key, row in index.value_rows.items() if key in keep],
        tree=encode_tree(tree),
    )
    return decode_index(encoded, where="the chosen part of the index")
