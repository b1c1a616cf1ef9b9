"""
A save that goes on while training does: the state is copied first, then saved from the copy.

Nothing that belongs to training waits for it. Copying that fails fails the save, on all ranks.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkeep.compat.async_process import _ProcessBasedAsyncCheckpointExecutor
from shardkeep.compat.async_thread import _AsyncCheckpointExecutor, _ThreadBasedAsyncCheckpointExecutor
from shardkeep.compat.call_log import _dcp_method_logger, logged
from shardkeep.compat.calls import without_ranks
from shardkeep.compat.lanes import lane_of
from shardkeep.compat.save_driver import _logged_states
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.storage import StorageWriter
from shardkeep.stage.blocking import BlockingAsyncStager
from shardkeep.stage.stagers import AsyncStager, DefaultStager, StagingOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Staged = STATE_DICT_TYPE | Future[STATE_DICT_TYPE]


class AsyncCheckpointerType(enum.Enum):
    """Where an asynchronous save runs."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass
class AsyncSaveResponse:
    """The two futures of a save whose stager works in the background."""

    staging_completion: Future[None]
    """Done when the state may be changed; fails if it could not be copied."""
    upload_completion: Future[Metadata]
    """Done when the checkpoint is complete."""


@_dcp_method_logger(log_exceptions=True)
def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """
    Copy a state, and save the copy while the caller goes on.

    Saves of one group run in the order of the calls, one after the other; all ranks must make the calls in the same
    order. They use no collective: the group needs no backend for the CPU.

    Args:
        state_dict: This rank's part of the state.
        checkpoint_id: Where to save, in the terms of the storage.
        storage_writer: Writes the data; it is also the stager, if it is one and no other is given.
        planner: Decides what is written; by default everything, replicated values once.
        process_group: The ranks that save; all of them by default.
        async_checkpointer_type: Save on a thread, or in a process of its own, which needs an importable main module.
        async_stager: Copies the state; the caller closes it after the last save.
        no_dist: Save on this process alone.
        use_collectives: False to have each rank write a checkpoint of its own, with its own metadata.

    Returns:
        A future of what was saved; with a stager that works in the background, an `AsyncSaveResponse`. The state may
        be changed when this returns, or when `staging_completion` is done.

    Raises:
        EarlierSaveFailed: An earlier save of the group failed, and nobody on this rank asked for its result. This save
            has been begun all the same: what would have been returned is the exception's `response`.
        Exception: What the stager raised. The save fails on the other ranks too.

    """
    in_process = async_checkpointer_type == AsyncCheckpointerType.PROCESS
    executor: _AsyncCheckpointExecutor = (
        _ProcessBasedAsyncCheckpointExecutor() if in_process else _ThreadBasedAsyncCheckpointExecutor()
    )
    no_dist = without_ranks(no_dist, "saves")

    def begin(staged: Staged) -> Future[Metadata]:
        return executor.execute_save(
            staged,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )

    stager, own = _choose(async_stager, storage_writer, in_process=in_process)

    def stage() -> Staged:
        return logged(stager.stage, "stage_state_dict", log_exceptions=True)(_logged_states(state_dict))

    earlier = lane_of(process_group, no_dist=no_dist).take_unasked()
    try:
        response = _stage_and_begin(stage, begin, stager)
    except BaseException:
        if own is not None:
            own.close()
        raise
    if own is not None:
        closing = own
        upload = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        upload.add_done_callback(lambda _: closing.close())
    if earlier is not None:
        # Not before: the other ranks, who may not know of that failure yet, make this save and need its part of it.
        earlier.response = response
        raise earlier
    return response


def _choose(given: AsyncStager | None, writer: object, *, in_process: bool) -> tuple[AsyncStager, DefaultStager | None]:
    """Return the stager to use, and again if it is ours to close."""
    if given is not None:
        return given, None
    if isinstance(writer, AsyncStager):
        if isinstance(writer, BlockingAsyncStager):
            writer._share_memory = in_process  # so that its copy needs not be copied again for the other process
        return writer, None
    own = DefaultStager(StagingOptions(False, in_process, False, False))
    return own, own


def _stage_and_begin(
    stage: Callable[[], Staged], begin: Callable[[Staged], Future[Metadata]], stager: AsyncStager
) -> Future[Metadata] | AsyncSaveResponse:
    try:
        staged = stage()
    except BaseException as error:
        _tell_others(begin, error)
        raise
    if isinstance(staged, Future):
        response = AsyncSaveResponse(Future(), begin(staged))
        staged.add_done_callback(lambda done: _pass_on(done, response.staging_completion))
        return response
    if not stager.should_synchronize_after_execute:
        return begin(staged)
    # Saved only if the stager says that it is there: the future of a failed one fails.
    checked: Future[STATE_DICT_TYPE] = Future()
    upload = begin(checked)
    try:
        logged(stager.synchronize_staging, "maybe_synchronize_staging", log_exceptions=True)()
    except BaseException as error:
        checked.set_exception(error)
        upload.add_done_callback(_ask)  # the caller gets it now
        raise
    checked.set_result(staged)
    return upload


def _tell_others(begin: Callable[[Staged], Future[Metadata]], error: BaseException) -> None:
    """Let the save fail on the other ranks, which have staged theirs and would wait for this one."""
    failed: Future[STATE_DICT_TYPE] = Future()
    failed.set_exception(error)
    begin(failed).add_done_callback(_ask)  # it is raised now


def _ask(upload: Future[Metadata]) -> None:
    """Take a failure as asked for: the next save need not raise it."""
    upload.exception()


def _pass_on(staging: Future[STATE_DICT_TYPE], to: Future[None]) -> None:
    try:
        staging.result()
    except BaseException as error:  # noqa: BLE001 - of whoever waits
        to.set_exception(error)
    else:
        to.set_result(None)
