"""
The part of an asynchronous save that goes on after its call has returned.

    plan -> stage, and write what is staged -> commit

Staging lets go of the state as early as it can: that is what the next step of an optimizer waits for, and the caller.
What lies in host memory is copied here before the call returns, as far as there is room; writers read the rest from the
caller's memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from shardkeep.format.columns import IntArray
from shardkeep.format.record import FileEntry
from shardkeep.options import Options, cores, local_ranks
from shardkeep.run.coding import FileCoding
from shardkeep.run.coordinating import Outcome
from shardkeep.run.handles import SaveHandle
from shardkeep.run.orders import make_jobs
from shardkeep.run.save_call import SaveCall
from shardkeep.run.staging import Staging
from shardkeep.run.telling import SaveTelling
from shardkeep.run.workers import divide_for
from shardkeep.run.write import FileJob, Hashing, Sink, Window, windows_in_turn, write_files
from shardkeep.run.writer_hold import Outside
from shardkeep.stage.buffers import Buffer
from shardkeep.stage.pieces import Pieces
from shardkeep.stage.pinned import WINDOW_NBYTES, StagingMemory
from shardkeep.stage.step_gates import Gate
from shardkeep.store.aligned import address_of
from shardkeep.store.giving_up import Hope
from shardkeep.store.process import free_memory
from shardkeep.store.protocol import BlobWriter

log = logging.getLogger("shardkeep")

_FIRST_RING_NBYTES = 512 << 20
_FAIR_PART = 0.8
"""Of the memory that a machine has free, for all its ranks together."""
_FEWEST_WINDOWS = 2
"""One is filled while another is written, however little memory there is."""
_FOR_SMALL_TENSORS = 1 / 16
"""Of the limit, though windows take all of it: a call must not wait for the state of a generator of random numbers."""
_WORTH_NOTING_NBYTES = 16 << 20
"""A copy of less takes no time that a report would show."""


@dataclass(frozen=True)
class _Telling:
    """A sink that tells how much has been written."""

    sink: Sink
    told: Callable[[int], None]

    def begin(self, job: FileJob) -> BlobWriter:
        return self.sink.begin(job)

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        digests = self.sink.put(window, file, own)
        self.told(window.nbytes)
        return digests


class Background:
    """One save after its call."""

    def __init__(
        self,
        call: SaveCall,
        draft: bytes,
        pieces: Pieces,
        handle: SaveHandle[Any],
        memory: StagingMemory,
        options: Options,
        telling: SaveTelling,
        outside: Outside | None = None,
    ) -> None:
        """
        Begin nothing yet.

        Args:
            call: the save so far.
            draft: what this rank holds.
            pieces: the state.
            handle: what the caller holds.
            memory: to stage through.
            options: how to use the machine.
            telling: what is told how far it has come.
            outside: the process that hashes and writes; by default the threads that call do.

        """
        self._handle = handle
        self._memory = memory
        self._options = options
        self._outside = outside
        self._telling = telling
        self._limit_nbytes = self._limit()
        self._pieces = pieces
        self.gate = Gate()
        """Before the next step of the optimizers in the state."""
        self.must_wait = False
        """Whether the caller has to wait for staging before it may go on."""
        self.staged_s = 0.0
        """From the call until the state might be changed; 0: at its return."""
        self._call = call
        self._draft = draft
        self._staged_told = False
        self._copied_s = 0.0
        self._written = 0
        self._total = 0
        self._lock = threading.Lock()

    def _limit(self) -> int:
        """Say how much host memory this save may copy to, beside what others have copied to."""
        arenas, pool = self._memory.arenas, self._memory.windows
        if self._options.staging_bytes:
            return self._options.staging_bytes - arenas.nbytes_in_use
        kept = arenas.nbytes - arenas.nbytes_in_use + pool.nbytes
        return int(_FAIR_PART * free_memory() / local_ranks()) + kept

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Whatever happens inside, let go of the state and of memory in the end."""
        try:
            yield
        finally:
            self.gate.open({})
            if self._pieces.arena is not None:
                self._memory.arenas.give(self._pieces.arena)
            del self._pieces

    def copy_on_host(self) -> None:
        """Copy what lies in host memory and fits: in the call, after which the caller may change it."""
        pieces, phases = self._pieces, self._telling.phases
        windows = _FEWEST_WINDOWS * self._memory.windows.buffer_nbytes if self._outside or pieces.events else 0
        began_s = phases.now()
        limit = max(0, self._limit_nbytes)
        taken = max(windows, self._memory.windows.nbytes_in_use)  # by this save, or by those before it
        pieces.copy_on_host(max(limit - taken, int(limit * _FOR_SMALL_TENSORS)))
        copied = pieces.copied_nbytes
        arena_nbytes = pieces.arena.view.nbytes if pieces.arena else 0  # more, where it was kept from an earlier save
        self._limit_nbytes = 0 if pieces.refused else limit - arena_nbytes
        if self._options.staging_bytes:  # windows are kept from earlier saves, which may have had more room
            self._memory.windows.shrink(max(windows, self._limit_nbytes))
        if copied >= _WORTH_NOTING_NBYTES:
            phases.add("stage", began_s, phases.now(), copied)
        if pieces.lent:
            through = copied + (windows or self._options.host_budget_bytes)
            self._tell_that_staging_waits(copied + sum(tensor.nbytes for tensor in pieces.lent), through)
        self.must_wait = pieces.live_nbytes > 0 and not pieces.guarded
        if not pieces.live_nbytes:
            self._staged_told = True
            self._handle.end_staging()

    def carry_out(self) -> Outcome:
        """Make the rest of the save."""
        call, handle = self._call, self._handle
        orders = call.plan(lambda: self._draft)
        jobs = make_jobs(replace(call.description, pieces=self._pieces.tensors), orders)
        # From here on the jobs alone hold the tensors, and let each go when it is copied.
        del call.description, call.objects
        self._pieces.tensors.clear()
        try:
            call.write(lambda: self._write(jobs, call.coding(orders)))
        finally:
            jobs.clear()  # frames of an error that is kept know the list: not the tensors with it
        handle.tell("committing", staged=self._total, written=self._written, total=self._total)
        return call.commit()

    def _write(self, jobs: list[FileJob], coding: FileCoding) -> list[FileEntry]:
        # No more than there are cores for: training needs them, and the interpreter's lock. A store that likes many
        # requests under way keeps threads waiting, and not cores busy.
        threads = min(self._options.io_threads, max(2, cores() // local_ranks()))
        outside, budget_nbytes, coded = self._outside, self._options.host_budget_bytes, bool(coding.chains)
        if outside:
            shares = outside.divided(threads, budget_nbytes, coded=coded)
        else:
            shares = divide_for(self._call.store, threads, budget_nbytes, coded=coded)
        threads, window = shares.threads, shares.window_nbytes
        if self._pieces.events and not outside:
            window = WINDOW_NBYTES
        lent = _Lent(self._pieces.arena) if self._pieces.lent else None
        if lent:  # the files first that staging waits for
            jobs.sort(key=lambda job: not lent.among(job.address))
        ahead = outside.filled_ahead if outside else None
        if lent and not outside and not self._pieces.events:
            ahead = _never  # writers have memory of their own
        staging = Staging(
            windows_in_turn(jobs, window, threads),
            ring=self._memory.ring,
            pool=self._memory.windows,
            after=self._pieces.events,
            wanted=self._handle.wanted,
            urgent=self._pieces.live_nbytes > 0,
            ahead=ahead,
            live=lent,
        )
        self._set_limits(staging)
        self._total = sum(job.data_nbytes for job in jobs)
        staging.queued.add_done_callback(self._open_gate)
        staging.copied.add_done_callback(self._note_copied)
        began_s = self._telling.phases.now()

        def told(nbytes: int) -> None:
            with self._lock:
                self._written += nbytes
            copied = staging.copied.done()
            phase = "writing" if copied else "staging"
            self._handle.tell(phase, staged=staging.nbytes_copied, written=self._written, total=self._total)
            self._tell_staged()
            staged = self._total if copied else staging.nbytes_copied
            self._telling.progressed(staged=staged, written=self._written, total=self._total)

        sink: Sink = Hashing(coding.over(self._call.store), staging.take)
        if outside:
            sink = outside.sink(staging, coding, shares.room_nbytes)
        # What another process copies on the way, it has a room for of its own.
        hope = Hope(room=None if outside else shares.room, wanted=self._handle.wanted)
        with hope.held(), staging.running():
            write_files(self._call.store, jobs, threads=threads, window_nbytes=window, sink=_Telling(sink, told))
        if staging.nbytes:
            self._telling.phases.add("stage", began_s, self._copied_s, staging.nbytes_copied)
        self._tell_staged()
        self._handle.insist()
        entries = [coding.entry_of(job) for job in jobs]
        self._telling.written(sum(entry.nbytes for entry in entries))
        return entries

    def _tell_staged(self) -> None:
        """
        Tell that the state is copied, once it is.

        Not where that is found out: there a lock is held that saving needs, and who is told may take their time.
        """
        with self._lock:
            tells = self.staged_s > 0 and not self._staged_told
            self._staged_told = self._staged_told or tells
        if tells:
            self._telling.staged(self.staged_s)

    def _set_limits(self, staging: Staging) -> None:
        ring, pool = self._memory.ring, self._memory.windows
        wanted = staging.count * pool.buffer_nbytes
        # Never the size of the state; and the first save, which has to wait for memory to be pinned, does with less.
        staging.ring_nbytes = max(ring.buffer_nbytes, min(self._options.pinned_bytes, wanted // 2))
        # No less than another save in flight may be counting on.
        now = max(ring.most_nbytes, min(staging.ring_nbytes, max(ring.nbytes, _FIRST_RING_NBYTES)))
        ring.most_nbytes = max(ring.buffer_nbytes, min(self._options.pinned_bytes, now))
        least = _FEWEST_WINDOWS * pool.buffer_nbytes
        pool.most_nbytes = max(least, min(self._limit_nbytes, max(wanted, pool.most_nbytes)))
        if wanted > pool.most_nbytes and not self._handle.progress.staging_waits:
            self._tell_that_staging_waits(wanted, pool.most_nbytes)

    def _tell_that_staging_waits(self, nbytes: int, through_nbytes: int) -> None:
        self._handle.tell_that_staging_waits()
        log.warning(
            "save to %s: %.2f GB are staged through %.2f GB of host memory: staging waits for the disk",
            self._handle.where,
            nbytes / 1e9,
            through_nbytes / 1e9,
        )

    def _open_gate(self, queued: Future[Any]) -> None:
        self.gate.open({} if queued.exception() else queued.result())

    def _note_copied(self, copied: Future[None]) -> None:
        self._copied_s = self._telling.phases.now()
        if copied.exception() is not None:
            return  # a writer may still be reading what was lent
        self._pieces.lent.clear()
        if not self._handle.staged.done():
            self.staged_s = self._copied_s
            self._handle.end_staging()


class _Lent:
    """Says which windows take bytes from memory of the caller's: all that is not in the arena."""

    def __init__(self, arena: Buffer | None) -> None:
        self._begin = address_of(arena.view) if arena else 0
        self._end = self._begin + (arena.view.nbytes if arena else 0)

    def __call__(self, window: Window) -> bool:
        return self.among(window.job.address[window.rows.start : window.rows.stop])

    def among(self, addresses: IntArray) -> bool:
        """Say whether something at these addresses is the caller's; what does not lie in order has none."""
        return bool(((addresses < self._begin) | (addresses >= self._end)).any())


def _never(window: Window) -> bool:
    del window
    return False
