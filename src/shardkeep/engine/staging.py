"""
Staging: windows of files are filled before they are written, so that the state is released without waiting for the disk.

Accelerators copy into pinned buffers (the ring), which several threads empty into ordinary windows (the pool); writers
take these as they come. Windows are filled in the order in which they are written, so that a budget smaller than the
state makes staging wait for the disk, and never for itself. Host memory that was not copied in the call is read by
writers when they come to it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardkeep.display import format_size
from shardkeep.engine.codecs import FileCodecs
from shardkeep.engine.pools import WINDOW_NBYTES, Buffer, BufferPool, StagingMemory, staging_memory
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import SaveEvents
from shardkeep.engine.snapshot import DeviceSnapshot, Events, StepBarrier
from shardkeep.engine.workers import WorkerBudget, budget_for_store
from shardkeep.engine.writer import FileJob, Take, Window, gather, windows_in_turn, write_files
from shardkeep.errors import SaveCancelled
from shardkeep.options import Options, available_memory, collector_paused, cores, local_ranks
from shardkeep.storage.base import WritableStore
from shardkeep.storage.buffers import copy_memory
from shardkeep.storage.cancel import CancelScope

if TYPE_CHECKING:
    from shardkeep.engine.process.client import WriterSession

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_MOST_EMPTIERS = 12
"""This many copies at a time keep up with the link to an accelerator."""
_EMPTIERS_PER_CORE = 0.75
"""With more, the thread that queues copies waits for a core, and the link for that thread."""
_FEW_EMPTIERS = 4
"""If training does not wait for staging: training needs the cores."""

_WRITERS_BESIDE_TRAINING = 2
"""Threads that write what stays on a device: no caller waits for them, and each that is busy slows down a loop of short launches."""

_FIRST_RING_NBYTES = 256 << 20
"""Of the first save, which waits until it is pinned; 3 ms for each 32 MiB, in which the driver launches nothing."""
_MOST_PINNED = 8
"""Buffers that a save adds to the ring for the next ones: training feels it when more are pinned at once."""
_FAIR_PART = 0.8
"""Of the memory that a machine has free, for all its ranks together."""
_FEWEST_WINDOWS = 2
"""One is filled while another is written, however little memory there is."""
_FOR_SMALL_TENSORS = 1 / 16
"""Of the limit, even if windows take all of it: a call must not wait for the state of a random number generator."""
_WORTH_NOTING_NBYTES = 16 << 20
"""A copy of less takes no time that a report would show."""

_PATIENCE_S = 0.2
"""How often a wait for writers checks whether the save still goes on."""


class Staging:
    def __init__(
        self,
        windows: Iterable[Window],
        *,
        ring: BufferPool,
        pool: BufferPool,
        after: Mapping[torch.device, torch.Event],
        wanted: Callable[[], bool],
        urgent: bool = True,
        ahead: Callable[[Window], bool] | None = None,
        live: Callable[[Window], bool] | None = None,
    ) -> None:
        """
        `windows` are all of the save, in the order in which they are written. Copies from accelerators come after the
        events in `after`. `urgent`: training waits for the copies. `ahead` returns whether a window is filled ahead; by
        default if not all of its bytes lie in order on the host. `live` returns whether a window takes bytes from the caller's
        memory; by default those do that are filled ahead.
        """
        self._ring = ring
        self._pool = pool
        self._after = after
        self._wanted = wanted
        self._urgent = urgent
        self._ending = False
        self._one_writer = threading.Lock()
        self._lock = threading.Lock()
        every = list(windows)
        self._queue = list(filter(ahead or (lambda each: any(row in each.job.scattered for row in each.rows)), every))
        self._ahead: dict[tuple[str, int], Future[Buffer]] = {window.key: Future() for window in self._queue}
        self._noted_nbytes = 0
        lent = self._queue if live is None else list(filter(live, every))
        self._unread = {window.key: window.nbytes for window in lent if window.key not in self._ahead}
        self._all_read = threading.Event()
        self._live_ahead = {window.key for window in lent if window.key in self._ahead}
        self.nbytes = sum(window.nbytes for window in lent)
        """How much is copied after the call, of what the caller may change then."""
        self.count = len(self._queue)
        """How many windows are filled ahead."""
        self.ring_nbytes = 0
        """What the ring grows to, for the next save, when all copies are queued."""
        self.copied: Future[None] = Future()
        """Done when the state is not needed any more."""
        self.queued: Future[Events] = Future()
        """Done when all copies are queued: work that comes after these events may change the state."""

    @property
    def nbytes_copied(self) -> int:
        if self.copied.done() and self.copied.exception() is None:  # threads may not have counted it yet
            return self.nbytes
        return self._noted_nbytes

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Fill windows while inside; at the end, stop what still goes on."""
        if not self._unread:
            self._all_read.set()
        if not self._queue and not self._unread:
            self.copied.set_result(None)
            self.queued.set_result({})
            yield
            return
        emptiers = min(_MOST_EMPTIERS if self._urgent else _FEW_EMPTIERS, max(2, int(_EMPTIERS_PER_CORE * cores())))
        try:
            with ThreadPoolExecutor(1 + emptiers, thread_name_prefix="shardkeep-stage") as threads:
                filling = threads.submit(self._fill_all, threads)
                try:
                    yield
                finally:
                    self._ending = True
                    filling.result()
        finally:
            self._fail(save_ended())
            for ahead in self._ahead.values():  # windows that no writer took
                if not ahead.exception():
                    self._pool.give(ahead.result())

    @contextlib.contextmanager
    def take(self, window: Window, own: memoryview) -> Iterator[memoryview]:
        """Give the bytes of a window: wait until it is filled, or gather them now into the writer's own buffer."""
        self.check_wanted()
        ahead = self._ahead.get(window.key)
        if ahead is None:
            gather(window, own[: window.nbytes])
            with self._lock:
                self._noted_nbytes += self._unread.pop(window.key, 0)
                if not self._unread:
                    self._all_read.set()
            yield own[: window.nbytes]
            return
        buffer = ahead.result()  # before the lock of the one writer: its holder may have what this would wait for
        with self._lock:
            del self._ahead[window.key]
        # One writer works at a time while training waits for copies: both need the cores and the memory bandwidth. Not if there
        # are too few windows, because staging waits for writers then.
        enough = self.count * self._pool.buffer_nbytes <= self._pool.most_nbytes
        alone = self._urgent and enough and self._all_read.is_set() and not self.copied.done()
        try:
            with self._one_writer if alone else contextlib.nullcontext():
                yield buffer.view[: window.nbytes]
        finally:
            self._pool.give(buffer)

    def check_wanted(self) -> None:
        if not self._wanted():
            raise save_ended()

    # -- on the staging threads ---------------------------------------------------------------------------------

    def _fill_all(self, threads: ThreadPoolExecutor) -> None:
        """Queue all copies, in order. A failure is raised by the threads that wait for a window."""
        try:
            with contextlib.ExitStack() as current:
                streams = _streams_after(self._after)
                for stream in streams.values():
                    current.enter_context(stream)
                live = set(self._live_ahead)
                for window in self._queue:
                    if not live and not self._unread and not self.queued.done():
                        self._release_state(streams)
                    buffer, target = self._buffers(through_ring=bool(streams))
                    try:
                        gather(window, buffer.view[: window.nbytes], queued=True)
                    except BaseException:
                        for stream in streams.values():
                            stream.synchronize()  # copies that were queued before the failure
                        self._pool.give(target)
                        if buffer is not target:
                            self._ring.give(buffer)
                        raise
                    done = list(map(_record_event, streams.values()))
                    threads.submit(self._empty, window, buffer, target, done)
                    live.discard(window.key)
                while not self._all_read.wait(_PATIENCE_S):
                    if not self._goes_on():
                        raise save_ended()
                self._release_state(streams)
        except BaseException as error:  # noqa: BLE001 - raised by other threads
            self._fail(error)
            return
        if streams and self._urgent:  # pin memory for the next save: it takes long, and this save does not wait for it
            self._ring.most_nbytes = max(self._ring.most_nbytes, self.ring_nbytes)
            try:
                self._ring.grow(self._goes_on, _MOST_PINNED)
            except Exception as error:  # noqa: BLE001 - this save does not need it
                log.warning("could not pin more memory for staging: %s", error)

    def _release_state(self, streams: Mapping[torch.device, torch.Stream]) -> None:
        """Let steps pass, and note that the state is not needed any more as soon as its copies are complete."""
        last = {device: stream.record_event() for device, stream in streams.items()}
        if self._settle(self.queued, last):
            for event in last.values():
                event.synchronize()  # even if the ring is not emptied yet
            self._settle(self.copied, None)

    def _buffers(self, *, through_ring: bool) -> tuple[Buffer, Buffer]:
        """Return a buffer to copy to, and the one that keeps the bytes until they are written."""
        target = self._pool.take(self._goes_on)
        if target is None:
            raise save_ended()
        buffer = self._ring.take(self._goes_on) if through_ring else target
        if buffer is None:
            self._pool.give(target)
            raise save_ended()
        return buffer, target

    def _goes_on(self) -> bool:
        return not self._ending and self._wanted()

    def _empty(self, window: Window, buffer: Buffer, target: Buffer, events: Sequence[torch.Event]) -> None:
        """Copy a window out of the ring, when it is complete, and hand it to the writers."""
        try:
            for event in events:
                event.synchronize()
            self._release_sources(window)
            if buffer is not target:
                copy_memory(target.address, buffer.address, window.nbytes)
        except BaseException as error:  # noqa: BLE001 - raised by the threads that wait for a window
            self._fail(error)
        if buffer is not target:
            self._ring.give(buffer)
        if not self._settle(self._ahead[window.key], target):
            self._pool.give(target)

    def _release_sources(self, window: Window) -> None:
        """Release the sources that end in a copied window: they may be copies on an accelerator, where memory is scarce."""
        job, rows = window.job, window.rows
        end = job.start[rows.stop] if rows.stop < len(job.start) else job.data_nbytes
        for row in rows if end <= window.stop else rows[:-1]:
            job.scattered.pop(row, None)
        if window.key in self._live_ahead:
            with self._lock:
                self._noted_nbytes += window.nbytes

    def _settle(self, future: Future[T], result: T) -> bool:
        """Set the result of a future, unless something has failed."""
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)
            return True
        return False

    def _fail(self, error: BaseException) -> None:
        self._ending = True
        with self._lock:
            waited_for: list[Future[Any]] = [*self._ahead.values(), self.copied, self.queued]
        for future in waited_for:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)


