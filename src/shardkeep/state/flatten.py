"""
Walks over nested states: one visitor, flat names and back, torch's rules for flattening.

`leaves_of`, `map_leaves` and `get_element` are the visitor; its rule is which values it opens. `flatten` and `refill` open
mappings and `PerRank` always, and lists and tuples only if they contain a tensor, a mapping or a `PerRank`: a list of
numbers is one value. The functions with torch's names follow torch's rules, on which its checkpoints depend.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import Any, Final, NamedTuple

import torch

from shardkeep.errors import InvalidShards, KeyCollision, StateError, UnsupportedLeaf
from shardkeep.format.values import MAX_TREE_DEPTH, Container, Node, Part, is_part, join, part_name, refuse_collisions
from shardkeep.state.leaves import EveryRank, PerRank, TreePath, is_dtensor, is_sharded_tensor, path_name

_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_NOTHING: Final[Mapping[str, Any]] = {}
_MAPPINGS: Final = frozenset({dict, OrderedDict})
_COMPARABLE: Final = frozenset({str, int, bool, bytes, type(None)})
"""Types of keys of which no two differ that are equal."""
_values_of = methodcaller("values")


def is_container(value: Any) -> bool:
    """Return True for mappings, lists and tuples: the visitor's usual rule."""
    return isinstance(value, (Mapping, list, tuple))


def items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, Mapping) else enumerate(container)


def leaves_of(
    tree: Any, opens: Callable[[Any], bool] = is_container, path: TreePath = ()
) -> Iterator[tuple[TreePath, Any]]:
    """Yield path and value of each leaf, in order. A leaf is what the rule `opens` does not open."""
    if not opens(tree):
        yield path, tree
        return
    for key, child in items_of(tree):
        yield from leaves_of(child, opens, (*path, key))


def map_leaves(
    tree: Any,
    change: Callable[[TreePath, Any], Any],
    opens: Callable[[Any], bool] = is_container,
    path: TreePath = (),
    *,
    keep_ordered: bool = False,
) -> Any:
    """Return the same nesting in new dicts (or ordered dicts), lists and tuples, each leaf replaced by `change(path, leaf)`."""
    if not opens(tree):
        return change(path, tree)
    made = [
        (key, map_leaves(child, change, opens, (*path, key), keep_ordered=keep_ordered))
        for key, child in items_of(tree)
    ]
    if isinstance(tree, Mapping):
        return OrderedDict(made) if keep_ordered and type(tree) is OrderedDict else dict(made)
    values = [child for _, child in made]
    return values if isinstance(tree, list) else getattr(tree, "_make", tuple)(values)


def get_element(root_dict: Any, path: TreePath, default_value: Any = None) -> Any:
    """Return the value at a path, or `default_value` if there is none; an index past a list's end is none."""
    value = root_dict
    for key in path:
        if isinstance(value, Mapping):
            if key not in value:
                return default_value
        elif not (isinstance(value, (list, tuple)) and isinstance(key, int) and -len(value) <= key < len(value)):
            return default_value
        value = value[key]
    return value


def is_per_rank_name(name: str, rank: int) -> bool:
    return part_name("ranks", rank) in name.split(".")


class FlatState(NamedTuple):
    names: list[str]
    leaves: list[Any]
    """By these names, in the order of the state."""
    classes: set[type]
    """Of the leaves."""
    tree: Container
    """The skeleton."""

    def by_name(self) -> dict[str, Any]:
        return dict(zip(self.names, self.leaves, strict=True))


def flatten(
    state: Mapping[str, Any],
    *,
    rank: int,
    is_tensor: Callable[[Any], bool],
    in_place_of: Mapping[str, Any] = _NOTHING,
    kept: KeptForms | None = None,
) -> FlatState:
    """
    Return the leaves of a state with their flat names, and its skeleton; nothing is copied.

    `is_tensor` is true of leaves that make a list worth opening. `in_place_of` holds, by flat name, the containers to walk
    in place of the objects whose state they are. If a state of the same form was `kept`, its names and the same skeleton
    are returned.
    """
    walk = _StateWalk(state, rank, is_tensor, in_place_of)
    for form in kept or ():
        if (known := form.leaves_of(state, walk)) is not None:
            return form.flat._replace(leaves=known)
    leaves: dict[str, Any] = {}
    tree = walk.take(state, walk.kinds[type(state)], None, leaves)
    if walk.leaf_count != len(leaves):
        refuse_collisions(tree)
    found = FlatState(list(leaves), list(leaves.values()), set(map(type, leaves.values())), tree)
    if kept is not None and (new := _form_of(state, found, walk)) is not None:
        kept[:] = [new, *kept[: _MOST_FORMS - 1]]
    return found


