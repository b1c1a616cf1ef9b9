"""
The planners that fill a state as it is, and one that makes the state from what the checkpoint holds.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from shardkeep.protocol.default_plans import create_default_global_load_plan, create_default_local_load_plan
from shardkeep.protocol.lookup import find_state_dict_object, saved_path
from shardkeep.protocol.materialise import _init_state_dict
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, is_tensor_entry
from shardkeep.protocol.objects import load_object
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadPlan, ReadItem
from shardkeep.protocol.problems import BrokenProtocol
from shardkeep.state.toolkit.nested_shards import flatten_sharded_tensors
from shardkeep.state.toolkit.trees import (
    FLATTEN_MAPPING,
    OBJ_PATH,
    flatten_state_dict,
    flatten_state_dict_v_2_3,
    set_element,
)


class DefaultLoadPlanner(LoadPlanner):
    """
    Fills every value of a state, nested or flat, from the checkpoint.

    Extend it by `lookup_tensor` (where a tensor is found) and `transform_tensor` (what is filled for it), or by any
    method of `LoadPlanner`.
    """

    original_state_dict: STATE_DICT_TYPE
    mappings: FLATTEN_MAPPING

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        """
        Set how states are filled.

        Args:
            flatten_state_dict: The checkpoint holds the values of nested dicts and lists one by one.
            flatten_sharded_tensors: It holds ShardedTensors inside ShardedTensors by their offsets in the whole.
            allow_partial_load: Leave values that the checkpoint lacks as they are, instead of raising.

        """
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.original_state_dict = {}
        self.mappings = {}
        self.allow_partial_load = allow_partial_load

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Give memory to tensors on meta, flatten the state as far as asked for, and keep it."""
        _init_state_dict(state_dict)
        self.original_state_dict = state_dict
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """
        Return what this rank needs.

        Raises:
            MissingKeys: (a RuntimeError) the checkpoint lacks keys, and a partial load is not allowed.
            StateMismatch: (a ValueError) tensors have other sizes in the checkpoint.

        """
        if self.metadata is None:
            raise BrokenProtocol("a load needs the checkpoint's metadata", hint="give them to set_up_planner")
        if self.flatten_state_dict:
            self._flatten_as_saved(self.metadata.state_dict_metadata)
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def _flatten_as_saved(self, saved: Mapping[str, Any]) -> None:
        """Flatten by the rules of torch 2.3 where that finds keys of the checkpoint that today's rules do not."""
        if all(key in saved for key in self.state_dict) or not (unclaimed := saved.keys() - self.state_dict.keys()):
            return
        state_dict = self.original_state_dict
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        flat, mappings = flatten_state_dict_v_2_3(state_dict)
        if flat.keys() & unclaimed:
            self.state_dict, self.mappings = flat, mappings

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: each rank reads what it needs."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object into the state; one of a class that is not known to be safe is refused."""
        fqn = read_item.dest_index.fqn
        loaded = load_object(value, key=fqn)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, _as_keyed(self.original_state_dict, self.mappings[fqn]), loaded)
        else:
            # Where nested ShardedTensors are flattened, the state that is filled is another dict than the caller's.
            self.state_dict[fqn] = self.original_state_dict[fqn] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory of the state that an item fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the state's own memory was filled."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor that is filled for an index: the local memory of a shard."""
        found: torch.Tensor = find_state_dict_object(self.state_dict, index)
        return found

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the box of a tensor that an item fills."""
        box = tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if box.size(axis) != length:
                box = box.narrow(axis, start, length)
        return box


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """
    Makes the state from what the checkpoint holds, in an empty dict, on the CPU: all of it, or some keys.

    `keys` may be flat names or the first parts of their paths; a key of a nested dict stands for all that is in it.
    """

    def __init__(self, keys: set[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = keys
        super().__init__(*args, **kwargs)

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        if self.keys is None or key in self.keys:
            return True
        path = (metadata.planner_data or {}).get(key) or key.split(".")
        parts = [str(part) for part in path]
        return any(".".join(parts[:length]) in self.keys for length in range(1, len(parts) + 1))

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """
        Fill the empty state with empty tensors and placeholders, and go on as with any state.

        Raises:
            BrokenProtocol: (an AssertionError) the state is not empty, or there are no metadata.

        """
        if state_dict:
            raise BrokenProtocol("the state to make must be empty", hint="pass {}")
        if metadata is None:
            raise BrokenProtocol("the state is made from the checkpoint's metadata", hint="give them to set_up_planner")
        flat: dict[str, Any] = {}
        for key in metadata.state_dict_metadata:
            if not self._should_include_key(key, metadata):
                continue
            flat[key] = entry = metadata.state_dict_metadata[key]
            if is_tensor_entry(entry):
                flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]  # a tensor's
            set_element(state_dict, saved_path(metadata, key), flat[key])
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if self.flatten_state_dict:
            # The checkpoint says which names there are. Flattened again, a list of which some items were not asked for
            # would have others.
            self.state_dict, self.mappings = flat, {key: saved_path(metadata, key) for key in flat}


def _as_keyed(root: Mapping[Any, Any], path: OBJ_PATH) -> OBJ_PATH:
    """
    Return a path with the keys that the dicts on its way really have.

    Flat names know keys as strings only: an object under the integer 0 must not come back under "0", next to it.
    """
    found: list[Any] = []
    here: Any = root
    for part in path:
        key: Any = part
        if isinstance(here, Mapping):
            if part not in here:
                key = next((each for each in here if str(each) == part), part)
            here = here.get(key)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            here = None
        found.append(key)
    return tuple(found)
