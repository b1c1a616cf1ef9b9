"""Selects what is written: for an export, tensors with new names and dtypes; for a conversion, all but some leaves."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from shardkeep.conversion.pipeline import TensorPart
from shardkeep.display import format_count
from shardkeep.errors import KeyCollision, MalformedFile, StateError
from shardkeep.format.boxes import whole
from shardkeep.format.dtypes import DType, by_name
from shardkeep.format.index import Index, build_index, strings_of
from shardkeep.format.values import Container, Node, decode_tree, encode_tree, join, leaf_keys
from shardkeep.state import patterns
from shardkeep.state.patterns import Patterns, Renames

_CAST = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that are converted. Others stay: 8-bit floats, for example, come with scales."""
_MODELS = ("model", "state_dict", "model_state_dict", "module")
"""What frameworks and tutorials call a model in a checkpoint."""
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
    tensors: dict[str, TensorPart]
    ties: dict[str, str]
    """For tensors that share the memory of another one, which is in `tensors`: the name of that one."""
    values: dict[str, str]
    """The keys of plain values, by their new names."""
    tree: Node
    skipped: dict[str, int] = field(default_factory=dict)


def select(
    index: Index,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    prefix: str | None = None,
    dtype: DType | None = None,
) -> Selection:
    tree = decode_tree(index.tree)
    keys = list(leaf_keys(tree))
    start = _model_prefix(tree) if prefix is None else prefix
    if start and all(key.startswith(f"{start}.") for key in keys if key.startswith(start)):
        start += "."  # a prefix may be written without its last dot
    include, exclude = patterns.checked_patterns("include", include), patterns.checked_patterns("exclude", exclude)
    wanted, outside = patterns.selector(include, exclude), patterns.renamer(rename)
    inside = [key[len(start) :] for key in keys if key.startswith(start)]
    _raise_if_unused("include", patterns.unused_patterns(include, keys), keys)
    _raise_if_unused("exclude", patterns.unused_patterns(exclude, keys), keys)
    _raise_if_unused("rename", patterns.unused_renames(rename, inside), inside)
    # Optimizer state is no part of a model, unless the caller names it.
    given = (start, *(include if isinstance(include, tuple) else ()))
    optimizers = {
        key: label
        for key, label in patterns.optimizer_names(keys).items()
        if not any(f"{each}.".startswith(f"{label}.") for each in given)
    }
    names: dict[str, str] = {}
    skipped: dict[str, int] = {}
    for key in keys:
        if not wanted(key):
            continue
        if key in optimizers or not key.startswith(start):
            if key in index.tensor_rows and (key in optimizers or prefix is None):
                label = optimizers.get(key, key.partition(".")[0])
                skipped[label] = skipped.get(label, 0) + 1
            continue
        name = outside(key[len(start) :])
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise StateError(f"rename gives {name!r} for {key[len(start) :]!r}, which is no name", key=key)
        if name in names:
            raise KeyCollision(f"{names[name]!r} and {key!r} would both be called {name!r}", key=key)
        names[name] = key
    flat = Container("dict", tuple((name, None) for name in names))
    chosen = replace(_selection(index, names, flat, dtype), skipped=skipped)
    if not chosen.tensors:
        begin = f" that begins with {start!r}" if start else ""
        other = "; left out: " + ", ".join(f"{label} ({format_count(n, 'tensor')})" for label, n in skipped.items())
        raise StateError(
            f"of {format_count(len(keys), 'name')}, none{begin} is a tensor that was asked for{other if skipped else ''}",
            hint=f"the checkpoint has {', '.join(repr(key) for key in keys[:3])} …; see prefix, include and exclude",
        )
    return chosen