class _Level(NamedTuple):
    """The containers of a state at one depth: their keys, how many each has, and what their children are."""

    keys: list[Part]
    kinds_of_keys: list[type]
    counts: list[int]
    types: list[type]
    replaced: list[tuple[int, str]]
    """Children in whose place others are walked."""
    lists: list[tuple[int, str]]
    """Lists and tuples, and as which kind of container they are opened; "" if they are leaves."""
    opened: list[tuple[int, str]]
    """Containers, which make up the next level, and their kinds."""


@dataclass(frozen=True)
class StateForm:
    """All that the names in a state follow from. It is compared level by level, without a step of Python for each child."""

    root: type
    levels: list[_Level]
    order: list[int]
    """Of each leaf: where it is among the children of all levels."""
    flat: FlatState
    """Without the leaves."""

    def leaves_of(self, state: Mapping[str, Any], walk: _StateWalk) -> list[Any] | None:
        """Return the leaves of a state if it has this form."""
        replaced = {name for each in self.levels for _, name in each.replaced}
        if type(state) is not self.root or replaced != walk.in_place_of.keys():
            return None
        level: Sequence[Mapping[Any, Any]] = [state]
        found: list[Any] = []
        for known in self.levels:
            keys = list(chain.from_iterable(level))
            if (
                list(map(len, level)) != known.counts
                or keys != known.keys
                or list(map(type, keys)) != known.kinds_of_keys
            ):
                return None
            values = list(chain.from_iterable(map(_values_of, level)))
            for at, name in known.replaced:
                values[at] = walk.in_place_of[name]
            if list(map(type, values)) != known.types or any(walk.kind(values[at]) != kind for at, kind in known.lists):
                return None
            level = [_as_mapping(values[at], kind, walk.rank) for at, kind in known.opened]
            found = [*found, *values] if found else values
        return found if len(self.levels) == 1 else list(map(found.__getitem__, self.order))


KeptForms = list[StateForm]
"""Those of the last states. They hold no leaf."""
_MOST_FORMS = 4


def _as_mapping(value: Any, kind: str, rank: int) -> Mapping[Any, Any]:
    return value if kind in ("dict", "odict") else dict(state_items(value, kind, rank))


def _form_of(state: Any, flat: FlatState, walk: _StateWalk) -> StateForm | None:
    """Return the form of a state that was walked; None if it has mappings or keys that a comparison may take for others."""
    levels: list[_Level] = []
    level: list[tuple[Any, Container]] = [(state, flat.tree)]
    parents = {parent for parent, _ in walk.replaced}
    begins: dict[int, int] = {}
    """Of each container, by the id of its skeleton: where its children begin among those of all levels."""
    end = 0
    while level:
        known, below = _Level([], [], [], [], [], [], []), list[tuple[Any, Container]]()
        for container, node in level:
            mapping = _as_mapping(container, node.kind, walk.rank)
            if type(mapping) not in _MAPPINGS or not {*map(type, mapping)} <= _COMPARABLE:
                return None
            values, start = list(mapping.values()), len(known.keys)
            begins[id(node)] = end + start
            for at, (part, _) in enumerate(node.children if id(container) in parents else ()):
                if (name := walk.replaced.get((id(container), part))) is not None:
                    values[at] = walk.in_place_of[name]
                    known.replaced.append((start + at, name))
            types = list(map(type, values))
            if any(walk.kinds[cls] for cls in {*types}):
                for at, (value, (_, inner)) in enumerate(zip(values, node.children, strict=True), start):
                    kind = "" if inner is None else inner.kind
                    if walk.kinds[type(value)] in ("list", "tuple"):
                        known.lists.append((at, kind))
                    if inner is not None:
                        known.opened.append((at, kind))
                        below.append((value, inner))
            known.keys.extend(mapping)
            known.kinds_of_keys.extend(map(type, mapping))
            known.types.extend(types)
            known.counts.append(len(values))
        levels.append(known)
        end, level = end + len(known.keys), below
    return StateForm(type(state), levels, list(_places_of_leaves(flat.tree, begins)), flat._replace(leaves=[]))


