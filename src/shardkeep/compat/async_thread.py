"""Saves on a thread of this process."""

from __future__ import annotations

import abc
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING

from shardkeep.compat.call_log import logged
from shardkeep.compat.calls import _profile, _stateful_to_state_dict, _storage_setup
from shardkeep.compat.in_use import place_of
from shardkeep.compat.lanes import fail_together, lane_of, ranks_in_lane
from shardkeep.compat.save_driver import _run
from shardkeep.protocol.gatherings import _DistWrapper
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.storage import StorageWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _AsyncCheckpointExecutor(abc.ABC):
    """Saves a state that has been staged, or is about to be, while its caller goes on."""

    @abc.abstractmethod
    def execute_save(
        self,
        staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        """
        Begin a save; all ranks of the group must call this, in the same order.

        Returns:
            A future of what was saved.

        """


class _ThreadBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """Saves on a thread, after the saves before it."""

    def execute_save(
        self,
        staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[Metadata]:
        """Begin a save, and return the future of what was saved."""
        ranks = ranks_in_lane(process_group, no_dist=no_dist)

        box = [staging_future_or_state_dict]
        del staging_future_or_state_dict

        def work() -> Metadata:
            return _save_staged(
                ranks,
                box.pop(),  # a failure that is kept must not keep the state
                checkpoint_id=checkpoint_id,
                storage_writer=storage_writer,
                planner=planner,
                use_collectives=use_collectives,
            )

        said = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
        call = logged(work, "save", log_exceptions=True, process_group=process_group, **said)
        return lane_of(process_group, no_dist=no_dist).submit(
            call, place_of(checkpoint_id, storage_writer), storage_writer, planner
        )


def save_wrapper(
    staging_future_or_state_dict: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a staged state on the calling thread, once it is there."""
    return _save_staged(
        ranks_in_lane(process_group, no_dist=no_dist),
        staging_future_or_state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        use_collectives=use_collectives,
    )


def _save_staged(
    ranks: _DistWrapper,
    staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE],
    *,
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    use_collectives: bool,
) -> Metadata:
    with _profile():
        try:
            state = _stateful_to_state_dict(once_staged(staged))
            writer = _storage_setup(storage_writer, checkpoint_id)
        except BaseException as error:  # noqa: BLE001 - raised on all ranks
            fail_together(ranks, error, use_collectives=use_collectives)
        return _run(ranks, lambda: state, writer, planner, use_collectives)


def once_staged(staged: STATE_DICT_TYPE | Future[STATE_DICT_TYPE]) -> STATE_DICT_TYPE:
    """Return the staged state, when it is there; raises what staging raised."""
    return staged.result() if isinstance(staged, Future) else staged