def _selection(index: Index, names: dict[str, str], tree: Node, dtype: DType | None = None) -> Selection:
    tensors: dict[str, TensorPart] = {}
    ties: dict[str, str] = {}
    values: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, key in names.items():
        row = index.tensor_rows.get(key)
        if row is None:
            values[name] = key
            continue
        # Of tied tensors the first in the order of the state is the owner, as in torch's lists of parameters.
        owner = int(index.tensors.alias[row])
        if first.setdefault(owner, name) != name:
            ties[name] = first[owner]
            continue
        stored = index.dtype(row)
        target = dtype if dtype is not None and stored.name in _CAST else stored
        tensors[name] = TensorPart(key, owner, whole(index.shape(row)), target)
    if lost := [key for key in values.values() if key not in index.value_rows]:
        raise MalformedFile(f"the index does not say what {lost[0]!r} is", key=lost[0])
    return Selection(tensors, ties, values, tree)


def _model_prefix(tree: Node, *, outer: bool = True) -> str:
    """Return the prefix of the model: a dict that has a usual name for one, at the top or in the only part that has one."""
    parts = {str(part): node for part, node in (tree.children if tree is not None else ()) if node is not None}
    if (found := next((name for name in _MODELS if name in parts), None)) is not None:
        return f"{found}."
    inside = [
        f"{part}.{below}" for part, node in parts.items() if outer and (below := _model_prefix(node, outer=False))
    ]
    return inside[0] if len(inside) == 1 else ""


def cast_target(dtype: object) -> DType | None:
    """Return the dtype that a user names: `bf16`, `bfloat16`, `torch.bfloat16`."""
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


def _raise_if_unused(argument: str, unused: list[str], names: list[str]) -> None:
    if unused:
        hint = patterns.did_you_mean_pattern(unused[0], names) or f"it has {', '.join(map(repr, names[:3]))} …"
        hint += f"; {patterns.MAY_MATCH_NOTHING}" if argument == "rename" else ""
        raise StateError(f"{argument}: {unused[0]!r} matches no name of the checkpoint", hint=hint)


def selection_contents(chosen: Selection, index: Index) -> tuple[Index, list[int]]:
    """Return the index of a selection, and the row that each of its tensors has in the old index."""
    keys = sorted([*chosen.tensors, *chosen.ties], key=str.encode)
    row_of = {key: row for row, key in enumerate(keys)}
    parts = [chosen.tensors[chosen.ties.get(key, key)] for key in keys]
    values = sorted(chosen.values.items(), key=lambda entry: entry[0].encode())
    chosen_index = build_index(
        keys=keys,
        dtypes=[part.dtype for part in parts],
        shapes=[part.box.sizes for part in parts],
        chunks=[[] for _ in parts],
        alias=[row_of[chosen.ties.get(key, key)] for key in keys],
        # A tensor that was converted may have a dtype that numpy lacks.
        origin=[int(index.tensors.origin[p.row]) if p.dtype is index.dtype(p.row) else 0 for p in parts],
        value_keys=[name for name, _ in values],
        value_data=strings_of(index.value_data.raw(index.value_rows[key]) for _, key in values),
        make_tree=lambda: encode_tree(chosen.tree),
        where="the selection",
    )
    return chosen_index, [part.row for part in parts]


def select_all(index: Index, drop: Patterns) -> Selection:
    tree = decode_tree(index.tree)
    keys = list(leaf_keys(tree))
    if drop is not None:
        drop = patterns.checked_patterns("drop", drop)
        _raise_if_unused("drop", patterns.unused_patterns(drop, keys), keys)
        keys = list(filter(patterns.selector(None, drop), keys))
        tree = _pruned(tree, None, {*keys})
    return _selection(index, dict(zip(keys, keys, strict=True)), tree)


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
        # Keep containers that were empty before.
        if smaller is not None and (smaller.children or not child.children):
            children.append((part, smaller))
    if node.kind in {"list", "tuple"} and children and len(children) < len(node.children):
        raise StateError(
            f"drop: {len(node.children) - len(children)} of the {len(node.children)} items of {name!r} would go, and"
            " the others would change their positions",
            hint=f"drop all of it: {name!r}",
        )
    return Container(node.kind, tuple(children))
