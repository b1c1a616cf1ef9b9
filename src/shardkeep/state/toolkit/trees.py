"""
Nested state dicts to flat ones and back, by torch's rules.

There are three sets of rules for what is gone into, and checkpoints of torch depend on each of them:

                          mappings        lists                            tuples
    traverse_state_dict   always          those with a tensor or a         never
                                          mapping somewhere inside
    ..._v_2_3             those with a tensor somewhere inside             never
    traverse_everything   always          always                           always

What is not gone into is one value. Keys become strings, items of lists stay integers; a flat name is the path joined
by dots. Containers that are gone into and hold nothing leave no trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from shardkeep.errors import KeyCollision, StateError
from shardkeep.state.toolkit.recognise import is_dtensor, is_sharded_tensor

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
