"""
The skeleton of a state: its containers with their exact keys and order, without the leaves.

A node is None (a leaf) or a `Container`. The flat name of a leaf is its path joined by dots. A skeleton is stored as
columns, level by level, so that the children of a container are one slice of each column. Decoding checks kinds, counts,
distinct keys and depth.

    tree  = [marks, counts, parts], encoded as a plain value
    marks = bin, one byte for the root, then for every child, level by level: 0 leaf, 1 dict, 2 odict, 3 list, 4 tuple,
            5 ranks
    counts = the number of children of each container, in the order of its mark
    parts  = the keys of all children of dicts, odicts and ranks in the order of their marks; lists and tuples have none
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeAlias

from shardkeep.errors import (
    CheckpointError,
    InvalidShards,
    KeyCollision,
    MalformedFile,
    UnsupportedLeaf,
)
from shardkeep.format.values import decode_value, distinct, encode_value

MAX_DEPTH: Final = 100
"""The deepest nesting of containers."""
KINDS: Final = ("dict", "odict", "list", "tuple", "ranks")
"""`ranks` has one child for each rank number."""

Part: TypeAlias = Any
"""A key: str, int of 64 bits, bool, float, None, bytes, or a tuple of those."""
_INDEXED: Final = frozenset({"list", "tuple"})
_SIMPLE: Final = frozenset({str, int, bool, float, type(None), bytes})


@dataclass(frozen=True, slots=True)
class Container:
    """A mapping, list or tuple: its kind, and its children in order."""

    kind: str
    """One of `KINDS`."""
    children: tuple[tuple[Part, Node], ...]

    def __eq__(self, other: object) -> bool:
        """Compare keys by type, too: 1, 1.0 and True are the same key of a dict, but different keys in a file."""
        return (
            isinstance(other, Container)
            and self.kind == other.kind
            and self.children == other.children
            and [_type_of(part) for part, _ in self.children] == [_type_of(part) for part, _ in other.children]
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.children))


Node: TypeAlias = "Container | None"
Path: TypeAlias = tuple[Part, ...]


def is_part(value: Any) -> bool:
    """Return whether a dict key can be stored, by its exact type."""
    kind = type(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    return kind in _SIMPLE or (kind is tuple and all(map(is_part, value)))


def _type_of(part: Part) -> Any:
    return tuple(map(_type_of, part)) if type(part) is tuple else type(part)


def part_name(kind: str, part: Part) -> str:
    """Return one part of a flat name."""
    if kind == "ranks":
        return f"@{part}"
    # For all other kinds repr equals str, and python -bb refuses the str of bytes.
    return part if type(part) is str else repr(part)


def encode_tree(node: Node) -> bytes:
    """Encode a skeleton."""
    marks, counts, parts = bytearray([_mark(node)]), list[int](), list[Part]()
    level, depth = [] if node is None else [node], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise UnsupportedLeaf(f"the state is nested more than {MAX_DEPTH} levels deep")
        below: list[Container] = []
        for container in level:
            counts.append(len(container.children))
            if container.kind not in _INDEXED:
                parts.extend([part for part, _ in container.children])
            nodes = [child for _, child in container.children]
            marks.extend(map(_mark, nodes))
            below.extend([child for child in nodes if child is not None])
        level = below
    return encode_value([bytes(marks), counts, parts], key="tree")


def _mark(node: Node) -> int:
    return 0 if node is None else 1 + KINDS.index(node.kind)


def decode_tree(data: bytes) -> Node:
    """
    Decode and check a skeleton.

    Raises:
        MalformedFile: The bytes are not a skeleton.

    """
    columns = decode_value(data, key="tree")
    try:
        return _build(*_checked(columns))
    except CheckpointError:
        raise
    except (TypeError, ValueError) as exc:
        raise MalformedFile(f"tree: malformed skeleton: {exc}") from exc


def _checked(columns: Any) -> tuple[bytes, list[int], list[Part]]:
    if type(columns) is not list or [type(column) for column in columns] != [bytes, list, list]:
        raise ValueError("expected three columns")
    marks, counts, parts = columns
    if not marks or max(marks) > len(KINDS):
        raise ValueError("no root, or an unknown kind of container")
    if len(marks) - marks.count(0) != len(counts):
        raise ValueError(f"{len(marks) - marks.count(0)} containers, {len(counts)} counts")
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != len(marks) - 1:
        raise ValueError("counts do not add up to the children")
    if not all(is_part(part) for part in parts if type(part) is not str):
        raise ValueError("a key of a type that is no key")
    return marks, counts, parts


def _build(marks: bytes, counts: list[int], parts: list[Part]) -> Node:
    kinds = [KINDS[mark - 1] for mark in marks if mark]
    # Where each container's children, containers among them, and keys begin.
    spans: list[tuple[int, int, int]] = []
    depths, child, key = [1], 1, 0
    for index, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        if index >= len(depths) or depths[index] > MAX_DEPTH:
            raise ValueError(f"a container inside itself, or more than {MAX_DEPTH} levels")
        spans.append((child, len(depths), key))
        depths.extend([depths[index] + 1] * (count - marks.count(0, child, child + count)))
        child += count
        key += 0 if kind in _INDEXED else count
    if kinds and len(depths) != len(kinds):
        raise ValueError(f"{len(kinds)} containers, and room for {len(depths)}")
    if key != len(parts):
        raise ValueError(f"{len(parts)} keys for {key} children")
    # From the last to the first: children come after their parents, so that they are ready when their parent is made.
    made: list[Node] = [None] * len(kinds)
    for index in reversed(range(len(kinds))):
        kind, count = kinds[index], counts[index]
        child, first, key = spans[index]
        keys = range(count) if kind in _INDEXED else _checked_keys(kind, parts[key : key + count])
        nodes: Iterable[Node] = repeat(None, count)
        if inside := count - marks.count(0, child, child + count):
            ready = iter(made[first : first + inside])
            nodes = [next(ready) if mark else None for mark in marks[child : child + count]]
        made[index] = Container(kind, tuple(zip(keys, nodes, strict=True)))
    return made[0] if made else None


def _checked_keys(kind: str, keys: list[Part]) -> list[Part]:
    if kind == "ranks" and any(type(key) is not int or key < 0 for key in keys):
        raise ValueError("a rank that is no number")
    return distinct(keys)


def merge_trees(nodes: Sequence[Node]) -> Node:
    """
    Merge the skeletons of all ranks: the children of the first rank in its order, then those that only others have.

    Raises:
        InvalidShards: A path is one kind of container on one rank and another kind, or a leaf, on another; or two ranks
            have keys that are equal but of different types, so that no dict can hold both.
        KeyCollision: Two paths of different ranks have the same flat name.

    """
    different = list(dict.fromkeys(nodes))
    if len(different) < 2:
        return different[0] if different else Container("dict", ())
    merged = _merge(different, None)
    refuse_collisions(merged)
    return merged


def _merge(nodes: list[Node], name: str | None) -> Node:
    # Most subtrees are equal on all ranks; only different ones are compared in detail.
    nodes = list(dict.fromkeys(nodes))
    if len(nodes) == 1:
        return nodes[0]
    kinds = sorted({"leaf" if node is None else node.kind for node in nodes})
    if len(kinds) > 1:
        where = "the state" if name is None else repr(name)
        raise InvalidShards(
            f"{where} is not the same kind of thing on all ranks: {' and '.join(kinds)}",
            hint="give every rank the same structure, or wrap what differs in PerRank",
        )
    by_part: dict[tuple[Part, Any], list[Node]] = {}
    for node in nodes:
        for part, child in () if node is None else node.children:
            by_part.setdefault((part, _type_of(part)), []).append(child)
    kind = kinds[0]
    _refuse_equal([part for part, _ in by_part], name)
    return Container(kind, tuple((part, _merge(same, join(name, kind, part))) for (part, _), same in by_part.items()))


def _refuse_equal(parts: list[Part], name: str | None) -> None:
    seen: dict[Part, Part] = {}
    for part in parts:
        if part in seen:
            where = "the state" if name is None else repr(name)
            raise InvalidShards(
                f"{where} has the key {seen[part]!r} on one rank and {part!r} on another, which are equal",
                hint="give every rank keys of the same type",
            )
        seen[part] = part


def join(name: str | None, kind: str, part: Part) -> str:
    """Return the flat name of a child; `name` is that of its container, None for the root."""
    own = part_name(kind, part)
    return own if name is None else f"{name}.{own}"


def unflatten(node: Node, leaf: Callable[[str], Any]) -> dict[Any, Any]:
    """Build the nested state; `leaf` returns the value of each flat name. Ranks become `{rank: value}`."""
    if node is None or node.kind in _INDEXED:
        raise MalformedFile("tree: the root is no mapping")
    state: dict[Any, Any] = _filled(node, None, leaf)
    return state


def _filled(node: Container, name: str | None, leaf: Callable[[str], Any]) -> Any:
    pairs = []
    for part, child in node.children:
        own = join(name, node.kind, part)
        pairs.append((part, leaf(own) if child is None else _filled(child, own, leaf)))
    if node.kind in _INDEXED:
        values = [value for _, value in pairs]
        return values if node.kind == "list" else tuple(values)
    return OrderedDict(pairs) if node.kind == "odict" else dict(pairs)


def leaf_keys(node: Node) -> Iterator[str]:
    """Yield the flat names of all leaves, in the order of the state."""
    return (name for name, _ in _leaves(node, None, ()))


def refuse_collisions(node: Node) -> None:
    """Raise `KeyCollision`, naming both paths, if two leaves have the same flat name."""
    names = list(leaf_keys(node))
    if len(set(names)) == len(names):
        return
    seen: dict[str, Path] = {}
    for name, path in _leaves(node, None, ()):
        if name in seen:
            raise KeyCollision(
                f"two leaves have the flat name {name!r}: {list(seen[name])!r} and {list(path)!r}",
                hint="rename one of these keys",
            )
        seen[name] = path


def _leaves(node: Node, name: str | None, path: Path) -> Iterator[tuple[str, Path]]:
    if node is None:
        yield name or "", path
        return
    for part, child in node.children:
        own = join(name, node.kind, part)
        if child is None:
            yield own, (*path, part)
        else:
            yield from _leaves(child, own, (*path, part))