def save_ended() -> SaveCancelled:
    return SaveCancelled("the save ended before its state was copied")


def _streams_after(events: Mapping[torch.device, torch.Event]) -> dict[torch.device, torch.Stream]:
    """Make a stream for each accelerator, whose work comes after an event, and switch this thread away from device 0."""
    if not events:
        return {}
    torch.accelerator.set_device_index(next(iter(events)).index)
    streams = {device: getattr(torch.get_device_module(device), "Stream", torch.Stream)(device) for device in events}
    for device, event in events.items():
        streams[device].wait_event(event)
    return streams


def _record_event(stream: Any) -> torch.Event:
    """Record an event. Under CUDA, threads that wait for it sleep: if they spin in the driver, they slow down launches."""
    blocking = (torch.cuda.Event(blocking=True),) if isinstance(stream, torch.cuda.Stream) else ()  # type: ignore[no-untyped-call]  # torch's is
    return stream.record_event(*blocking)  # type: ignore[no-any-return]


class BackgroundWrite:
    """Writes a snapshot after the call that took it. The state is released early: the next step and the caller wait."""

    def __init__(
        self,
        snapshot: DeviceSnapshot,
        handle: SaveHandle[Any],
        memory: StagingMemory,
        options: Options,
        events: SaveEvents,
    ) -> None:
        """`memory` is shared with the writer process if that will write."""
        self.snapshot = snapshot
        self._handle = handle
        self._memory = memory
        self._options = options
        self._events = events
        self.barrier = StepBarrier()
        """Before the next step of the optimizers in the state."""
        self.staged_s = 0.0
        """From the call until the state was not read any more; the caller may change it when the call has returned, too."""
        self._copied_s = 0.0

    @functools.cached_property
    def _limit_nbytes(self) -> int:
        """How much host memory this save may copy to, beside what others have copied to."""
        # At first use, which is not in the call if nothing lies in host memory: what is available takes a while to find out.
        arenas = self._memory.arenas
        if self._options.staging_bytes:
            return self._options.staging_bytes - arenas.nbytes_in_use
        kept = arenas.nbytes - arenas.nbytes_in_use + self._memory.windows.nbytes
        return int(_FAIR_PART * available_memory() / local_ranks()) + kept

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.barrier.open({})
            if self.snapshot.arena is not None:
                self._memory.arenas.give(self.snapshot.arena)
            self.snapshot.note_left_in_cache()
            self.snapshot = DeviceSnapshot([])

    def copy_on_host(self) -> bool:
        """Copy what lies in host memory and fits; return whether the call must wait until the rest has been read."""
        snapshot, phases = self.snapshot, self._events.phases
        windows = (
            _FEWEST_WINDOWS * self._memory.windows.buffer_nbytes
            if snapshot.events or self._memory is not staging_memory()
            else 0
        )
        began_s = phases.now()
        limit = max(0, self._limit_nbytes) if snapshot.on_host else 0
        taken = max(windows, self._memory.windows.nbytes_in_use)  # by this save, or by those before it
        most_nbytes = max(limit - taken, int(limit * _FOR_SMALL_TENSORS))
        with collector_paused():
            snapshot.copy_on_host(self._memory.arenas, most_nbytes, self._options.io_threads)
        copied = snapshot.layout.nbytes if snapshot.layout else 0
        # The arena may be larger than the copy, if it was kept from an earlier save.
        arena_nbytes = snapshot.arena.view.nbytes if snapshot.arena else 0
        if snapshot.on_host:
            self._limit_nbytes = 0 if snapshot.refused else limit - arena_nbytes
        if self._options.staging_bytes:  # windows are kept from earlier saves, which may have had more room
            self._memory.windows.shrink(max(windows, self._limit_nbytes))
        if copied >= _WORTH_NOTING_NBYTES:
            phases.add("stage", began_s, phases.now(), copied)
        if snapshot.lent:
            through = copied + (windows or self._options.host_budget_bytes)
            self._warn_staging_waits(copied + sum(tensor.nbytes for tensor in snapshot.lent), through)
        if not snapshot.live_nbytes:
            self.staged_s = phases.now()
            self._handle.end_staging()
            self._events.staged(self.staged_s)
        return snapshot.live_nbytes > 0 and not snapshot.guarded

    def write(
        self,
        store: WritableStore,
        jobs: list[FileJob],
        codecs: FileCodecs | None = None,
        writer: WriterSession | None = None,
    ) -> None:
        """Write files from the snapshot, and drop each source when it is copied; without `writer`, on threads."""
        # No more threads than cores: training needs them, and the interpreter's lock. With a store that prefers many
        # requests at a time, threads wait and keep no cores busy.
        threads = min(self._options.io_threads, max(2, cores() // local_ranks()))
        snapshot, coded = self.snapshot, bool(codecs and codecs.chains)
        if self._may_stay_on_devices:
            self._write_from_devices(store, jobs, codecs, writer, threads)
            return
        budget_for = writer.budget if writer else partial(budget_for_store, store)
        budget = budget_for(threads, self._options.host_budget_bytes, coded=coded)
        if snapshot.events and not writer:
            budget = budget._replace(window_nbytes=WINDOW_NBYTES)
        arena = snapshot.arena.address if snapshot.arena else 0
        arena_end = arena + (snapshot.arena.view.nbytes if snapshot.arena else 0)

        def reads_callers_memory(job: FileJob, rows: range) -> bool:
            sources = [job.scattered[row] for row in rows if row in job.scattered]
            held = job.address[rows.start : rows.stop]
            outside = (held != 0) & ((held < arena) | (held >= arena_end))
            on_host = bool(snapshot.lent) and (bool(outside.any()) or any(each.accelerator is None for each in sources))
            return on_host or any(map(snapshot.is_live, sources))

        ahead: Callable[[Window], bool] | None = None
        if writer:  # what the other process does not see
            ahead = lambda window: writer.shared.locate_window(window) is None  # noqa: E731
        elif snapshot.lent and not snapshot.events:
            ahead = lambda _window: False  # noqa: E731 - writers have memory of their own
        if snapshot.live_nbytes:  # first the files that staging waits for
            jobs.sort(key=lambda job: not reads_callers_memory(job, range(len(job.start))))
        staging = Staging(
            windows_in_turn(jobs, budget.window_nbytes, budget.threads),
            ring=self._memory.ring,
            pool=self._memory.windows,
            after=snapshot.events,
            wanted=self._handle.wanted,
            urgent=snapshot.live_nbytes > 0,
            ahead=ahead,
            live=(lambda window: reads_callers_memory(window.job, window.rows)) if snapshot.live_nbytes else None,
        )
        self._set_limits(staging)
        staging.queued.add_done_callback(lambda it: self.barrier.open({} if it.exception() else it.result()))
        staging.copied.add_done_callback(self._note_copied)
        began_s = self._events.phases.now()
        total = sum(job.data_nbytes for job in jobs)
        report = self._reporting(lambda: None if staging.copied.done() else staging.nbytes_copied)
        with staging.running():
            self._write_files(store, jobs, codecs, writer, budget, take=staging.take, on_written=report)
        if staging.nbytes:
            self._events.phases.add("stage", began_s, self._copied_s, staging.nbytes_copied)
        self._handle.set_progress("committing", staged=total, written=total, total=total)

    @property
    def _may_stay_on_devices(self) -> bool:
        """Return whether nothing waits for the copies on devices to be copied to the host: there is room for them."""
        return bool(self.snapshot.events) and not self.snapshot.live_nbytes and self.snapshot.stays

    def _write_from_devices(
        self,
        store: WritableStore,
        jobs: list[FileJob],
        codecs: FileCodecs | None,
        writer: WriterSession | None,
        threads: int,
    ) -> None:
        """Write files window by window, as if the caller waited for them; but threads sleep while the device copies."""
        events, total = self.snapshot.events, sum(job.data_nbytes for job in jobs)
        threads = max(1, min(threads, _WRITERS_BESIDE_TRAINING, self._options.pinned_bytes // WINDOW_NBYTES))
        budget_for = writer.budget if writer else partial(budget_for_store, store, window=WINDOW_NBYTES)
        budget = budget_for(threads, self._options.host_budget_bytes, coded=bool(codecs and codecs.chains))
        sources = (each for job in jobs for each in job.scattered.values())
        # Threads that copy from no device have no streams of their own, and would wait for those of training.
        waits = any(each.accelerator is not None for each in sources)

        @contextlib.contextmanager
        def take(window: Window, own: memoryview) -> Iterator[memoryview]:
            data = own[: window.nbytes]
            try:
                gather(window, data, queued=True)
            finally:  # also after a failure: the memory is lent again
                for device in events if waits else ():
                    _record_event(torch.accelerator.current_stream(device)).synchronize()
            yield data

        report = self._reporting(lambda: None)
        self._write_files(store, jobs, codecs, writer, budget, take=take, on_written=report, after=events)
        self._handle.set_progress("committing", staged=total, written=total, total=total)

    def _write_files(
        self,
        store: WritableStore,
        jobs: list[FileJob],
        codecs: FileCodecs | None,
        writer: WriterSession | None,
        budget: WorkerBudget,
        *,
        take: Take,
        on_written: Callable[[int, int], None],
        after: Events | None = None,
    ) -> None:
        """Write what `take` gives, or have the writer process do that, which has a memory budget of its own for its copies."""
        write = partial(
            write_files,
            jobs=jobs,
            threads=budget.threads,
            window_nbytes=budget.window_nbytes,
            scope=CancelScope(budget=None if writer else budget.room, wanted=self._handle.wanted),
            on_written=on_written,
            after=after,
        )
        if writer:
            create = partial(writer.create, codecs, budget.room_nbytes)
            # Without `after`, windows are staged already, and those of its threads are not used.
            shared = None if after is None else self._memory
            write(store, create=create, put=partial(writer.put, take), staging=shared)
        else:
            write(codecs.over(store) if codecs else store, take=take)

    def _reporting(self, copying: Callable[[], int | None]) -> Callable[[int, int], None]:
        """Return what is called after each window that is written. `copying`: how much is copied; None: all of it."""

        def report(written: int, total: int) -> None:
            copied = copying()
            phase, staged = ("writing", total) if copied is None else ("staging", copied)
            self._handle.set_progress(phase, staged=staged, written=written, total=total)
            self._events.progressed(staged=staged, written=written, total=total)

        return report

    def _set_limits(self, staging: Staging) -> None:
        ring, pool = self._memory.ring, self._memory.windows
        wanted = staging.count * pool.buffer_nbytes
        # Never the size of the state; and the first save, which has to wait for memory to be pinned, uses less.
        staging.ring_nbytes = max(ring.buffer_nbytes, min(self._options.pinned_bytes, wanted // 2))
        # No less than another save in flight may need.
        now = max(ring.most_nbytes, min(staging.ring_nbytes, max(ring.nbytes, _FIRST_RING_NBYTES)))
        ring.most_nbytes = max(ring.buffer_nbytes, min(self._options.pinned_bytes, now))
        least = _FEWEST_WINDOWS * pool.buffer_nbytes
        pool.most_nbytes = max(least, min(self._limit_nbytes, max(wanted, pool.most_nbytes)))
        if wanted > pool.most_nbytes and not self._handle.progress.staging_waits:
            self._warn_staging_waits(wanted, pool.most_nbytes)

    def _warn_staging_waits(self, nbytes: int, through_nbytes: int) -> None:
        self._handle.set_staging_waits()
        log.warning(
            "save to %s: %s are staged through %s of host memory: staging waits for the disk",
            self._handle.where,
            format_size(nbytes),
            format_size(through_nbytes),
        )

    def _note_copied(self, copied: Future[None]) -> None:
        self._copied_s = self._events.phases.now()
        if copied.exception() is not None:
            return  # a writer may still be reading the caller's memory
        self.snapshot.lent.clear()
        if not self._handle.staged.done():
            self.staged_s = self._copied_s
            self._handle.end_staging()
            self._events.staged(self.staged_s)
