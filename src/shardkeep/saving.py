"""
Saves: the caller waits for the checkpoint, or holds a handle of it.

Both make the same steps (`run.save_call`). An asynchronous save describes the state and copies what must be copied in
its call; all the rest is done by threads, and ranks meet through their store alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from shardkeep.dist.world import World, current_world
from shardkeep.engine.access import keys_for, open_on_all_ranks
from shardkeep.engine.codecs import Codecs
from shardkeep.engine.coordinator import CommittedSave
from shardkeep.engine.pools import staging_memory
from shardkeep.engine.process.client import writer_manager
from shardkeep.engine.queue import SaveHandle, pending_saves
from shardkeep.engine.rank_plan import make_file_jobs
from shardkeep.engine.report import SAVE_WORK, Phases, SaveEvents, SaveReport, find_slowest, report_progress
from shardkeep.engine.save_session import BackgroundSave, RecordLabels, SaveSession
from shardkeep.engine.snapshot import take_snapshot
from shardkeep.engine.step_barrier import step_barriers
from shardkeep.engine.workers import budget_for_store
from shardkeep.engine.writer import write_files
from shardkeep.errors import StateError
from shardkeep.format.pickles import collector_paused
from shardkeep.format.record import FileEntry
from shardkeep.options import Options
from shardkeep.state.leaves import synchronize_devices
from shardkeep.storage.base import Store
from shardkeep.storage.cancel import CancelScope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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

    Returns only after the checkpoint is durable and committed. If it raises, on any rank, it raises on all of them,
    and whatever was committed there before is as it was.

    Args:
        state: nested dicts, lists and tuples of tensors (plain, DTensor, ShardedTensor, `ShardedBox`), numpy arrays,
            plain values, modules, optimizers (with their modules), objects that have `state_dict` and
            `load_state_dict`, and `PerRank` of any of these. Every rank has the same objects in it.
        where: a path, or a store.
        step: a whole number, kept in the commit record. Rank 0's is taken.
        meta: JSON values of your own, kept in the commit record. Rank 0's are taken.
        overwrite: replace a committed checkpoint; without it, one that is there is an error.
        allow_pickle: pickle leaves that have no safe form; loading them needs it again.
        check_replicas: hash replicated tensors on every rank and insist that they are equal.
        codecs: what files go through: names or configs, in order, such as `["float", "aes"]`; or a mapping from parts of
            the state to such lists, where the closest name counts (`{"optimizer": [...], "optimizer.state.*.exp_avg": []}`)
            and what has none is stored as it is. Rank 0's are taken. Keys for encryption are in `options`, or in the
            environment (SHARDKEEP_KEY_FILE), on every rank.
        group: the ranks that take part.
        options: threads, memory and deadlines.

    Raises:
        StateError: `step` or `meta` cannot be kept in the commit record, or `codecs` names what the state has not.
        UnsupportedLeaf: a leaf cannot be stored; names its key.
        InvalidShards: the ranks' shards do not make up their tensors.
        CheckpointExists: a checkpoint is there, and `overwrite` was not given.
        StorageError: the store failed.
        RanksSilent: ranks did not answer in time; names them.
        EarlierSaveFailed: an earlier asynchronous save failed, and nobody had asked for its result. This one has been
            made all the same: its report is the error's `response`.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> report = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, where)
        >>> report.bytes_total
        64

    """
    phases = Phases()
    options = options or Options()
    world = current_world(group, timeout_s=options.timeout_s)
    call = SaveSession(
        open_on_all_ranks(where, world, options, doing="save to"),
        world,
        RecordLabels(step, meta),
        phases,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        check_replicas=check_replicas,
        codecs=codecs,
        keys=keys_for(options),
    )
    telling = SaveEvents(phases, rank=world.rank, where=call.store.url, step=step)

    def write() -> list[FileEntry]:
        synchronize_devices(call.description.pieces)
        coding = call.coding(orders)
        jobs = make_file_jobs(call.description, orders)
        shares = budget_for_store(call.store, options.io_threads, options.host_budget_bytes, coded=bool(coding.chains))
        nbytes = sum(job.nbytes for job in jobs)
        store = report_progress(coding.over(call.store), telling, nbytes)
        with CancelScope(room=shares.room).held():
            write_files(store, jobs, threads=shares.threads, window_nbytes=shares.window_nbytes)
        telling.written(nbytes)
        return [coding.entry_of(job) for job in jobs]

    with telling.made(background=False), call.made():
        orders = call.plan(call.describer(state))
        call.write(write)
        outcome = call.commit()
        seconds = phases.now()
    report = _report(call, outcome, seconds=seconds, blocked_s=seconds, staged_s=seconds)
    telling.committed(report)
    _raise_earlier_failure(report)
    return report


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

    The call returns when the state has been described, and copied as far as it must be. The checkpoint holds what the
    state was at the call, if nothing of it changes before `handle.staged`. Steps of optimizers that are in the state
    wait for that by themselves. After the call no collective is made.

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
        options: as for `save`; also how much memory is staged through.
        staging: How tensors on an accelerator are copied; those in host memory are copied in the call, within
            `Options.staging_bytes`. "overlap": while the next forward and backward run, with no more memory on the device.
            What optimizers in the state change in their steps is copied so; all else is copied on the device, in the call.
            Without an optimizer in the state, wait for `handle.staged` before you change anything. "device": all is copied
            on the device, in the call. "host": the call waits until all is copied. "auto": as "device" if that takes no more
            than half of what is free there; else as "overlap" for what an optimizer guards, and as "host" for all else.
        writer: Who hashes and writes. "thread": threads of this process. "process": another one, which is started by the
            first such save, kept, and replaced if it dies; tensors are copied to memory that both share. `where` is a
            path, a URL, or what `open_place` returned; not a store of your own, nor `memory://`.
        max_in_flight: With so many saves under way the call waits for the first of them.

    Returns:
        A handle: `staged`, `result`, `progress`, `cancel`.

    Raises:
        EarlierSaveFailed: an earlier asynchronous save failed, and nobody had asked for its result. This one has been
            begun all the same: its handle is the error's `response`.
        StateError: the state cannot be saved. The save fails on the other ranks too.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> handle = sk.async_save({"w": torch.ones(4, 4)}, tempfile.mkdtemp() + "/step-1")
        >>> handle.result().bytes_total
        64

    """
    phases = Phases()
    if staging not in _STAGING or writer not in _WRITERS or max_in_flight < 1:
        raise StateError(
            f"staging={staging!r}, writer={writer!r}, max_in_flight={max_in_flight}",
            hint=f"staging is one of {_STAGING}, writer one of {_WRITERS}",
        )
    options = options or Options()
    world = _apart(current_world(group, timeout_s=options.timeout_s))
    call = SaveSession(
        open_on_all_ranks(where, world, options, doing="save to"),
        world,
        RecordLabels(step, meta),
        phases,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        check_replicas=check_replicas,
        codecs=codecs,
        keys=keys_for(options),
    )
    handle: SaveHandle[SaveReport] = SaveHandle(call.store.url)
    telling = SaveEvents(phases, rank=world.rank, where=call.store.url, step=step)
    with phases.phase("queue"):
        pending_saves().wait_until_fewer_than(max_in_flight)
    with ExitStack() as inside:
        inside.enter_context(telling.made(background=True))
        inside.enter_context(call.made())
        # Before the state is described: it starts meanwhile.
        outside = None
        if writer == "process":
            outside = inside.enter_context(
                writer_manager().session(
                    call.store, options.io_threads, wanted=handle.wanted, timeout_s=options.timeout_s
                )
            )
        with collector_paused():
            draft = call.describer(state)()
        memory = outside.memory if outside else staging_memory()
        optimizers = call.objects.optimizers
        with phases.phase("stage"):
            pieces = take_snapshot(
                call.description.pieces,
                memory.arenas,
                staging=staging,
                optimizers=optimizers,
                threads=options.io_threads,
            )
        background = BackgroundSave(call, draft, pieces, handle, memory, options, telling, outside)
        inside.enter_context(background.ending())
        background.copy_on_host()
        if pieces.live_nbytes:
            step_barriers().put(background.gate, optimizers)
        else:
            telling.staged(phases.now())
        made = inside.pop_all()
    blocked_s = phases.now()

    def carry_out() -> SaveReport:
        with made:
            outcome = background.carry_out()
            seconds = phases.now()
        staged_s = background.staged_s or blocked_s
        waited_s = staged_s if background.must_wait else blocked_s
        report = _report(call, outcome, seconds=seconds, blocked_s=waited_s, staged_s=staged_s)
        telling.committed(report)
        return report

    box = [carry_out]
    try:
        pending_saves().begin(handle, box)
        del state, pieces, carry_out
        if background.must_wait:
            handle.staged.wait_without_raising()
    except BaseException:  # Ctrl-C: nobody will have the handle, and the state may change before it is copied
        handle.cancel()
        with suppress(IndexError):  # a thread has it, and ends it
            box.pop()
            made.__exit__(*sys.exc_info())
        raise
    _raise_earlier_failure(handle)
    return handle


def finish_saves() -> None:
    """
    Wait for all asynchronous saves of this process, then give back their memory, threads, hooks and writing process.

    Raises:
        EarlierSaveFailed: one failed, and nobody has asked for its result.

    """
    pending_saves().finish()
    # Not if the wait was interrupted: a save that goes on needs all of these.
    step_barriers().remove()
    staging_memory().release()
    writer_manager().end()
    if (earlier := pending_saves().take_failure(hint=_RETRIEVE)) is not None:
        raise earlier


def _raise_earlier_failure(made: SaveReport | SaveHandle[SaveReport]) -> None:
    """
    Raise what nobody has asked for.

    At the end of a call: other ranks may not know of it yet, or have asked, and must not miss this rank's part.
    """
    than = made if isinstance(made, SaveHandle) else None
    if (earlier := pending_saves().take_failure(hint=_RETRIEVE, than=than)) is not None:
        earlier.response = made
        raise earlier


def _apart(world: World) -> World:
    """Let ranks meet apart from what their training threads do meanwhile."""
    if world.store is None:
        return world
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded, as there is a store

    return replace(world, store=PrefixStore("asynchronous-saves", world.store))


def _report(
    call: SaveSession, outcome: CommittedSave, *, seconds: float, blocked_s: float, staged_s: float
) -> SaveReport:
    ranks = call.phases.all_ranks()
    return SaveReport(
        where=call.store.url,
        save_id=outcome.save_id,
        step=outcome.step,
        bytes_written=sum(entry.nbytes for entry in call.written),
        bytes_stored=sum(nbytes for entry in call.written for _, nbytes in entry.at_rest),
        bytes_total=outcome.bytes_total,
        tensors=outcome.tensors,
        seconds=seconds,
        blocked_s=blocked_s,
        staged_s=staged_s,
        written_s=call.written_s,
        phases=call.phases.spans,
        ranks=ranks,
        slowest=find_slowest(ranks, SAVE_WORK),
    )
