"""
A nested state to its leaves by flat name, and new leaves back into the same nested state.

`flatten` takes the state apart and returns leaves and skeleton; it copies nothing and changes nothing. `refill` puts
new leaf objects into the very containers the user holds. Both walk in the same way: mappings and `PerRank` always;
lists and tuples only where a tensor, a mapping or a `PerRank` is inside, for a list of numbers is one value.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, TypeVar

import torch

from shardkeep.errors import InvalidShards, KeyCollision, StateError, UnsupportedLeaf
from shardkeep.format.tree import MAX_DEPTH, Container, Node, Part, is_part, join, refuse_collisions
from shardkeep.state.leaves import EveryRank, PerRank, TreePath, is_dtensor, is_sharded_tensor, path_name

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


# Nested state dicts to flat ones and back, by torch's rules.
#
# There are three sets of rules for what is gone into, and checkpoints of torch depend on each of them:
#
#                           mappings        lists                            tuples
#     traverse_state_dict   always          those with a tensor or a         never
#                                           mapping somewhere inside
#     ..._v_2_3             those with a tensor somewhere inside             never
#     traverse_everything   always          always                           always
#
# What is not gone into is one value. Keys become strings, items of lists stay integers; a flat name is the path
# joined
# by dots. Containers that are gone into and hold nothing leave no trace.

PATH_ITEM = str | int
OBJ_PATH = tuple[PATH_ITEM, ...]
Visitor = Callable[[OBJ_PATH, Any], None]
FLATTEN_MAPPING = dict[str, OBJ_PATH]
"""The path each flat name came from."""
T = TypeVar("T")


def _keep_visiting_tensors(value: Any) -> bool:
    """Say that a container with this value in it is gone into."""
    return isinstance(value, torch.Tensor)


def traverse_state_dict(
    state_dict: Mapping[str, Any], visitor: Visitor, keep_traversing: Callable[[Any], bool] = _keep_visiting_tensors
) -> None:
    """
    Call `visitor(path, value)` for each value, in order, going into mappings and into lists that hold state.

    A list holds state if `keep_traversing` is true of an item, or an item is a mapping or such a list. Tuples are
    values.
    """

    def opens(value: Any) -> bool:
        if isinstance(value, Mapping):
            return True
        return isinstance(value, list) and any(opens(item) or keep_traversing(item) for item in value)

    for key, value in state_dict.items():
        _walk((str(key),), value, visitor, opens)


def traverse_state_dict_v_2_3(
    state_dict: Mapping[str, Any], visitor: Visitor, keep_traversing: Callable[[Any], bool] = _keep_visiting_tensors
) -> None:
    """
    Call `visitor(path, value)` for each value, in order, as torch did up to version 2.3.

    Mappings and lists are gone into only if `keep_traversing` is true of something inside. Tuples are values.
    """

    def opens(value: Any) -> bool:
        if not isinstance(value, (Mapping, list)):
            return False
        items = value.values() if isinstance(value, Mapping) else value
        return any(opens(item) or keep_traversing(item) for item in items)

    for key, value in state_dict.items():
        _walk((str(key),), value, visitor, opens)


def traverse_everything(state_dict: Mapping[str, Any], visitor: Visitor) -> None:
    """Call `visitor(path, value)` for each value, in order, going into every mapping, list and tuple."""
    for key, value in state_dict.items():
        traverse_obj((str(key),), value, visitor)


def traverse_obj(path: OBJ_PATH, value: Any, visitor: Visitor) -> None:
    """Call `visitor` for each value in one that stands at `path`, going into every mapping, list and tuple."""
    _walk(path, value, visitor, lambda each: isinstance(each, (Mapping, list, tuple)))


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """
    Return the values by flat name, and the path of each name, as `traverse_state_dict` finds them.

    Raises:
        KeyCollision: two paths have one flat name, as "a.b" and "b" in "a" have.

    """
    return _flatten(state_dict, traverse_state_dict)


def flatten_state_dict_v_2_3(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """Do as `flatten_state_dict`, with the rules of torch 2.3, which older checkpoints were written by."""
    return _flatten(state_dict, traverse_state_dict_v_2_3)


def flatten_everything(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """Do as `flatten_state_dict`, with the rules of `traverse_everything`; tuples come back as lists."""
    return _flatten(state_dict, traverse_everything)


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: FLATTEN_MAPPING) -> dict[str, Any]:
    """
    Return the nested state dict, given the values by flat name and the path of each name.

    Raises:
        KeyError: a name has no path.
        StateError: two paths contradict each other.

    """
    nested: dict[str, Any] = {}
    for key, value in state_dict.items():
        set_element(nested, mapping[key], value)
    return nested


def set_element(root_dict: dict[str, Any], path: OBJ_PATH, value: Any) -> None:
    """
    Put a value at a path, making the dicts and lists on the way; lists are filled up with None.

    Raises:
        StateError: something that is no container, or not the kind the path needs, is in the way.

    """
    if not path:
        raise StateError("there is no place without a path: expected at least one key")
    container: Any = root_dict
    for depth, (key, following) in enumerate(itertools.pairwise(path)):
        _make_room(container, path, depth)
        child = container.get(key) if isinstance(container, Mapping) else container[key]
        present = child is not None or (isinstance(container, Mapping) and key in container)
        if not present:
            child = [] if isinstance(following, int) else {}
            container[key] = child
        container = child
    _make_room(container, path, len(path) - 1)
    container[path[-1]] = value


def get_element(root_dict: Mapping[str, Any], path: OBJ_PATH, default_value: T | None = None) -> T | None:
    """Return the value at a path, or `default_value` where there is none; an index past a list's end is none."""
    value: Any = root_dict
    for part in path:
        if isinstance(part, int):
            if not isinstance(value, list) or not -len(value) <= part < len(value):
                return default_value
        elif not isinstance(value, Mapping) or part not in value:
            return default_value
        value = value[part]
    return value  # type: ignore[no-any-return]  # the caller says what it expects there


