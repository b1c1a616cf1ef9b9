"""
Saves in a process of their own.

The thread that waits for that process also meets the other ranks, as for any other save: a process that dies is a
failure of its rank in the step under way, and known to all ranks at once. The processes do not know of each other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from shardkeep.compat.async_thread import _AsyncCheckpointExecutor, once_staged
from shardkeep.compat.call_log import logged
from shardkeep.compat.calls import _stateful_to_state_dict
from shardkeep.compat.in_use import place_of
from shardkeep.compat.lanes import Lane, fail_together, is_alone, lane_of, ranks_in_lane
from shardkeep.compat.saver_handle import RemoteSave, SaverDied, SaverProcess
from shardkeep.compat.saver_process import Order, Place
from shardkeep.options import Options
from shardkeep.protocol.failures import CheckpointException
from shardkeep.protocol.gatherings import _DistWrapper
from shardkeep.protocol.metadata import STATE_DICT_TYPE, Metadata
from shardkeep.protocol.planners import SavePlanner
from shardkeep.protocol.storage import StorageWriter
from shardkeep.stage.leaves import open_tensor
from shardkeep.stage.snapshot import tensors_in
from shardkeep.stage.stagers import StateDictStager

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _ProcessBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """
    Saves in a process that is spawned at the first save and serves the later ones.

    The state reaches it in shared memory; the writer and the planner are pickled. It is given the rank and the size of
    the default group, and cannot talk to other ranks. One that has died is replaced at the next save.
    """

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
        lane = lane_of(process_group, no_dist=no_dist)
        world = _place_in_world(no_dist=no_dist)
        timeout_s = Options().timeout_s
        with contextlib.suppress(SaverDied):  # said by the save
            _start_saver(lane, world)
        box = [staging_future_or_state_dict]
        del staging_future_or_state_dict

        def work() -> Metadata:
            try:
                saver = _saver_of(lane, world, timeout_s)
                order = Order(
                    # Taken out of its box: one copy of the state is enough.
                    state=_in_shared_memory(_stateful_to_state_dict(once_staged(box.pop()))),
                    checkpoint_id=checkpoint_id,
                    storage_writer=storage_writer,
                    planner=planner,
                    rank=ranks.rank,
                    is_coordinator=ranks.is_coordinator,
                    use_collectives=use_collectives,
                )
            except BaseException as error:  # noqa: BLE001 - raised on all ranks
                fail_together(ranks, error, use_collectives=use_collectives)
            remote = RemoteSave(saver, order)
            try:
                return _run_remotely(ranks, remote, use_collectives=use_collectives)
            finally:
                with contextlib.suppress(SaverDied):
                    remote.forget()

        said = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
        call = logged(work, "save", log_exceptions=True, process_group=process_group, **said)
        return lane.submit(call, place_of(checkpoint_id, storage_writer), storage_writer, planner)


def _run_remotely(ranks: _DistWrapper, remote: RemoteSave, *, use_collectives: bool) -> Metadata:
    if not use_collectives:
        mine: list[bytes] = []

        def alone() -> None:
            [plan] = remote.decide([remote.plan()])
            mine.append(remote.finish([remote.write(plan)]))

        ranks.all_gather("write", alone)
        [written] = mine
    else:
        plan = ranks.reduce_scatter("plan", remote.plan, remote.decide)
        try:
            written = ranks.all_reduce("write", lambda: remote.write(plan), remote.finish)
        except CheckpointException as failed:
            # Where the coordinator itself failed, it may have been after the checkpoint was complete.
            if ranks.coordinator_rank not in failed.failures:
                with contextlib.suppress(SaverDied):
                    remote.discard()
            raise
    metadata: Metadata = pickle.loads(written)
    return metadata


def _start_saver(lane: Lane, world: Place | None) -> None:
    """
    Start the lane's process if it has none, or a dead one.

    On the thread of the caller: once the main script has ended, which is before the last save has, Python no longer
    knows where the script is, and a process that is started then has none of its classes.
    """
    with lane.starting:
        # A dead one is left to the lane's thread, which may be about to hear of it.
        if lane.saver is None or not lane.saver.alive():
            lane.saver = SaverProcess(world)


def _saver_of(lane: Lane, world: Place | None, timeout_s: float) -> SaverProcess:
    """Return the lane's process, ready; a new one if there is none, or it is dead, or this rank has become another."""
    if lane.saver is not None and lane.saver.world != world:
        lane.saver.close()
    _start_saver(lane, world)
    saver = lane.saver
    if saver is None:
        raise SaverDied("the process that saves is gone")
    saver.wait_until_ready(timeout_s)
    return saver


def _place_in_world(*, no_dist: bool) -> Place | None:
    if is_alone(no_dist):
        return None
    import torch.distributed as dist  # noqa: PLC0415 - loaded, as there are ranks

    return Place(dist.get_rank(), dist.get_world_size())


def _in_shared_memory(state: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """Return a state whose tensors another process can map: itself, or a copy in a few large pieces."""
    parts: list[Any] = [part for tensor in tensors_in(state) for part in open_tensor(tensor).parts]
    # Those without elements have no memory; those on an accelerator are said to be shared.
    if all(part.is_shared() and part.device.type == "cpu" for part in parts if part.numel()):
        return state
    shared: STATE_DICT_TYPE = StateDictStager(share_memory=True).stage(state)
    return shared
