"""
`async_save`: the state is copied first, then saved from the copy on a thread or in a process.

Saves of one group of ranks run one after the other on one thread. They use their own keys in the group's store, so that they
never mix with collectives or saves of the training thread. A save that follows an unretrieved failure, and raises it, runs all
the same, because other ranks may not know of the failure yet.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardkeep import saving
from shardkeep.dcp._impl import driver
from shardkeep.dcp._impl.default_save import saves_by_default
from shardkeep.dcp._impl.dist import _DistWrapper, in_step
from shardkeep.dcp._impl.file_writer import FileSystemWriter
from shardkeep.dcp._impl.process import RankAndSize, RemoteSave, SaverDied, SaverProcess, StagedSave
from shardkeep.engine.queue import SaveHandle, SaveQueue, set_outcome
from shardkeep.engine.stagers import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from shardkeep.errors import CheckpointError
from shardkeep.layouts import torch_values as protocol
from shardkeep.options import per_process
from shardkeep.saving import StartedSave
from shardkeep.storage.base import spec_of
from shardkeep.storage.file_systems import keeps, store_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardkeep.errors import EarlierSaveFailed


log = logging.getLogger("shardkeep")
T = TypeVar("T")


class SaveFuture(Future[T]):
    """The result of a save, which notes in the save's handle that it was retrieved. The save cannot be cancelled."""

    def __init__(self, handle: SaveHandle[T]) -> None:
        super().__init__()
        self.handle = handle
        self.set_running_or_notify_cancel()
        handle.outcome_to(self)

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        finally:
            self.handle.retrieved = self.handle.retrieved or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.handle.retrieved = True
        return error


class GroupSaves:
    """The saves of one group of ranks, which run one at a time, and the process that writes for them."""

    def __init__(self) -> None:
        self._queue = SaveQueue(threads=1, cancels_at_exit=False)
        self._thread_id: int | None = None
        self._order = threading.Lock()
        self.saver: SaverProcess | None = None
        """The process that writes, once there is one; used by the thread of this queue alone."""
        self.starting = threading.Lock()

    def begin(self, started: StartedSave[T]) -> SaveFuture[T]:
        """Go on with a save that the engine has started, after those before it."""
        future: SaveFuture[T] = SaveFuture(started.handle)
        with self._order:
            self._queue.begin(future.handle, started.work)
        return future

    def submit(self, work: Callable[[], T], where: str, *uses: object) -> SaveFuture[T]:
        """Run a save after those before it, of this group and of others that use the same objects."""
        future: SaveFuture[T] = SaveFuture(SaveHandle(where))
        box = [work]
        with self._order:
            self._queue.begin(future.handle, [functools.partial(self._run, box, driver.saves_using(*uses), where)])
            driver.note_save(future.handle, *uses, thread=lambda: self._thread_id)
        return future

    def take_failure(self) -> EarlierSaveFailed | None:
        """Return the failure of an earlier save that was never retrieved, once."""
        return self._queue.take_failure(
            hint="retrieve the result of each future before the next save; this save has been started, and goes on"
        )

    def _run(self, box: list[Callable[[], T]], earlier: Sequence[driver.SaveUnderWay], where: str) -> T:
        self._thread_id = threading.get_ident()
        driver.wait_for(earlier, where)
        return box.pop()()  # taken out of its box: nothing here may hold the state when the future is done


_all_group_saves = per_process(dict[str, GroupSaves])  # saves outlive the calls that began them


def group_saves_of(group: ProcessGroup | None, *, no_dist: bool) -> GroupSaves:
    groups = _all_group_saves()
    name = "alone"
    if not driver.is_alone(no_dist):
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded, as there is a group

        name = f"group {c10d._get_process_group_name(c10d._get_default_group() if group is None else group)}"
    return groups[name] if name in groups else groups.setdefault(name, GroupSaves())


def ranks_of_queue(group: ProcessGroup | None, *, no_dist: bool) -> _DistWrapper:
    """Return the ranks that save together, with their own keys in the store."""
    ranks = _DistWrapper(group, not driver.is_alone(no_dist), coordinator_rank=0)
    ranks._world = ranks._world.with_prefix("asynchronous")
    return ranks


Staged = protocol.STATE_DICT_TYPE | Future[protocol.STATE_DICT_TYPE]
"""What a save begins with: a copy of the state, or a future of one."""


