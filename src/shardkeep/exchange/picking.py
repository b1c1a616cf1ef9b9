"""
Which tensors of a checkpoint go out, under which names and in which dtype. Pure but for what a caller's rename does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shardkeep.errors import KeyCollision, StateError
from shardkeep.exchange.streams import StoredPart
from shardkeep.format.dtypes import DType, by_name
from shardkeep.format.index import Index
from shardkeep.format.region import whole
from shardkeep.format.tree import Container, decode_tree, leaf_keys
from shardkeep.state.names import Patterns, Renames, checked_patterns, closest, matcher, renamer

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
class Picked:
    """What goes out, in the order of the state."""

    tensors: dict[str, StoredPart]
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


def pick(
    index: Index,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    rename: Renames = None,
    prefix: str | None = None,
    dtype: DType | None = None,
) -> Picked:
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
    wanted = selected(keys, "include", include)
    unwanted = selected(keys, "exclude", exclude) if exclude is not None else (lambda _: False)
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
    picked = _pick(index, names, dtype)
    if not picked.tensors:
        begin = f" that begins with {prefix!r}" if prefix else ""
        raise StateError(
            f"of {len(keys)} names, none{begin} is a tensor that was asked for",
            hint=f"the checkpoint has {', '.join(repr(key) for key in keys[:3])} …; see prefix, include and exclude",
        )
    return picked


def dtype_of(dtype: object) -> DType | None:
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


def selected(keys: list[str], argument: str, patterns: Patterns) -> Callable[[str], bool]:
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


def _pick(index: Index, names: dict[str, str], dtype: DType | None) -> Picked:
    tensors: dict[str, StoredPart] = {}
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
        tensors[name] = StoredPart(key, owner, whole(shape), target)
    return Picked(tensors, ties, values, list(names))
