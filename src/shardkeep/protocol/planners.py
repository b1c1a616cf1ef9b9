"""
What decides which values of a state are saved and loaded: the interfaces that users implement.

The drivers (`save_driver`, `load_driver`) say in which order they are called. `SavePlanner` and `LoadPlanner` have no
behaviour of their own; `DefaultSavePlanner` and `DefaultLoadPlanner` are what most users extend.
"""

from __future__ import annotations

import abc
import io

import torch

from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from shardkeep.protocol.plans import LoadPlan, ReadItem, SavePlan, WriteItem


class SavePlanner(abc.ABC):
    """
    Decides what each rank writes, and hands it over.

    A planner serves one save at a time, in this order: `set_up_planner` and `create_local_plan` on all ranks,
    `create_global_plan` on the coordinator, `finish_plan` on all ranks, then `resolve_data` for each item.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save of `state_dict`; what is needed later must be kept. Called on all ranks."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write. Called on all ranks."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank shall write, and the metadata of the checkpoint. Called on the coordinator."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan to carry out, given this rank's part of the global one. Called on all ranks."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """
        Return what is to be stored for an item of the final plan.

        Called at least once for each item, from any thread, also several at a time; what needs memory should be made
        here and not earlier. A tensor may be on any device and have any strides.
        """


class LoadPlanner:
    """
    Decides what each rank reads, and where it goes.

    A planner serves one load at a time, in this order: `set_up_planner` and `create_local_plan` on all ranks,
    `create_global_plan` on the coordinator, `finish_plan` on all ranks, then for each item `load_bytes`, or
    `resolve_tensor` and `commit_tensor`.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin to load into `state_dict`. Called on all ranks."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank needs. Called on all ranks."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return what each rank shall read, given what each needs. Called on the coordinator."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan to carry out, given this rank's part of the global one. Called on all ranks."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object into the state."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return the stream that the reader shall fill for an item, where the planner has one."""
        raise NotImplementedError(f"{type(self).__qualname__} has no stream for {read_item.dest_index.fqn!r}")

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that the reader shall fill for an item: memory of the state, or what is copied later."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take note that `tensor`, which `resolve_tensor` gave for the item, has been filled."""
