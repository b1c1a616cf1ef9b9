"""
The planner that saves a state as it is: everything each rank has, replicated values once.
"""

from __future__ import annotations

import dataclasses
import io
import logging
from typing import Any

import torch

from shardkeep.errors import InvalidShards
from shardkeep.protocol.dedupe import dedup_save_plans
from shardkeep.protocol.default_plans import (
    _validate_global_plan,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from shardkeep.protocol.foreign import from_ours
from shardkeep.protocol.lookup import find_state_dict_object
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex, StorageMeta
from shardkeep.protocol.plan_cache import PlanCache
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.plans import SavePlan, WriteItem, WriteItemType
from shardkeep.state.toolkit.nested_shards import flatten_sharded_tensors
from shardkeep.state.toolkit.trees import FLATTEN_MAPPING, flatten_state_dict

logger = logging.getLogger("shardkeep")

_LONGEST_MESSAGE = 500


class DefaultSavePlanner(SavePlanner):
    """
    Saves every value of a state, nested or flat, and each replicated one only once.

    Extend it by `lookup_object` (where a value is found) and `transform_object` (what is stored for it), or by any
    method of `SavePlanner`.
    """

    mappings: FLATTEN_MAPPING

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        """
        Set how states are saved.

        Args:
            flatten_state_dict: Store the values inside nested dicts and lists one by one.
            flatten_sharded_tensors: Store ShardedTensors inside ShardedTensors by their offsets in the whole.
            dedup_replicated_tensors: Has no effect, and is logged.
            dedup_save_to_lowest_rank: A replicated value is written by the first rank that has it, and not by the
                one with least to write.
            enable_plan_caching: Use the plans of this planner's previous save again where they have not changed.

        """
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.mappings = {}
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        if dedup_replicated_tensors is not None:
            logger.warning("DefaultSavePlanner: dedup_replicated_tensors has no effect any more; please leave it out")
        self._enable_plan_caching = enable_plan_caching
        self._plan_cache = PlanCache()
        self._storage_meta: StorageMeta | None = None

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state, as far as asked for, and keep it."""
        self._storage_meta = storage_meta
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return the plan to write everything this rank has."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        return self._plan_cache.offer(plan) if self._enable_plan_caching else plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """
        Return the plans without what is replicated, and the metadata.

        Raises:
            InvalidShards: (a ValueError) shards overlap, leave a hole, or lie outside their tensor.

        """
        if self._enable_plan_caching:
            answers, self.global_plan, self.metadata = self._plan_cache.decide(all_plans, self._create_global_plan)
        else:
            self.global_plan, self.metadata = self._create_global_plan(all_plans)
            answers = self.global_plan
        # Our driver translates for torch's storages. Torch's does not; whose storage it is can be told by what it says.
        in_its_words = from_ours(self._storage_meta)
        return in_its_words(answers), in_its_words(self.metadata)

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank)

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        if self.flatten_state_dict:
            merged: FLATTEN_MAPPING = {}
            # The first rank that has a key says where it belongs.
            for plan in reversed(global_plan):
                merged.update(plan.planner_data or {})
            metadata = dataclasses.replace(metadata, planner_data=merged)
        if faults := _validate_global_plan(global_plan, metadata):
            summary = "; ".join(faults)
            if len(summary) > _LONGEST_MESSAGE:
                summary = f"{summary[:_LONGEST_MESSAGE]}... ({len(faults)} faults)"
            raise InvalidShards(f"Failed to validate global plan: {summary}")
        return global_plan, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take this rank's part of the global plan as it is."""
        self.plan = self._plan_cache.accept(new_plan) if self._enable_plan_caching else new_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor of an item, or the bytes of its object."""
        found = self.lookup_object(write_item.index)
        data: torch.Tensor | io.BytesIO = self.transform_object(write_item, found)
        return data

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the value that is saved under an index."""
        return find_state_dict_object(self.state_dict, index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's name
        """Return what is stored for a value: a tensor as it is, anything else as `torch.save` writes it."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(object, stream)
            return stream
        return object
