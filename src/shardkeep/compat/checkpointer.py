"""One object that saves, saves asynchronously and loads, always with the same storages and planners."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shardkeep.compat.async_save import AsyncSaveResponse, async_save
from shardkeep.compat.calls import _stateful_to_state_dict
from shardkeep.compat.load_driver import load
from shardkeep.compat.save_driver import _run, save
from shardkeep.protocol.gatherings import _DistWrapper, in_step
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.protocol.planners import LoadPlanner, SavePlanner
from shardkeep.protocol.storage import StorageReader, StorageWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Checkpointer:
    """
    Saves to one storage and loads from another, as `save`, `async_save` and `load` do.

    Args:
        storage_writer: What is saved to.
        storage_reader: What is loaded from.
        process_group: The ranks that take part; all of them by default.
        coordinator_rank: The rank of the group that decides, in `save`.
        no_dist: Save and load on this process alone.
        load_planner: Decides what is read; by default everything.
        save_planner: Decides what is written; by default everything.

    """

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: ProcessGroup | None = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        load_planner: LoadPlanner | None = None,
        save_planner: SavePlanner | None = None,
    ) -> None:
        self.storage_writer = storage_writer
        self.storage_reader = storage_reader
        self.process_group = process_group
        self.coordinator_rank = coordinator_rank
        self.no_dist = no_dist
        self.load_planner = load_planner
        self.save_planner = save_planner

    def save(self, state_dict: STATE_DICT_TYPE) -> Metadata:
        """Save a state, and return what was saved."""
        if self.coordinator_rank and not self.no_dist:
            ranks = _DistWrapper(self.process_group, use_dist=True, coordinator_rank=self.coordinator_rank)
            state = in_step(ranks, lambda: _stateful_to_state_dict(state_dict))
            return _run(ranks, state, self.storage_writer, self.save_planner, use_collectives=True)
        return save(
            state_dict,
            storage_writer=self.storage_writer,
            planner=self.save_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )

    def async_save(self, state_dict: STATE_DICT_TYPE) -> Future[Metadata]:
        """Save a state while training goes on; the future holds what was saved once the checkpoint is complete."""
        response = async_save(
            state_dict,
            storage_writer=self.storage_writer,
            planner=self.save_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )
        return response.upload_completion if isinstance(response, AsyncSaveResponse) else response

    def load(self, state_dict: dict[str, Any]) -> None:
        """Fill a state in place."""
        load(
            state_dict,
            storage_reader=self.storage_reader,
            planner=self.load_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )
