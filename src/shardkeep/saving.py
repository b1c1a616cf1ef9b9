"""
Saves: `save` returns when the checkpoint is committed, `async_save` returns a handle while training goes on.

Both make the same steps (`engine.save_session`): describe, plan, write, commit. An asynchronous save describes the state and
copies what must be copied in its call; threads do the rest, and ranks communicate only through their key-value store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from shardkeep.dist.rendezvous import Rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.codecs import Codecs
from shardkeep.engine.native_save import NativeSave
from shardkeep.engine.pools import staging_memory
from shardkeep.engine.process.client import writer_manager
from shardkeep.engine.queue import SaveHandle, pending_saves
from shardkeep.engine.report import Phases, SaveEvents, SaveReport
from shardkeep.engine.save_session import (
    CommittedSave,
    DescribedState,
    RankPlan,
    SaveArguments,
    SaveSession,
    WrittenFiles,
    kept_plans,
)
from shardkeep.engine.snapshot import step_barriers, take_snapshot
from shardkeep.engine.staging import BackgroundWrite
from shardkeep.engine.workers import budget_for_store
from shardkeep.engine.writer import write_files
from shardkeep.errors import StateError
from shardkeep.options import Options, collector_paused
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage.base import Store
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.resolve import open_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_STAGING = ("auto", "overlap", "device", "host")
_WRITERS = ("thread", "process")
_RETRIEVE = "call result() on each handle before the next save; what this call saves is not affected"


def save(
    state: Mapping[str, Any],
    where: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    meta: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    check_replicas: bool = False,
    codecs: Codecs = None,
    group: ProcessGroup | World | None = None,
    options: Options | None = None,
) -> SaveReport:
    """
    Save a state to one place, as one checkpoint; called by all ranks of `group` (or of the default group).

    Returns when the checkpoint is durable and committed. If it raises on one rank, it raises on all of them, and a checkpoint
    that was committed there before is unchanged.

    Args:
        state: nested dicts, lists and tuples of tensors (plain, DTensor, ShardedTensor, `ShardedBox`), numpy arrays,
            plain values, modules, optimizers (with their modules), objects that have `state_dict` and
            `load_state_dict`, and `PerRank` of any of these. Every rank must have the same objects in it.
        where: a path, a URL, or a store.
        step: a whole number, stored in the commit record. The value of rank 0 is used.
        meta: JSON values of your own, stored in the commit record. Those of rank 0 are used.
        overwrite: replace a committed checkpoint; without it, an existing checkpoint is an error.
        allow_pickle: pickle leaves that have no safe form; loading them needs it again.
        check_replicas: hash replicated tensors on every rank, and raise if they differ.
        codecs: the codecs of the files: names or configs, in order, such as `["float", "aes"]`; or a mapping from parts of the
            state to such lists, where the closest name counts (`{"optimizer": [...], "optimizer.state.*.exp_avg": []}`) and
            other parts have none. Rank 0's are used. Keys for encryption are in `options`, or in the environment
            (SHARDKEEP_KEY_FILE), on every rank.
        group: the ranks that take part.
        options: threads, memory and deadlines.

    Raises:
        StateError: `step` or `meta` cannot be stored in the commit record, or `codecs` names a part that the state does not have.
        UnsupportedLeaf: a leaf cannot be stored; names its key.
        InvalidShards: the shards of all ranks do not tile their tensors.
        CheckpointExists: there is a checkpoint, and `overwrite` was not given.
        StorageError: the store failed.
        RanksSilent: ranks did not answer in time; names them.
        EarlierSaveFailed: an earlier asynchronous save failed, and its result was never retrieved. This save has succeeded:
            its report is the error's `response`.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> report = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, where)
        >>> report.bytes_total
        64

    """
    options = options or Options()
    how = SaveArguments(where, step, meta, overwrite, allow_pickle, check_replicas, codecs, group, options)
    return run_save(state, how)


def run_save(state: Mapping[str, Any], request: SaveArguments) -> SaveReport:
    world = current_world(request.group, timeout_s=request.options.timeout_s)
    session, events = _new_session(request, world, Phases())
    _, report = save_in_session(session, events, state)
    _raise_earlier_failure(report)
    return report


def save_in_session(session: SaveSession, events: SaveEvents, state: Any) -> tuple[CommittedSave, SaveReport]:
    with events.reporting(background=False), session.running() as ranks:
        describe = session.layout.describer(ranks, session.phases, state)
        described: list[DescribedState] = []

        def describing() -> DescribedState:
            described.append(describe())
            return described[0]

        with collector_paused():
            plan = session.plan(ranks, describing)
        written = session.write(ranks, plan, lambda: _write(session, described[0], plan, events))
        with collector_paused():
            committed = session.commit(ranks, plan, written, described[0].labels)
        seconds = session.phases.now()
    report = session.finish(committed, written, seconds=seconds, blocked_s=seconds, staged_s=seconds)
    events.committed(report)
    return committed, report


def _write(session: SaveSession, described: DescribedState, plan: RankPlan, events: SaveEvents) -> WrittenFiles:
    synchronize_devices(described.description.pieces)
    with collector_paused():
        files = session.layout.files(described, plan.answer, plan.save_id)
    options, jobs, codecs = session.options, files.jobs, files.codecs
    coded = bool(codecs and codecs.chains)
    budget = budget_for_store(session.store, options.io_threads, options.host_budget_bytes, coded=coded)
    write_files(
        codecs.over(session.store) if codecs else session.store,
        jobs,
        threads=budget.threads,
        window_nbytes=budget.window_nbytes,
        scope=CancelScope(budget=budget.room),
        on_written=lambda written, total: events.progressed(staged=total, written=written, total=total),
    )
    events.written(sum(job.nbytes for job in jobs))
    return files.written()


def async_save(
    state: Mapping[str, Any],
    where: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    meta: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    check_replicas: bool = False,
    codecs: Codecs = None,
    group: ProcessGroup | World | None = None,
    options: Options | None = None,
    staging: Literal["auto", "overlap", "device", "host"] = "auto",
    writer: Literal["thread", "process"] = "thread",
    max_in_flight: int = 1,
) -> SaveHandle[SaveReport]:
    """
    Save a state while training goes on; called by all ranks of `group`, in the same order.

    The call returns when the state has been described, and copied as far as necessary. The checkpoint holds the state at the time
    of the call, if nothing of it changes before `handle.staged`. Steps of optimizers in the state wait for that by
    themselves. After the call, no collective is made.

    Args:
        state: as for `save`.
        where: as for `save`.
        step: as for `save`.
        meta: as for `save`.
        overwrite: as for `save`.
        allow_pickle: as for `save`.
        check_replicas: as for `save`.
        codecs: as for `save`.
        group: as for `save`.
        options: as for `save`; also the memory limits of staging.
        staging: How tensors on an accelerator are copied; tensors in host memory are copied in the call, within
            `Options.staging_bytes`. "overlap": while the next forward and backward run, without more memory on the device. This
            is for the parameters and the state of optimizers in the state; everything else is copied on the device, in the
            call. Without an optimizer in the state, wait for `handle.staged` before you change anything. "device": everything is
            copied on the device, in the call. "host": the call waits until everything is copied. "auto": as "device" as far as
            that takes no more than half of the free memory there; the rest as "overlap" if it is memory of optimizers, and as
            "host" if not.
        writer: What hashes and writes. "thread": threads of this process. "process": a writer process, which the first such save
            starts, and which is kept, and replaced if it dies; tensors are copied to memory that both processes share. `where` is
            then a path, a URL, or what `open_place` returned; not a store of your own, nor `memory://`.
        max_in_flight: With this many saves in progress, the call waits for the first of them.

    Returns:
        A handle: `staged`, `result`, `progress`, `cancel`.

    Raises:
        EarlierSaveFailed: an earlier asynchronous save failed, and its result was never retrieved. This save has been started:
            its handle is the error's `response`.
        StateError: the state cannot be saved. The save fails on the other ranks too.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> handle = sk.async_save({"w": torch.ones(4, 4)}, where)
        >>> handle.result().bytes_total
        64

    """
    options = options or Options()
    how = SaveArguments(where, step, meta, overwrite, allow_pickle, check_replicas, codecs, group, options)
    return start_save(state, how, staging=staging, writer=writer, max_in_flight=max_in_flight)


def start_save(
    state: Mapping[str, Any], request: SaveArguments, *, staging: str, writer: str, max_in_flight: int
) -> SaveHandle[SaveReport]:
    phases, options = Phases(), request.options
    if staging not in _STAGING or writer not in _WRITERS or max_in_flight < 1:
        raise StateError(
            f"staging={staging!r}, writer={writer!r}, max_in_flight={max_in_flight}",
            hint=f"staging is one of {_STAGING}, writer one of {_WRITERS}",
        )
    # Keys of its own: training threads may use the ranks' key-value store meanwhile.
    world = current_world(request.group, timeout_s=options.timeout_s).with_prefix("asynchronous-saves")
    session, events = _new_session(request, world, phases)
    handle: SaveHandle[SaveReport] = SaveHandle(session.store.url)
    with phases.phase("queue"):
        pending_saves().wait_until_fewer_than(max_in_flight)
    started = start_in_session(session, events, handle, state, lambda _, report: report, staging=staging, writer=writer)
    del state  # only the thread holds it now
    with started.abandoned_on_error():
        pending_saves().begin(handle, started.work)
        started.wait_until_staged()
    _raise_earlier_failure(handle)
    return handle


@dataclass(frozen=True)
class StartedSave(Generic[T]):
    """A save whose call has copied what it must, and whose work goes on on another thread."""

    handle: SaveHandle[T]
    work: list[Callable[[], T]]
    """What is left to do, for a thread to take: nothing else may hold it, because it holds the state."""
    running: ExitStack
    must_wait: Future[bool]
    """Whether some of the state is still the caller's, and the caller must wait until it is copied."""

    def wait_until_staged(self) -> None:
        if self.must_wait.result():
            self.handle.staged.wait_without_raising()

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Cancel the save if what is inside fails: the caller gets no handle, and the state may change before it is copied."""
        try:
            yield
        except BaseException:
            self.handle.cancel()
            with suppress(IndexError):  # a thread has it, and ends it
                self.work.pop()
                wait([self.must_wait])
                self.running.__exit__(*sys.exc_info())
            raise


def start_in_session(
    session: SaveSession,
    events: SaveEvents,
    handle: SaveHandle[T],
    state: Any,
    result: Callable[[CommittedSave, SaveReport], T],
    *,
    staging: str,
    writer: str,
    thread: Executor | None = None,
) -> StartedSave[T]:
    """Describe a state and take its snapshot; what lies in host memory is copied on `thread` if there is one."""
    phases, options = session.phases, session.options
    must_wait: Future[bool] = Future()
    with ExitStack() as inside:
        inside.enter_context(events.reporting(background=True))
        ranks: Rendezvous = inside.enter_context(session.running())
        # Before the state is described: the process starts meanwhile.
        process = None
        if writer == "process":
            process = inside.enter_context(
                writer_manager().session(
                    session.store, options.io_threads, wanted=handle.wanted, timeout_s=options.timeout_s
                )
            )
        with collector_paused():
            described = [session.layout.describer(ranks, phases, state)()]
        del state
        inside.callback(described.clear)
        optimizers = described[0].optimizers
        with phases.phase("stage"), collector_paused():
            description, order = described[0].description, partial(session.order, described[0])
            snapshot = take_snapshot(
                description.pieces, staging=staging, optimizers=optimizers, order=order, derived=description.derived
            )
            del description, order
        memory = process.memory if process else staging_memory()
        background = BackgroundWrite(snapshot, handle, memory, options, events)
        inside.enter_context(background.releasing())
        if thread is not None and snapshot.on_host:
            must_wait = thread.submit(background.copy_on_host)
            inside.callback(wait, [must_wait])
        else:
            must_wait.set_result(background.copy_on_host())
        lost_s = step_barriers().measure(optimizers[0]) if optimizers else None
        if snapshot.live_nbytes and optimizers:
            step_barriers().put(background.barrier, optimizers)
        choice = snapshot.choice
        running = inside.pop_all()
    blocked_s = phases.now()

    def write(plan: RankPlan) -> WrittenFiles:
        # Through the list, which is cleared: frames of an error that is kept must not hold the tensors.
        mine, tensors = described.pop(), background.snapshot.tensors
        # From here on only the file jobs hold the tensors, and drop each when it is copied.
        held = replace(mine, description=replace(mine.description, pieces=tensors))
        try:
            files = session.layout.files(held, plan.answer, plan.save_id)
        finally:
            del mine, held
            tensors.clear()
        try:
            background.write(session.store, files.jobs, files.codecs, process)
            handle.begin_commit()
            written = files.written()
        finally:
            files.jobs.clear()
        events.written(sum(entry.nbytes for entry in written.files))
        return written

    def finish() -> T:
        with running:
            plan, labels = session.plan(ranks, lambda: described[0]), described[0].labels
            waits = must_wait.result()
            written = session.write(ranks, plan, lambda: write(plan))
            committed = session.commit(ranks, plan, written, labels)
            seconds = phases.now()
        staged_s = max(background.staged_s, blocked_s)
        waited_s = staged_s if waits else blocked_s
        report = session.finish(
            committed,
            written,
            seconds=seconds,
            blocked_s=waited_s,
            staged_s=staged_s,
            staging=choice,
            lost_s=lost_s() if lost_s else None,
        )
        events.committed(report)
        return result(committed, report)

    return StartedSave(handle, [finish], running, must_wait)


def finish_saves() -> None:
    """
    Wait for all asynchronous saves of this process, then release their memory, threads, hooks and writer process.

    Raises:
        EarlierSaveFailed: one failed, and its result was never retrieved.

    """
    pending_saves().finish()
    # Not if the wait was interrupted: a save that goes on needs all of these.
    step_barriers().remove()
    staging_memory().release()
    kept_plans().clear()
    writer_manager().end()
    if (earlier := pending_saves().take_failure(hint=_RETRIEVE)) is not None:
        raise earlier


def _new_session(request: SaveArguments, world: World, phases: Phases) -> tuple[SaveSession, SaveEvents]:
    store = open_on_all_ranks(request.where, world, direct=request.options.direct_io, doing="save to")
    events = SaveEvents(phases, rank=world.rank, where=store.url, step=request.step)
    return SaveSession(NativeSave(request, store, world), store, world, request.options, phases=phases), events


def _raise_earlier_failure(result: SaveReport | SaveHandle[SaveReport]) -> None:
    """Raise a failure that was never retrieved: at the end of a call, because other ranks wait for this rank's part."""
    than = result if isinstance(result, SaveHandle) else None
    if (earlier := pending_saves().take_failure(hint=_RETRIEVE, than=than)) is not None:
        earlier.response = result
        raise earlier