def print_tensor(path: OBJ_PATH, value: Any, print_fun: Callable[[str], None] = print) -> None:
    """Print what kind of value stands at a path, and its size; a visitor for `traverse_state_dict`."""
    _print_nested(value, str(path), print_fun)


def _walk(path: OBJ_PATH, value: Any, visitor: Visitor, opens: Callable[[Any], bool]) -> None:
    if not opens(value):
        visitor(path, value)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _walk((*path, str(key)), child, visitor, opens)
    else:
        for index, child in enumerate(value):
            _walk((*path, index), child, visitor, opens)


def _flatten(
    state_dict: Mapping[str, Any], traverse: Callable[[Mapping[str, Any], Visitor], None]
) -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    flat: dict[str, Any] = {}
    mapping: FLATTEN_MAPPING = {}

    def keep(path: OBJ_PATH, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in flat:
            raise KeyCollision(
                f"duplicated flatten key {name}: both {mapping[name]} and {path}",
                hint="rename one of the two keys",
                key=name,
            )
        flat[name] = value
        mapping[name] = path

    traverse(state_dict, keep)
    return flat, mapping


def _make_room(container: Any, path: OBJ_PATH, depth: int) -> None:
    """Make sure that a value can be put at `path[depth]` of the container reached by then."""
    key = path[depth]
    if isinstance(key, int) and isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
    elif not isinstance(container, Mapping):
        raise StateError(
            f"{path[:depth]} holds a {type(container).__qualname__}, so that nothing can be put at {path}",
            hint="the paths of a flat state dict must not lead through its values",
        )


def _print_nested(value: Any, prefix: str = "", print_fun: Callable[[str], None] = print) -> None:
    """Print what kind of value this is, and its size; of a sharded one also each part that is here."""
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


# ShardedTensors inside ShardedTensors, as FSDP over tensor parallelism makes them, turned into flat ones.
#
# Nothing is copied or communicated: the flat tensor is over the innermost memory, at its offsets in the whole tensor.


def flatten_sharded_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the state dict with each ShardedTensor whose local shard is a ShardedTensor as one flat ShardedTensor.

    Everything else passes through, in new dicts and lists. That includes a ShardedTensor of which this rank has no
    shard, which torch drops with its key, and empty dicts, which torch drops too.

    A flat ShardedTensor is right about the local shard and its place, which is all that saving and loading need. It
    knows other ranks' shards only as far as this rank's own nesting tells, so it cannot be gathered or computed with.

    Raises:
        InvalidShards: (a ValueError) a nested tensor cannot be flattened; says which and why.

    """
    return {key: _flattened(value, (key,)) for key, value in state_dict.items()}


def _flattened(value: Any, path: TreePath) -> Any:
    if isinstance(value, Mapping):
        return {key: _flattened(child, (*path, key)) for key, child in value.items()}
    if isinstance(value, list):
        return [_flattened(child, (*path, index)) for index, child in enumerate(value)]
    if is_sharded_tensor(value) and any(is_sharded_tensor(shard.tensor) for shard in value.local_shards()):
        return _flat(value, path)
    return value


def _flat(outer: Any, path: TreePath) -> Any:
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there is a ShardedTensor
    from torch.distributed._shard.metadata import ShardMetadata  # noqa: PLC0415
    from torch.distributed._shard.sharded_tensor.shard import Shard  # noqa: PLC0415

    outer_shard, inner_shard = _only_shards(outer, path)
    outer_at = outer_shard.metadata.shard_offsets
    rank = dist.get_rank()

    def moved(inner: Any, placement: str) -> ShardMetadata:
        offsets = [a + b for a, b in zip(outer_at, inner.shard_offsets, strict=True)]
        return ShardMetadata(shard_offsets=offsets, shard_sizes=list(inner.shard_sizes), placement=placement)

    device = inner_shard.tensor.device
    mine = moved(inner_shard.metadata, f"rank:{rank}/{device}")
    # Who holds the rest is not known here; all that torch asks is that it be another rank.
    elsewhere = f"rank:{0 if rank else 1}/{device.type if device.type == 'cpu' else f'{device.type}:0'}"
    metadata = copy.deepcopy(outer.metadata())
    metadata.tensor_properties.requires_grad = inner_shard.tensor.requires_grad
    metadata.shards_metadata = [
        *(
            ShardMetadata(
                shard_offsets=list(each.shard_offsets), shard_sizes=list(each.shard_sizes), placement=elsewhere
            )
            for each in outer.metadata().shards_metadata
            if list(each.shard_offsets) != list(outer_at)
        ),
        *(
            moved(each, elsewhere)
            for each in outer_shard.tensor.metadata().shards_metadata
            if list(each.shard_offsets) != list(inner_shard.metadata.shard_offsets)
        ),
        mine,
    ]
    return type(outer)._init_from_local_shards_and_global_metadata(
        local_shards=[Shard(tensor=inner_shard.tensor, metadata=mine)], sharded_tensor_metadata=metadata
    )


def _only_shards(outer: Any, path: TreePath) -> tuple[Any, Any]:
    """Return the one outer and the one inner shard of this rank; raise where there are more, or they do not match."""
    name = path_name(path)
    outer_shards = outer.local_shards()
    if len(outer_shards) != 1:
        raise InvalidShards(
            f"{name!r} has {len(outer_shards)} local shards, some of them ShardedTensors: only one can be flattened",
            hint="give each rank one shard of the outer tensor",
            key=name,
        )
    inner = outer_shards[0].tensor
    inner_shards = inner.local_shards()
    if len(inner_shards) != 1:
        raise InvalidShards(
            f"{name!r}: the ShardedTensor inside has {len(inner_shards)} local shards, expected one",
            hint="give each rank one shard of the inner tensor",
            key=name,
        )
    if is_sharded_tensor(inner_shards[0].tensor):
        raise InvalidShards(f"{name!r} is sharded in more than two ways, one inside the other", key=name)
    inner_size, room = tuple(inner.size()), tuple(outer_shards[0].metadata.shard_sizes)
    if inner_size != room:
        raise InvalidShards(
            f"{name!r}: the ShardedTensor inside has size {inner_size}, the shard it stands for {room}",
            hint="the inner tensor must be the whole of the outer shard",
            key=name,
        )
    return outer_shards[0], inner_shards[0]
