"""
What moves the data of a checkpoint: the interfaces that users implement, and what a writer reports.
"""

from __future__ import annotations

import abc
import os
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from shardkeep.protocol.metadata import Metadata, MetadataIndex, StorageMeta
from shardkeep.protocol.planners import LoadPlanner, SavePlanner
from shardkeep.protocol.plans import LoadPlan, SavePlan


@dataclass(frozen=True)
class WriteResult:
    """Where an item was written."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class StorageWriter(abc.ABC):
    """
    Writes what a save planner hands over.

    Used for one save at a time, in this order: `reset` if a checkpoint id was given, `storage_meta`,
    `set_up_storage_writer` and `prepare_local_plan` on all ranks, `prepare_global_plan` on the coordinator,
    `write_data` on all ranks, `finish` on the coordinator.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous save; the next one goes to `checkpoint_id`, if given."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save. Those that take keywords get `rank` and `use_collectives`."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan with what the storage adds to it, best in `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks with what the storage adds to them. Called on the coordinator."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every item of the plan, each as `planner.resolve_data` gives it."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint complete, given what all ranks wrote. Called on the coordinator."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether this storage can hold a checkpoint of this id."""

    def storage_meta(self) -> StorageMeta | None:
        """Return what the storage says about itself to the planner and in the checkpoint."""
        return None


class StorageReader(abc.ABC):
    """
    Reads what a load planner asks for.

    Used for one load at a time, in this order: `reset` if a checkpoint id was given, `read_metadata`,
    `set_up_storage_reader` and `prepare_local_plan` on all ranks, `prepare_global_plan` on the coordinator,
    `read_data` on all ranks.
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load; the next one is from `checkpoint_id`, if given."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata; with `rank`, those that this rank alone wrote."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a load. Those that take keywords get `rank` and `use_collectives`."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan with what the storage adds to it, best in `storage_data`."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks with what the storage adds to them. Called on the coordinator."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of the plan: objects to `planner.load_bytes`, tensors into `planner.resolve_tensor`."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether this storage can hold a checkpoint of this id."""