def _places_of_leaves(node: Container, begins: Mapping[int, int]) -> Iterator[int]:
    for at, (_, child) in enumerate(node.children, begins[id(node)]):
        if child is None:
            yield at
        else:
            yield from _places_of_leaves(child, begins)


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
    Put new leaf objects into the containers of the state; names that `leaves` lacks stay as they are.

    Tuples are rebuilt inside their parent. The containers in `in_place_of` are changed, never the objects they represent. A
    `dry` run changes nothing, and raises where a real one would: if a changed leaf is in a mapping that cannot be changed.
    """
    walk = _StateWalk(state, rank, is_tensor, in_place_of)
    walk.put(state, walk.kinds[type(state)], None, leaves, dry=dry)


class _Kinds(dict[type, str]):
    """The kind of container that each type met in one walk is; "" for leaves."""

    def __missing__(self, cls: type) -> str:
        kinds = ((PerRank, "ranks"), (OrderedDict, "odict"), (Mapping, "dict"), (list, "list"), (tuple, "tuple"))
        kind = self[cls] = next((kind for base, kind in kinds if issubclass(cls, base)), "")
        return kind


class _StateWalk:
    """One walk over one state: which values are containers, and the flat names of their children."""

    __slots__ = ("_is_tensor", "_open", "in_place_of", "kinds", "leaf_count", "rank", "replaced")

    def __init__(self, state: Any, rank: int, is_tensor: Callable[[Any], bool], in_place_of: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise UnsupportedLeaf(
                f"the state is a {type(state).__qualname__}, expected a mapping",
                hint='pass a dict, such as {"model": ..., "step": 10}',
            )
        self.rank = rank
        self._is_tensor = is_tensor
        self.in_place_of = in_place_of
        self.replaced: dict[tuple[int, Any], str] = {}
        """The names in `in_place_of` that were met, by the id of their parent and the key there."""
        # The containers the walk is inside of, by id, with kind and name: meeting one again means a cycle.
        self._open: dict[int, tuple[str, str | None]] = {}
        self.kinds = _Kinds(dict.fromkeys((*_SCALARS, torch.Size), ""))
        self.leaf_count = 0

    def take(self, value: Any, kind: str, name: str | None, leaves: dict[str, Any]) -> Container:
        """Collect the leaves below one container and return its skeleton."""
        # Written out and not shared with `put` by a generator, which would double the time of a large state.
        self._enter(value, kind, name)
        prefix = "" if name is None else f"{name}."
        kinds, in_place_of = self.kinds, self.in_place_of
        children: list[tuple[Part, Node]] = []
        inner = 0
        for part, child in value.items() if kind == "dict" else state_items(value, kind, self.rank):
            own = prefix + part if type(part) is str and part.isascii() else _checked_name(name, kind, part)
            if own in in_place_of:
                child = in_place_of[own]  # noqa: PLW2901 - from here on this is the child
                self.replaced[id(value), part] = own
            # By type first: nearly all children are leaves, and the type of a leaf decides.
            if kinds[type(child)] and (child_kind := self.kind(child)):
                children.append((part, self.take(child, child_kind, own, leaves)))
                inner += 1
            else:
                children.append((part, None))
                leaves[own] = child
        self.leaf_count += len(children) - inner
        del self._open[id(value)]
        return Container(kind, tuple(children))

    def put(self, value: Any, kind: str, name: str | None, leaves: Mapping[str, Any], *, dry: bool) -> Any:
        """Put new leaves below one container; return it, or the tuple that replaces it."""
        self._enter(value, kind, name)
        changes: list[tuple[Part, Any]] = []
        for part, present in state_items(value, kind, self.rank):
            own = _checked_name(name, kind, part)
            child = self.in_place_of.get(own, present)
            child_kind = self.kind(child)
            new = self.put(child, child_kind, own, leaves, dry=dry) if child_kind else leaves.get(own, child)
            if new is not child:
                changes.append((part, new))
        del self._open[id(value)]
        return _changed(value, kind, name, changes, dry=dry) if changes else value

    def _enter(self, value: Any, kind: str, name: str | None) -> None:
        if id(value) in self._open:
            raise UnsupportedLeaf(f"{_spell(self._open[id(value)][1])} contains itself, as {_spell(name)}")
        if len(self._open) >= MAX_TREE_DEPTH:
            raise UnsupportedLeaf(f"{_spell(name)} is nested more than {MAX_TREE_DEPTH} levels deep")
        if kind == "ranks" and any(outer_kind == "ranks" for outer_kind, _ in self._open.values()):
            raise UnsupportedLeaf(f"{_spell(name)} is a PerRank inside a PerRank", hint="remove the inner PerRank")
        self._open[id(value)] = (kind, name)

    def kind(self, value: Any) -> str:
        kind = self.kinds[type(value)]
        if type(value) is dict:  # the usual case, decided early
            return kind
        # A framework's sharded tensor may be a mapping or a tuple.
        if not kind or self._is_tensor(value):
            return ""
        return "" if kind in ("list", "tuple") and not self._has_structure(value, 0) else kind

    def _has_structure(self, items: Iterable[Any], depth: int) -> bool:
        """Return True if a list or tuple holds more than plain values, or is too deep, which the walk refuses."""
        if depth > MAX_TREE_DEPTH:
            return True
        for item in items:
            if type(item) in _SCALARS:
                continue
            kind = self.kinds[type(item)]
            if self._is_tensor(item) or kind in ("dict", "odict", "ranks"):
                return True
            if kind and self._has_structure(item, depth + 1):
                return True
        return False


def state_items(value: Any, kind: str, rank: int) -> Iterable[tuple[Part, Any]]:
    """Return keys and values of a container; those of a `PerRank` by rank number."""
    if kind == "ranks":
        return value.values.items() if isinstance(value, EveryRank) else [(rank, value.value)]
    return items_of(value)


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
        new_items = dict(changes)
        # A namedtuple takes its fields one by one; every other tuple of the standard library and torch takes a sequence.
        build: Any = getattr(type(value), "_make", type(value))
        try:
            return build([new_items.get(index, item) for index, item in enumerate(value)])
        except (TypeError, ValueError) as exc:
            raise StateError(
                f"{_spell(name)} is a {type(value).__qualname__}, a tuple that cannot be built from its items: {exc}",
                hint="use a plain tuple or a list there",
            ) from exc
    if kind == "dict" and not isinstance(value, MutableMapping):
        raise StateError(
            f"{_spell(name)} is a {type(value).__qualname__}, which cannot be changed, and {changes[0][0]!r} in it must be",
            hint="use a dict there",
        )
    for part, new in () if dry else changes:
        if isinstance(value, EveryRank):
            value.values[part] = new
        elif kind == "ranks":
            value.value = new
        else:
            value[part] = new
    return value


# Flattening by torch's rules: `traverse_state_dict` opens mappings, and lists with a tensor or a mapping inside; ..._v_2_3
# opens mappings and lists with a tensor inside; `traverse_everything` opens those and tuples. What is not opened is one
# value. Keys become strings, indices stay integers, a flat name is the path joined by dots, empty containers leave no trace.

PATH_ITEM = str | int
OBJ_PATH = tuple[PATH_ITEM, ...]
Visitor = Callable[[OBJ_PATH, Any], None]
FLATTEN_MAPPING = dict[str, OBJ_PATH]
_NEVER_OPENED = {torch.Tensor, torch.nn.Parameter, int, float, bool, str}


def _keep_visiting_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def traverse_state_dict(
    state_dict: Mapping[str, Any], visitor: Visitor, keep_traversing: Callable[[Any], bool] = _keep_visiting_tensors
) -> None:
    """Call `visitor(path, value)` for each value, in order, opening mappings and lists that hold state."""

    def opens(value: Any) -> bool:
        if isinstance(value, Mapping):
            return True
        return isinstance(value, list) and any(opens(item) or keep_traversing(item) for item in value)

    _traverse((), state_dict, visitor, opens)


def traverse_state_dict_v_2_3(
    state_dict: Mapping[str, Any], visitor: Visitor, keep_traversing: Callable[[Any], bool] = _keep_visiting_tensors
) -> None:
    """Like `traverse_state_dict`, by the rules of torch 2.3."""

    def opens(value: Any) -> bool:
        if not isinstance(value, (Mapping, list)):
            return False
        return any(opens(item) or keep_traversing(item) for _, item in items_of(value))

    for key, value in state_dict.items():
        _traverse((str(key),), value, visitor, opens)


def traverse_everything(state_dict: Mapping[str, Any], visitor: Visitor) -> None:
    """Like `traverse_state_dict`, opening every mapping, list and tuple."""
    traverse_obj((), state_dict, visitor)


def traverse_obj(path: OBJ_PATH, value: Any, visitor: Visitor) -> None:
    _traverse(path, value, visitor, is_container)


def _traverse(path: OBJ_PATH, value: Any, visitor: Visitor, opens: Callable[[Any], bool]) -> None:
    if not opens(value):
        visitor(path, value)
        return
    named = isinstance(value, Mapping)
    for key, child in items_of(value):
        at = (*path, str(key) if named else key)
        if type(child) in _NEVER_OPENED:
            visitor(at, child)
        else:
            _traverse(at, child, visitor, opens)


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """Return the values by flat name, and the path of each name, as `traverse_state_dict` finds them."""
    return _flatten(state_dict, traverse_state_dict)


def flatten_state_dict_v_2_3(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """Like `flatten_state_dict`, with the rules of torch 2.3, which wrote older checkpoints."""
    return _flatten(state_dict, traverse_state_dict_v_2_3)


def flatten_everything(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """Like `flatten_state_dict`, with the rules of `traverse_everything`; tuples come back as lists."""
    return _flatten(state_dict, traverse_everything)


def _flatten(
    state_dict: Mapping[str, Any], traverse: Callable[[Mapping[str, Any], Visitor], None]
) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    flat: dict[str, Any] = {}
    mapping: FLATTEN_MAPPING = {}

    def keep(path: OBJ_PATH, value: Any) -> None:
        name = ".".join(map(str, path)) if len(path) > 1 else str(path[0])
        if name in flat:
            raise KeyCollision(
                f"duplicated flatten key {name}: both {mapping[name]} and {path}", hint="rename one of them", key=name
            )
        flat[name] = value
        mapping[name] = path

    traverse(state_dict, keep)
    return flat, mapping


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: FLATTEN_MAPPING) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in state_dict.items():
        set_element(nested, mapping[key], value)
    return nested


def as_keyed(root: Mapping[Any, Any], path: OBJ_PATH) -> OBJ_PATH:
    """Return a path with the keys that the dicts on its way have: a number, where a flat name only knows its text."""
    found: list[Any] = []
    for part in path:
        here = get_element(root, tuple(found))
        keys = here if isinstance(here, Mapping) and part not in here else ()
        found.append(next((key for key in keys if str(key) == part), part))
    return tuple(found)


def set_element(root_dict: dict[str, Any], path: OBJ_PATH, value: Any) -> None:
    """Set the value at a path, creating the dicts and lists on the way; lists are padded with None."""
    if not path:
        raise StateError("cannot set an element at an empty path: expected at least one key")
    container: Any = root_dict
    for depth, key in enumerate(path):
        if isinstance(key, int) and isinstance(container, list):
            container.extend([None] * (key + 1 - len(container)))
        elif not isinstance(container, Mapping):
            raise StateError(
                f"{path[:depth]} holds a {type(container).__qualname__}, so nothing can be put at {path}",
                hint="the paths of a flat state dict must not lead through its values",
            )
        if depth == len(path) - 1:
            container[key] = value
            return
        child = container.get(key) if isinstance(container, Mapping) else container[key]
        if child is None and not (isinstance(container, Mapping) and key in container):
            child = container[key] = [] if isinstance(path[depth + 1], int) else {}
        container = child


def print_tensor(path: OBJ_PATH, value: Any, print_fun: Callable[[str], None] = print) -> None:
    """Print the kind and size of the value; a visitor for `traverse_state_dict`."""
    _print_nested(value, str(path), print_fun)


def _print_nested(value: Any, prefix: str = "", print_fun: Callable[[str], None] = print) -> None:
    if is_sharded_tensor(value):
        print_fun(f"{prefix} ShardedTensor size: {value.size()}")
        for shard in value.local_shards():
            _print_nested(shard.tensor, f"{shard.metadata.shard_offsets} ", print_fun)
    elif is_dtensor(value):
        print_fun(f"{prefix} DistributedTensor size: {value.size()}")
        _print_nested(value._local_tensor, print_fun=print_fun)
    elif isinstance(value, torch.Tensor):
        print_fun(f"{prefix} Tensor size: {value.size()}")
    else:
        print_fun(f"{prefix} Type: {type(value)}")


def flatten_sharded_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the state dict with each ShardedTensor inside a ShardedTensor (FSDP over tensor parallelism) as a flat one.

    Nothing is copied or communicated: the flat tensor uses the innermost memory, at its offsets in the whole tensor, which
    is all that saving and loading need. It knows other ranks' shards only as far as this rank's own nesting shows.
    """
    if "torch.distributed._shard.sharded_tensor" not in sys.modules:  # then there is none
        return dict(state_dict)

    def change(path: TreePath, value: Any) -> Any:
        if is_sharded_tensor(value) and any(is_sharded_tensor(shard.tensor) for shard in value.local_shards()):
            return _flat_sharded_tensor(value, path_name(path))
        return value

    flat: dict[str, Any] = map_leaves(state_dict, change, lambda value: isinstance(value, (Mapping, list)))
    return flat


