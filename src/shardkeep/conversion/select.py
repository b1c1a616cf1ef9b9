"""
Which tensors of a checkpoint go out, under which names and in which dtype. Pure but for what a caller's rename does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardkeep.conversion.pipeline import TensorPart
from shardkeep.conversion.to_native import Contents
from shardkeep.engine.reader import Source
from shardkeep.errors import KeyCollision, StateError
from shardkeep.format.boxes import IntArray, concat_ranges, matrix_of, whole
from shardkeep.format.dtypes import DType, by_name
from shardkeep.format.index import Chunks, Index, Tensors, checked_index, decode_index, encode_index, strings_of
from shardkeep.format.tree import Container, Node, decode_tree, encode_tree, join, leaf_keys
from shardkeep.plan.load_plan import chunk_rows
from shardkeep.state.patterns import Patterns, Renames, checked_patterns, closest, matcher, renamer

_CAST = ("float16", "bfloat16", "float32", "float64")
"""What is converted; numbers of other kinds, and those of eight bits, which come with scales, stay what they are."""
_SHORT = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}


@dataclass(frozen=True)
class Selection:
    """What goes out, in the order of the state."""

    tensors: dict[str, TensorPart]
    """By the name that each has outside."""
    ties: dict[str, str]
    """Names of tensors that are the same memory as another one, which is among the tensors."""
    values: dict[str, str]
    """The key of each plain value, by the name it has outside."""
    names: list[str]
    """All names, in the order of the state."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.tensors.values())


def select(
    index: Index,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    prefix: str | None = None,
    dtype: DType | None = None,
) -> Selection:
    """
    Choose what goes out.

    Args:
        index: what there is.
        include: only these names, as the checkpoint has them.
        exclude: not these.
        rename: from a name without its prefix to the one outside; None drops it.
        prefix: only names that begin so, without it; None: `model.` where the state has a container `model` at its top,
            else nothing.
        dtype: what floating point numbers of 16 to 64 bits become.

    Raises:
        StateError: nothing is left, a pattern matches no name, or an argument makes no sense.
        KeyCollision: two tensors would have one name.

    """
    tree = decode_tree(index.tree)
    keys = list(leaf_keys(tree))
    prefix = _prefix_of(tree) if prefix is None else prefix
    wanted = name_filter(keys, "include", include)
    unwanted = name_filter(keys, "exclude", exclude) if exclude is not None else (lambda _: False)
    outside = renamer(rename)
    names: dict[str, str] = {}
    for key in keys:
        if not key.startswith(prefix) or not wanted(key) or unwanted(key):
            continue
        name = _renamed(outside, key[len(prefix) :], key)
        if name is not None and name in names:
            raise KeyCollision(f"{names[name]!r} and {key!r} would both be called {name!r}", key=key)
        if name is not None:
            names[name] = key
    picked = _select(index, names, dtype)
    if not picked.tensors:
        begin = f" that begins with {prefix!r}" if prefix else ""
        raise StateError(
            f"of {len(keys)} names, none{begin} is a tensor that was asked for",
            hint=f"the checkpoint has {', '.join(repr(key) for key in keys[:3])} …; see prefix, include and exclude",
        )
    return picked


def cast_target(dtype: object) -> DType | None:
    """
    Return the type that somebody names: `bf16`, `bfloat16`, `torch.bfloat16`.

    Raises:
        StateError: nothing can be converted to it.

    """
    if dtype is None:
        return None
    name = re.sub(r"^torch\.", "", str(dtype).lower())
    name = _SHORT.get(name, name)
    if name not in _CAST:
        raise StateError(
            f"dtype={dtype!r}: weights cannot become that",
            hint="give one of bf16, fp16, fp32, fp64 (or bfloat16, float16 …)",
        )
    return by_name(name)


def _prefix_of(tree: object) -> str:
    if isinstance(tree, Container) and any(
        part == "model" and isinstance(node, Container) for part, node in tree.children
    ):
        return "model."
    return ""


def name_filter(keys: list[str], argument: str, patterns: Patterns) -> Callable[[str], bool]:
    """Make the test for names that an argument asks for; one of its patterns that matches nothing is an error."""
    given = checked_patterns(argument, patterns)
    for pattern in given if isinstance(given, tuple) else ():
        if not any(map(matcher(pattern), keys)):
            meant = closest(pattern, keys)
            raise StateError(
                f"{argument}: {pattern!r} matches no name of the checkpoint",
                hint=f"did you mean {meant!r}?" if meant else f"it has {', '.join(map(repr, keys[:3]))} …",
            )
    return matcher(given)


