"""
A nested state to its leaves by flat name, and new leaves back into the same nested state.

`flatten` takes the state apart and returns leaves and skeleton; it copies nothing and changes nothing. `refill` puts
new leaf objects into the very containers the user holds. Both walk in the same way: mappings and `PerRank` always;
lists and tuples only where a tensor, a mapping or a `PerRank` is inside, for a list of numbers is one value.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from shardkeep.errors import StateError, UnsupportedLeaf
from shardkeep.format.tree import MAX_DEPTH, Container, Node, Part, is_part, join, refuse_collisions
from shardkeep.state.kinds import EveryRank, PerRank

_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_NOTHING: Final[Mapping[str, Any]] = {}


def flatten(
    state: Mapping[str, Any],
    *,
    rank: int,
    is_tensor: Callable[[Any], bool],
    in_place_of: Mapping[str, Any] = _NOTHING,
) -> tuple[dict[str, Any], Container]:
    """
    Take a state apart: its leaves by flat name, in order, and its skeleton.

    Args:
        state: Nested mappings, lists, tuples and `PerRank`.
        rank: Under which number this rank's `PerRank` values stand.
        is_tensor: Tells leaves that are tensors of some sort, so that lists of them are walked.
        in_place_of: By flat name, containers to walk in place of the objects whose state they are.

    Raises:
        UnsupportedLeaf: A key cannot be stored, a container contains itself, or `state` is no mapping.
        KeyCollision: Two paths have one flat name.

    """
    _refuse_other_than_mapping(state)
    walk = _Walk(rank, is_tensor, in_place_of)
    leaves: dict[str, Any] = {}
    tree = walk.take(state, _kind_of_type(type(state)), None, leaves)
    if walk.leaf_count != len(leaves):
        refuse_collisions(tree)
    return leaves, tree


def refill(
    state: MutableMapping[str, Any],
    leaves: Mapping[str, Any],
    *,
    rank: int,
    is_tensor: Callable[[Any], bool],
    in_place_of: Mapping[str, Any] = _NOTHING,
    dry: bool = False,
) -> None:
    """
    Put new leaf objects into the state, in place; names that `leaves` lacks stay as they are.

    Dict and list items and `PerRank.value` are assigned, tuples are built anew inside their parent. An item that is
    already there is not assigned again. What stands in place of an object is changed, never the object. A `dry` run changes nothing, and raises where a real one would.

    Raises:
        StateError: A changed leaf sits in a mapping that cannot be changed.

    """
    _refuse_other_than_mapping(state)
    _Walk(rank, is_tensor, in_place_of).put(state, _kind_of_type(type(state)), None, leaves, dry=dry)


def _refuse_other_than_mapping(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise UnsupportedLeaf(
            f"the state is a {type(state).__qualname__}, expected a mapping",
            hint='pass a dict, such as {"model": ..., "step": 10}',
        )


class _Walk:
    """One walk over one state: which values are containers, what their children are called."""

    __slots__ = ("_in_place_of", "_is_tensor", "_kinds", "_open", "_rank", "leaf_count")

    def __init__(self, rank: int, is_tensor: Callable[[Any], bool], in_place_of: Mapping[str, Any]) -> None:
        self._rank = rank
        self._is_tensor = is_tensor
        self._in_place_of = in_place_of
        self._kinds: dict[type, str] = dict.fromkeys(_SCALARS, "")
        # The containers we are inside of, by id, with their kind and name: to meet one again is a cycle.
        self._open: dict[int, tuple[str, str | None]] = {}
        self.leaf_count = 0

    def take(self, value: Any, kind: str, name: str | None, leaves: dict[str, Any]) -> Container:
        """Collect the leaves below one container and return its skeleton."""
        # What `_children` gives, spelt out: a state has many leaves, and a generator costs as much as all the rest.
        self._enter(value, kind, name)
        prefix = "" if name is None else f"{name}."
        kinds, in_place_of = self._kinds, self._in_place_of
        children: list[tuple[Part, Node]] = []
        inner = 0
        for part, child in _items(value, kind, self._rank):
            own = prefix + part if type(part) is str and part.isascii() else _checked_name(name, kind, part)
            if own in in_place_of:
                child = in_place_of[own]  # noqa: PLW2901 - from here on this is the child
            if kinds.get(type(child)) != "" and (child_kind := self._kind(child)):
                children.append((part, self.take(child, child_kind, own, leaves)))
                inner += 1
            else:
                children.append((part, None))
                leaves[own] = child
        self.leaf_count += len(children) - inner
        del self._open[id(value)]
        return Container(kind, tuple(children))

    def put(self, value: Any, kind: str, name: str | None, leaves: Mapping[str, Any], *, dry: bool) -> Any:
        """Put new leaves below one container and return what shall stand in its place: itself, or a new tuple."""
        changes: list[tuple[Part, Any]] = []
        for part, child, own, child_kind in self._children(value, kind, name):
            new = self.put(child, child_kind, own, leaves, dry=dry) if child_kind else leaves.get(own, child)
            if new is not child:
                changes.append((part, new))
        return _changed(value, kind, name, changes, dry=dry) if changes else value

    def _children(self, value: Any, kind: str, name: str | None) -> Iterator[tuple[Part, Any, str, str]]:
        """Give each child's part, value, flat name and kind; the kind is empty for a leaf."""
        self._enter(value, kind, name)
        prefix = "" if name is None else f"{name}."
        kinds = self._kinds
        for part, child in _items(value, kind, self._rank):
            easy = type(part) is str and part.isascii()
            own = prefix + part if easy else _checked_name(name, kind, part)
            if own in self._in_place_of:
                child = self._in_place_of[own]  # noqa: PLW2901 - from here on this is the child
            # By type first: nearly all children are leaves, and a leaf's type says so.
            child_kind = kinds.get(type(child))
            yield part, child, own, self._kind(child) if child_kind != "" else ""
        del self._open[id(value)]

    def _enter(self, value: Any, kind: str, name: str | None) -> None:
        if id(value) in self._open:
            raise UnsupportedLeaf(f"{_spell(self._open[id(value)][1])} contains itself, as {_spell(name)}")
        if len(self._open) >= MAX_DEPTH:
            raise UnsupportedLeaf(f"{_spell(name)} is nested more than {MAX_DEPTH} levels deep")
        if kind == "ranks" and any(outer_kind == "ranks" for outer_kind, _ in self._open.values()):
            raise UnsupportedLeaf(f"{_spell(name)} is a PerRank inside a PerRank", hint="remove the inner PerRank")
        self._open[id(value)] = (kind, name)

    def _kind(self, value: Any) -> str:
        kind = self._kind_of_type(type(value))
        if type(value) is dict:  # as most containers are; the rest would say the same
            return kind
        # A sharded tensor of some framework may well be a mapping or a tuple.
        if not kind or self._is_tensor(value):
            return ""
        return "" if kind in ("list", "tuple") and not self._has_structure(value, 0) else kind

    def _kind_of_type(self, cls: type) -> str:
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = _kind_of_type(cls)
        return kind

    def _has_structure(self, items: Iterable[Any], depth: int) -> bool:
        """Say whether a list or tuple holds more than plain values. Too deep counts as yes: the walk refuses it."""
        if depth > MAX_DEPTH:
            return True
        for item in items:
            if type(item) in _SCALARS:
                continue
            kind = self._kind_of_type(type(item))
            if self._is_tensor(item) or kind in ("dict", "odict", "ranks"):
                return True
            if kind and self._has_structure(item, depth + 1):
                return True
        return False