class _SaveArgs(NamedTuple):
    checkpoint_id: str | os.PathLike[str] | None
    storage_writer: protocol.StorageWriter | None
    planner: protocol.SavePlanner | None
    use_collectives: bool


_RunSave = Callable[[_DistWrapper, list[Staged], _SaveArgs], protocol.Metadata]


class _AsyncCheckpointExecutor(abc.ABC):
    """Saves a state that has been staged, or is being staged, in the background."""

    @abc.abstractmethod
    def execute_save(
        self,
        staging_future_or_state_dict: Staged,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: protocol.StorageWriter | None = None,
        planner: protocol.SavePlanner | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[protocol.Metadata]:
        """Begin a save, after earlier ones; all ranks of the group must call this, in the same order."""


class _ThreadBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    def execute_save(
        self,
        staging_future_or_state_dict: Staged,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: protocol.StorageWriter | None = None,
        planner: protocol.SavePlanner | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> Future[protocol.Metadata]:
        saves = group_saves_of(process_group, no_dist=no_dist)
        run = self._prepare(saves, no_dist)
        box = [staging_future_or_state_dict]
        del staging_future_or_state_dict
        args = _SaveArgs(checkpoint_id, storage_writer, planner, use_collectives)
        running = contextlib.ExitStack()
        # Ranks count their saves in the order of the calls.
        ranks = running.enter_context(ranks_of_queue(process_group, no_dist=no_dist).call())
        running.callback(box.clear)

        def work() -> protocol.Metadata:
            with running:
                # In its box: neither a stored failure nor this call may keep the state alive.
                return run(ranks, box, args)

        call = driver.logged(work, "save", log_exceptions=True, process_group=process_group, **args._asdict())
        try:
            return saves.submit(call, driver.destination_of(checkpoint_id, storage_writer), storage_writer, planner)
        except BaseException:  # no thread can be started when the interpreter shuts down
            with running:
                raise

    def _prepare(self, saves: GroupSaves, no_dist: bool) -> _RunSave:
        """Return the function that saves, on the thread of the queue."""
        return _save_staged


def save_wrapper(
    staging_future_or_state_dict: Staged,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: protocol.StorageWriter | None = None,
    planner: protocol.SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> protocol.Metadata:
    """Save a state on the calling thread, when it is staged."""
    ranks = ranks_of_queue(process_group, no_dist=no_dist)
    args = _SaveArgs(checkpoint_id, storage_writer, planner, use_collectives)
    return _save_staged(ranks, [staging_future_or_state_dict], args)


def _save_staged(ranks: _DistWrapper, box: list[Staged], args: _SaveArgs) -> protocol.Metadata:
    with driver._profile():
        state = in_step(ranks, lambda: driver._stateful_to_state_dict(once_staged(box.pop())))
        writer = driver._storage_setup(args.storage_writer, args.checkpoint_id)
        return driver.run_save(ranks, state, writer, args.planner, args.use_collectives)


def once_staged(staged: Staged) -> protocol.STATE_DICT_TYPE:
    """Wait for the staged state, and return it; raises what staging raised."""
    return staged.result() if isinstance(staged, Future) else staged


class _ProcessBasedAsyncCheckpointExecutor(_ThreadBasedAsyncCheckpointExecutor):
    """
    Saves in a process that is spawned at the first save and serves the later ones (`dcp._impl.process`).

    If it dies, its rank fails in the current step, all ranks learn of it at once, and the next save starts another one.
    """

    def _prepare(self, saves: GroupSaves, no_dist: bool) -> _RunSave:
        world = None
        if not driver.is_alone(no_dist):
            import torch.distributed as dist  # noqa: PLC0415 - loaded, as there are ranks

            world = dist.get_rank(), dist.get_world_size()
        with contextlib.suppress(SaverDied):  # raised again by the save
            _start_saver(saves, world)
        return functools.partial(_save_remotely, saves, world)


def _save_remotely(
    saves: GroupSaves, world: RankAndSize | None, ranks: _DistWrapper, box: list[Staged], args: _SaveArgs
) -> protocol.Metadata:
    if saves.saver is not None and saves.saver.world != world:
        saves.saver.close()
    saver = _start_saver(saves, world)
    saver.wait_until_ready()
    state = driver._stateful_to_state_dict(once_staged(box.pop()))
    remote = RemoteSave(saver, StagedSave(state, ranks.rank, ranks.is_coordinator, *args))
    del state
    try:
        metadata: protocol.Metadata = pickle.loads(driver.run_steps(ranks, remote, args.use_collectives))
        return metadata
    finally:
        remote.forget()


def _start_saver(saves: GroupSaves, world: RankAndSize | None) -> SaverProcess:
    """Return the process of a group; a new one if there is none, or if it has died."""
    # First called on the thread of the caller: once the main script has ended, which is before the last save has,
    # Python no longer knows where the script is, and a process that is started then has none of its classes.
    with saves.starting:
        # A dead process is not closed here: the thread that uses it may be about to notice.
        if saves.saver is None or not saves.saver.alive():
            saves.saver = SaverProcess(world)
        return saves.saver


class AsyncCheckpointerType(enum.Enum):
    """Where an asynchronous save runs."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass
class AsyncSaveResponse:
    """The two futures of a save whose stager works in the background."""

    staging_completion: Future[None]
    """Done when the state may be changed; fails if it could not be copied."""
    upload_completion: Future[protocol.Metadata]
    """Done when the checkpoint is complete."""


@driver._dcp_method_logger(log_exceptions=True)
def async_save(
    state_dict: protocol.STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: protocol.StorageWriter | None = None,
    planner: protocol.SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[protocol.Metadata] | AsyncSaveResponse:
    """
    Copy a state, and save the copy in the background, in the order of the calls, which must be the same on all ranks.

    Returns a future of the metadata or, with a stager that works in the background, an `AsyncSaveResponse`. The state
    may be changed when this returns, or when `staging_completion` is done. What the stager raises fails the save on all
    ranks. If an earlier save failed and was never retrieved on this rank, this raises `EarlierSaveFailed`; this save
    runs all the same, and the exception's `response` is what would have been returned.

    Args:
        ...: Those of `save`. The `storage_writer` is also the stager, if it is one and no other is given.
        async_checkpointer_type: Save on a thread, or in a separate process, which needs an importable main module.
        async_stager: Copies the state; the caller closes it after the last save.

    """
    in_process = async_checkpointer_type == AsyncCheckpointerType.PROCESS
    no_dist = driver.without_ranks(no_dist, "saves", decorators=1)
    writer_stages = async_stager is None and isinstance(storage_writer, AsyncStager)
    stager: Any = storage_writer if writer_stages else async_stager
    if stager is None:
        stager = DefaultStager(StagingOptions(False, False, False, False))  # it has no thread that must be ended
    saves = group_saves_of(process_group, no_dist=no_dist)
    earlier = saves.take_failure()
    writer = _staged_by_engine(stager, storage_writer, planner, checkpoint_id, in_process) if use_collectives else None
    if writer is not None:
        ranks = ranks_of_queue(process_group, no_dist=no_dist)
        response = _start_by_engine(saves, ranks, state_dict, writer, planner, stager, in_process=in_process)
    else:
        executor = _ProcessBasedAsyncCheckpointExecutor() if in_process else _ThreadBasedAsyncCheckpointExecutor()
        begin = functools.partial(
            executor.execute_save,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )

        def stage() -> Staged:
            states = driver._stateful_to_state_dict(state_dict)
            staged: Staged = driver.logged(stager.stage, "stage_state_dict", log_exceptions=True)(states)
            return staged

        response = _stage_and_begin(stage, begin, stager)
    if earlier is not None:
        # Not before: the other ranks may not know of the failure yet, and need this rank's part of this save.
        earlier.response = response
        raise earlier
    return response


def _staged_by_engine(
    stager: AsyncStager, writer: Any, planner: object, checkpoint_id: str | os.PathLike[str] | None, in_process: bool
) -> FileSystemWriter | None:
    """Return a writer of its own for a save in which nothing of the user's takes part; None for any other save."""
    kind = next(
        (each for each in (FileSystemWriter, DefaultStager, BlockingAsyncStager) if isinstance(stager, each)), None
    )
    if kind is None or not keeps(stager, kind, ("stage", "synchronize_staging")):
        return None
    try:
        own: object = driver._storage_setup(copy(writer), checkpoint_id)
        if not saves_by_default(own, planner):
            return None
        # The engine's writer process must be able to open the place.
        store = store_of(own.fs, own.path)
        reached = not in_process or (hasattr(os, "memfd_create") and store is not None and spec_of(store) is not None)
    except (CheckpointError, OSError, ValueError, ImportError):
        return None  # the save says what is wrong
    return own if reached else None


def _start_by_engine(
    saves: GroupSaves,
    ranks: _DistWrapper,
    state_dict: protocol.STATE_DICT_TYPE,
    writer: FileSystemWriter,
    planner: protocol.SavePlanner | None,
    stager: Any,
    *,
    in_process: bool,
) -> Future[protocol.Metadata] | AsyncSaveResponse:
    """Take the snapshot of `sk.async_save`, and go on with the save on the thread of the queue."""
    layout, session, events = driver.default_session(ranks, writer, planner, driver.modules_in(state_dict), copies=True)
    handle: SaveHandle[protocol.Metadata] = SaveHandle(f"{os.fspath(writer.checkpoint_id)!r}")

    def state() -> protocol.STATE_DICT_TYPE:
        return driver._stateful_to_state_dict(state_dict)

    def start() -> StartedSave[protocol.Metadata]:
        return saving.start_in_session(
            session,
            events,
            handle,
            state,
            lambda committed, _: layout.metadata(committed),
            staging="auto",
            writer="process" if in_process else "thread",
            thread=stager.lend(state_dict, handle.staged._future),
        )

    started = driver.logged(start, "stage_state_dict", log_exceptions=True)()
    with started.abandoned_on_error():
        upload = saves.begin(started)
        if isinstance(stager, DefaultStager) and stager._config.use_async_staging:
            return AsyncSaveResponse(handle.staged._future, upload)
        started.wait_until_staged()
    return upload


def _stage_and_begin(
    stage: Callable[[], Staged], begin: Callable[[Staged], Future[protocol.Metadata]], stager: AsyncStager
) -> Future[protocol.Metadata] | AsyncSaveResponse:
    checked: Future[protocol.STATE_DICT_TYPE] = Future()
    upload: Future[protocol.Metadata] | None = None
    try:
        staged = stage()
        if not isinstance(staged, Future) and stager.should_synchronize_after_execute:
            # The save waits for the stager, and fails with it.
            upload = begin(checked)
            driver.logged(stager.synchronize_staging, "maybe_synchronize_staging", log_exceptions=True)()
            checked.set_result(staged)
            return upload
    except BaseException as error:
        # Fail the save on the other ranks too, which have staged their part and would wait for this rank.
        checked.set_exception(error)
        (upload or begin(checked)).add_done_callback(lambda save: save.exception())  # retrieved: it is raised now
        raise
    if not isinstance(staged, Future):
        return begin(staged)
    response = AsyncSaveResponse(Future(), begin(staged))

    def pass_on(done: Future[protocol.STATE_DICT_TYPE]) -> None:
        set_outcome(response.staging_completion, None, CancelledError() if done.cancelled() else done.exception())

    staged.add_done_callback(pass_on)
    return response


@dataclass(eq=False)
class _Checkpointer:
    """Saves to one storage and loads from another, as `save`, `async_save` and `load` do."""

    storage_writer: protocol.StorageWriter
    storage_reader: protocol.StorageReader
    _: KW_ONLY
    process_group: ProcessGroup | None = None
    coordinator_rank: int = 0
    no_dist: bool = False
    load_planner: protocol.LoadPlanner | None = None
    save_planner: protocol.SavePlanner | None = None

    def save(self, state_dict: protocol.STATE_DICT_TYPE) -> protocol.Metadata:
        if self.coordinator_rank and not self.no_dist:
            ranks = _DistWrapper(self.process_group, use_dist=True, coordinator_rank=self.coordinator_rank)
            state = in_step(ranks, lambda: driver._stateful_to_state_dict(state_dict))
            modules = driver.modules_in(state_dict)
            return driver.run_save(ranks, state, self.storage_writer, self.save_planner, True, modules)
        return driver.save(
            state_dict,
            storage_writer=self.storage_writer,
            planner=self.save_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )

    def async_save(self, state_dict: protocol.STATE_DICT_TYPE) -> Future[protocol.Metadata]:
        response = async_save(
            state_dict,
            storage_writer=self.storage_writer,
            planner=self.save_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )
        return response.upload_completion if isinstance(response, AsyncSaveResponse) else response

    def load(self, state_dict: dict[str, Any]) -> None:
        driver.load(
            state_dict,
            storage_reader=self.storage_reader,
            planner=self.load_planner,
            process_group=self.process_group,
            no_dist=self.no_dist,
        )