def _renamed(outside: Callable[[str], str | None], name: str, key: str) -> str | None:
    new = outside(name)
    if new is None:
        return None
    if not isinstance(new, str) or not new:
        raise StateError(f"rename gives {new!r} for {name!r}, which is no name", key=key)
    return new


def _select(index: Index, names: dict[str, str], dtype: DType | None) -> Selection:
    tensors: dict[str, TensorPart] = {}
    ties: dict[str, str] = {}
    values: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, key in names.items():
        row = index.tensor_rows.get(key)
        if row is None:
            values[name] = key
            continue
        # The first in the order of the state stands for all, as in torch's own lists of parameters.
        owner = int(index.tensors.alias[row])
        if first.setdefault(owner, name) != name:
            ties[name] = first[owner]
            continue
        stored, shape = index.dtype(row), index.shape(row)
        target = dtype if dtype is not None and stored.name in _CAST else stored
        tensors[name] = TensorPart(key, owner, whole(shape), target)
    return Selection(tensors, ties, values, list(names))


# What was picked of a checkpoint as the contents of a native one: a flat dict under the names outside.


def selection_contents(picked: Selection, index: Index) -> Contents:
    """Describe what was picked of the checkpoint that has this index."""
    keys = sorted([*picked.tensors, *picked.ties], key=str.encode)
    row_of = {key: row for row, key in enumerate(keys)}
    parts = [picked.tensors[picked.ties.get(key, key)] for key in keys]
    axes = max((len(part.box.sizes) for part in parts), default=0)
    none = np.zeros((0, axes), np.int64)
    values = [(name, index.value_data.raw(index.value_rows[key])) for name, key in picked.values.items()]
    encoded = encode_index(
        keys=keys,
        tensors=Tensors(
            dtype=np.array([part.dtype.code for part in parts], np.uint8),
            ndim=np.array([len(part.box.sizes) for part in parts], np.uint8),
            shape=matrix_of([part.box.sizes for part in parts], axes, 1),
            # What was converted may be of a dtype that numpy has not.
            origin=np.array(
                [int(index.tensors.origin[p.row]) if p.dtype is index.dtype(p.row) else 0 for p in parts], np.uint8
            ),
            alias=np.array([row_of[picked.ties.get(key, key)] for key in keys], np.int64),
        ),
        chunk_ends=np.zeros(len(keys), np.int64),
        chunks=Chunks(none, none, np.zeros(0, np.int64), np.zeros(0, np.int64)),
        values=sorted(values, key=lambda entry: entry[0].encode()),
        tree=encode_tree(Container("dict", tuple((name, None) for name in picked.names))),
    )
    return Contents(decode_index(encoded, where="what was picked"), [part.row for part in parts])


# An opened checkpoint without some of its leaves: a smaller index over the same files.


def drop_leaves(source: Source, drop: Patterns) -> Source:
    """
    Leave out the leaves of these names.

    Raises:
        StateError: a pattern matches nothing, or some items of a list would go, and others change their numbers.

    """
    if drop is None:
        return source
    tree = decode_tree(source.index.tree)
    unwanted = name_filter(list(leaf_keys(tree)), "drop", drop)
    keep = {key for key in leaf_keys(tree) if not unwanted(key)}
    return source.selected(*_smaller(source.index, _pruned(tree, None, keep), keep))


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


def _smaller(index: Index, tree: Node, keep: set[str]) -> tuple[Index, IntArray]:
    """Return the index of what is kept, and the rows of its chunks in the old one."""
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
    chunks = concat_ranges(begin, count)
    values = [(key, row) for key, row in index.value_rows.items() if key in keep]
    smaller = Index(
        keys=strings_of(index.keys.raw(row) for row in rows),
        tensors=tensors,
        chunk_ends=np.cumsum(count, dtype=np.int64),
        chunks=index.chunks.take(chunks),
        value_keys=strings_of(key.encode() for key, _ in values),
        value_data=strings_of(index.value_data.raw(row) for _, row in values),
        make_tree=lambda: encode_tree(tree),
    )
    return checked_index(smaller, where="the chosen part of the index"), chunks