def _kind_of_type(cls: type) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and cls is torch.Size:
        return ""
    if issubclass(cls, PerRank):
        return "ranks"
    if issubclass(cls, OrderedDict):
        return "odict"
    if issubclass(cls, Mapping):
        return "dict"
    return "list" if issubclass(cls, list) else "tuple" if issubclass(cls, tuple) else ""


def _items(value: Any, kind: str, rank: int) -> Iterable[tuple[Part, Any]]:
    if kind in ("dict", "odict"):
        items: Iterable[tuple[Part, Any]] = value.items()
        return items
    if kind == "ranks":
        return value.values.items() if isinstance(value, EveryRank) else [(rank, value.value)]
    return enumerate(value)


def _spell(name: str | None) -> str:
    return "the state" if name is None else repr(name)


def _checked_name(name: str | None, kind: str, part: Part) -> str:
    if not is_part(part):
        raise UnsupportedLeaf(
            f"{_spell(name)} has a key of type {type(part).__module__}.{type(part).__qualname__}, which cannot be stored",
            hint="use str, int (64 bit), bool, float, None, bytes, or tuples of them",
        )
    own = join(name, kind, part)
    try:
        own.encode()
    except UnicodeEncodeError as exc:
        raise UnsupportedLeaf(f"{_spell(name)} has a key that is no valid text: {part!r}") from exc
    return own


def _changed(value: Any, kind: str, name: str | None, changes: list[tuple[Part, Any]], *, dry: bool) -> Any:
    if kind == "tuple":
        return _new_tuple(value, name, dict(changes))
    if kind == "dict" and not isinstance(value, MutableMapping):
        raise StateError(
            f"{_spell(name)} is a {type(value).__qualname__}, which cannot be changed, and {changes[0][0]!r} in it must be",
            hint="use a dict there",
        )
    if dry:
        return value
    for part, new in changes:
        if isinstance(value, EveryRank):
            value.values[part] = new
        elif kind == "ranks":
            value.value = new
        else:
            value[part] = new
    return value


def _new_tuple(value: tuple[Any, ...], name: str | None, changes: dict[int, Any]) -> Any:
    items = [changes.get(index, item) for index, item in enumerate(value)]
    # A namedtuple takes its fields one by one; every other tuple of the standard library and torch takes a sequence.
    build: Any = getattr(type(value), "_make", type(value))
    try:
        return build(items)
    except (TypeError, ValueError) as exc:
        raise StateError(
            f"{_spell(name)} is a {type(value).__qualname__}, a tuple that cannot be built from its items: {exc}",
            hint="use a plain tuple or a list there",
        ) from exc