def _flat_sharded_tensor(outer: Any, name: str) -> Any:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor
    from torch.distributed._shard.metadata import ShardMetadata  # noqa: PLC0415
    from torch.distributed._shard.sharded_tensor.shard import Shard  # noqa: PLC0415

    def only_shard(which: str, tensor: Any, room: Any) -> Any:
        shards = tensor.local_shards() if is_sharded_tensor(tensor) else []
        if len(shards) != 1 or list(tensor.size()) != list(room):
            raise InvalidShards(
                f"{name!r} is a ShardedTensor inside a ShardedTensor, and cannot be made one: the {which} one has "
                f"{len(shards)} local shards (expected 1) and size {tuple(tensor.size())} (expected {tuple(room)})",
                hint="give each rank one shard of each; the inner tensor must be the whole of the outer shard",
                key=name,
            )
        return shards[0]

    outer_shard = only_shard("outer", outer, outer.size())
    inner_shard = only_shard("inner", outer_shard.tensor, outer_shard.metadata.shard_sizes)
    if is_sharded_tensor(inner_shard.tensor):
        raise InvalidShards(f"{name!r} is sharded in more than two ways, one inside the other", key=name)
    outer_at = outer_shard.metadata.shard_offsets
    rank, device = dist.get_rank(), inner_shard.tensor.device

    def moved(shard: Any, placement: str, base: Any) -> ShardMetadata:
        offsets = [a + b for a, b in zip(base, shard.shard_offsets, strict=True)]
        return ShardMetadata(shard_offsets=offsets, shard_sizes=list(shard.shard_sizes), placement=placement)

    mine = moved(inner_shard.metadata, f"rank:{rank}/{device}", outer_at)
    # The owners of the other shards are unknown here; torch only requires that they are on another rank.
    elsewhere = f"rank:{0 if rank else 1}/{device.type if device.type == 'cpu' else f'{device.type}:0'}"
    metadata = copy.deepcopy(outer.metadata())
    metadata.tensor_properties.requires_grad = inner_shard.tensor.requires_grad
    metadata.shards_metadata = [
        moved(each, elsewhere, base)
        for tensor, local, base in (
            (outer, outer_shard, [0] * len(outer_at)),
            (outer_shard.tensor, inner_shard, outer_at),
        )
        for each in tensor.metadata().shards_metadata
        if list(each.shard_offsets) != list(local.metadata.shard_offsets)
    ]
    metadata.shards_metadata.append(mine)
    return type(outer)._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(tensor=inner_shard.tensor, metadata=mine)], sharded_tensor_metadata=metadata
    )
