"""
A save on this rank, step by step; the same whether its caller waits for it or not.

    describe    what this rank holds, as columns; talks to other ranks only where objects in the state differ or talk
    plan        every rank sends that, and learns what it is to write
    write       every rank writes
    commit      every rank gives its files out of its hands, and rank 0 publishes

A failure anywhere, on any rank, reaches all of them, removes what was written, and leaves whatever checkpoint was there
before as it was.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shardkeep.codecs.keys import CachedKeys
from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.codecs import Codecs, FileCodecs
from shardkeep.engine.coordinator import CommittedSave, Coordinator, discard
from shardkeep.engine.pools import WINDOW_NBYTES, Buffer, StagingMemory
from shardkeep.engine.process.client import WriterSession
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.rank_plan import RankWritePlan, make_file_jobs, make_manifest
from shardkeep.engine.report import Phases, SaveEvents, SentPhases
from shardkeep.engine.snapshot import DeviceSnapshot
from shardkeep.engine.staging import Staging
from shardkeep.engine.step_barrier import StepBarrier
from shardkeep.engine.workers import budget_for_store
from shardkeep.engine.writer import FileJob, HashingSink, Sink, Window, windows_in_turn, write_files
from shardkeep.errors import CheckpointError, RanksDisagree
from shardkeep.format.boxes import IntArray
from shardkeep.format.record import FileEntry
from shardkeep.layouts import orphans as leftovers
from shardkeep.options import Options, cores, local_ranks
from shardkeep.plan.manifest import encode
from shardkeep.state.describe import Description, describe
from shardkeep.state.objects import Objects
from shardkeep.storage.base import BlobWriter, Store
from shardkeep.storage.buffers import address_of
from shardkeep.storage.cancel import CancelScope, run_with_deadline
from shardkeep.storage.system import available_memory

# Which state of objects is one for all ranks, and which is each rank's own: decided by all ranks together.
#
# A scheduler's state is the same everywhere, a data loader's is not, and neither says so.


def find_differing_state(objects: Objects, meeting: Rendezvous, ranks: int, *, allow_pickle: bool) -> frozenset[str]:
    """Return the names of what the ranks compared and found to differ."""
    if ranks == 1 or not objects:
        return frozenset()

    def digests() -> bytes:
        return msgspec.msgpack.encode((objects.names, objects.unsure(allow_pickle=allow_pickle)))

    def differing(payloads: list[bytes]) -> list[bytes]:
        said = [msgspec.msgpack.decode(payload, type=tuple[list[str], dict[str, bytes]]) for payload in payloads]
        check_same_objects([names for names, _ in said])
        first: dict[str, bytes] = {}
        found: set[str] = set()
        for _, digests in said:
            for name, digest in digests.items():
                if first.setdefault(name, digest) != digest:
                    found.add(name)
        return [msgspec.msgpack.encode(sorted(found))] * len(payloads)

    return frozenset(msgspec.msgpack.decode(meeting.agree("compare", digests, differing), type=list[str]))


def check_same_objects(names: list[list[str]]) -> None:
    """Refuse ranks that have different objects: names inside them, and who talks to whom, would not be the same."""
    for rank, own in enumerate(names):
        if odd := sorted({*own} ^ {*names[0]}):
            raise RanksDisagree(
                f"ranks 0 and {rank} do not have the same objects in the state: {', '.join(map(repr, odd))}",
                hint="pass modules, optimizers and other objects under the same keys on every rank",
            )


@dataclass(frozen=True)
class RecordLabels:
    """What the caller wants in the commit record."""

    step: int | None
    meta: Mapping[str, Any] | None


class _Written(msgspec.Struct, frozen=True):
    """What a rank says when it has written."""

    files: list[FileEntry]
    spans: SentPhases


class SaveSession:
    """One save of one rank. Used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        world: World,
        label: RecordLabels,
        phases: Phases,
        *,
        overwrite: bool,
        allow_pickle: bool,
        check_replicas: bool,
        codecs: Codecs = None,
        keys: CachedKeys | None = None,
    ) -> None:
        self.store = store
        self.world = world
        self.phases = phases
        self._label = label
        self._allow_pickle = allow_pickle
        self._check_replicas = check_replicas
        self._keys = keys
        self._coordinator = Coordinator(store, overwrite=overwrite, codecs=codecs, keys=keys)
        self._given = False
        # Known inside `made`.
        self._meeting: Rendezvous
        # Known after `describe`.
        self.objects: Objects
        self.description: Description
        # Known after `write`.
        self.written: list[FileEntry] = []
        self.written_s: float
        """From the call until every rank had written."""

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Make the call together with the other ranks; all steps are made inside."""
        with (
            leftovers.holding_claim(self._coordinator.save_id),
            rendezvous(self.world, f"save to {self.store.url}") as meeting,
        ):
            self._meeting = meeting
            try:
                yield
            except BaseException:
                # What takes long is left behind: its claim goes last, and stays for the next save to find.
                run_with_deadline(self._take_back, f"take back {self.store.url}")
                raise
            finally:  # an error that is kept has functions in its frames that know this call: not the state with it
                vars(self).pop("description", None)
                vars(self).pop("objects", None)
        if self.world.rank == 0:
            self._coordinator.tidy()

    def _take_back(self) -> None:
        """Remove what was written of a save that failed."""
        if not self._given:
            discard(self.store, [name for entry in self.written for name, _ in entry.at_rest])
        if self.world.rank == 0:
            self._coordinator.withdraw()

    def describer(self, state: Mapping[str, Any]) -> Callable[[], bytes]:
        """
        Find the objects in the state, agree on what differs between ranks, and return what describes the state.

        All that can fail on a rank alone comes before ranks wait for each other.
        """
        self.objects = _objects_of(state, self.world)
        # Where there are objects, ranks meet.
        with self.phases.phase("plan") if self.objects and self.world.size > 1 else contextlib.nullcontext():
            differing = find_differing_state(
                self.objects, self._meeting, self.world.size, allow_pickle=self._allow_pickle
            )
        in_place_of: dict[str, Any] = {}

        def prepare() -> bytes:
            self._coordinator.label(self._label.step, self._label.meta)
            in_place_of.update(self.objects.give(differing, communicating=False))
            return b""

        def draft() -> bytes:
            if self.objects.communicates:
                in_place_of.update(self.objects.give(differing, communicating=True))
            else:
                prepare()
            self.description = describe(state, rank=self.world.rank, in_place_of=in_place_of)
            drawn = make_manifest(
                self.description, allow_pickle=self._allow_pickle, check_replicas=self._check_replicas
            )
            return encode(drawn)

        if self.objects.communicates:
            self._meeting.agree("prepare", self._timed("describe", prepare), lambda done: done)
        return self._timed("describe", draft)

    def _timed(self, phase: str, work: Callable[[], bytes]) -> Callable[[], bytes]:
        def working() -> bytes:
            with self.phases.phase(phase):
                return work()

        return working

    def plan(self, draft: Callable[[], bytes]) -> RankWritePlan:
        """Send what this rank holds, and return what it is to write."""
        began_s = 0.0

        def drafting() -> bytes:
            nonlocal began_s
            drawn = draft()
            began_s = self.phases.now()
            return drawn

        told = self._meeting.agree("plan", drafting, self._coordinator.plan)
        self.phases.add("plan", began_s, self.phases.meet())
        return msgspec.msgpack.decode(told, type=RankWritePlan)

    def coding(self, orders: RankWritePlan) -> FileCodecs:
        """Open the codecs that this rank's files go through."""
        return FileCodecs(orders, self._keys)

    def write(self, work: Callable[[], list[FileEntry]]) -> None:
        """Write this rank's files, and wait for the others to have written theirs."""
        began_s = ended_s = self.phases.now()

        def writing() -> bytes:
            nonlocal ended_s
            try:
                self.written.extend(work())
            finally:
                ended_s = self.phases.now()
                self.phases.add("write", began_s, ended_s, sum(entry.nbytes for entry in self.written))
            return encode(_Written(self.written, self.phases.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=_Written) for payload in payloads]
            self.phases.collect([each.spans for each in said])
            return self._coordinator.collect([each.files for each in said])

        self._meeting.agree("write", writing, collect)
        self.written_s = self.phases.now()
        self.phases.add("wait", ended_s, self.written_s)

    def commit(self) -> CommittedSave:
        """Publish the checkpoint."""
        # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
        self._given = True
        with self.phases.phase("commit"):
            told = self._meeting.agree("commit", bytes, self._coordinator.commit)
        return msgspec.msgpack.decode(told, type=CommittedSave)


def _objects_of(state: Mapping[str, Any], world: World) -> Objects:
    """Find the objects in a state; none in one that cannot be walked, which describing it says to all ranks."""
    try:
        return Objects(state, rank=world.rank, world_size=world.size)
    except CheckpointError:
        return Objects({}, rank=world.rank, world_size=world.size)


# The part of an asynchronous save that goes on after its call has returned.
#
#     plan -> stage, and write what is staged -> commit
#
# Staging lets go of the state as early as it can: that is what the next step of an optimizer waits for, and the
# caller.
# What lies in host memory is copied here before the call returns, as far as there is room; writers read the rest from
# the
# caller's memory.

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
class _ProgressSink:
    """A sink that tells how much has been written."""

    sink: Sink
    told: Callable[[int], None]

    def begin(self, job: FileJob) -> BlobWriter:
        return self.sink.begin(job)

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        digests = self.sink.put(window, file, own)
        self.told(window.nbytes)
        return digests


class BackgroundSave:
    """One save after its call."""

    def __init__(
        self,
        call: SaveSession,
        draft: bytes,
        pieces: DeviceSnapshot,
        handle: SaveHandle[Any],
        memory: StagingMemory,
        options: Options,
        telling: SaveEvents,
        outside: WriterSession | None = None,
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
        self.gate = StepBarrier()
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
        return int(_FAIR_PART * available_memory() / local_ranks()) + kept

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

    def carry_out(self) -> CommittedSave:
        """Make the rest of the save."""
        call, handle = self._call, self._handle
        orders = call.plan(lambda: self._draft)
        jobs = make_file_jobs(replace(call.description, pieces=self._pieces.tensors), orders)
        # From here on the jobs alone hold the tensors, and let each go when it is copied.
        del call.description, call.objects
        self._pieces.tensors.clear()
        try:
            call.write(lambda: self._write(jobs, call.coding(orders)))
        finally:
            jobs.clear()  # frames of an error that is kept know the list: not the tensors with it
        handle.set_progress("committing", staged=self._total, written=self._written, total=self._total)
        return call.commit()

    def _write(self, jobs: list[FileJob], coding: FileCodecs) -> list[FileEntry]:
        # No more than there are cores for: training needs them, and the interpreter's lock. A store that likes many
        # requests under way keeps threads waiting, and not cores busy.
        threads = min(self._options.io_threads, max(2, cores() // local_ranks()))
        outside, budget_nbytes, coded = self._outside, self._options.host_budget_bytes, bool(coding.chains)
        if outside:
            shares = outside.budget(threads, budget_nbytes, coded=coded)
        else:
            shares = budget_for_store(self._call.store, threads, budget_nbytes, coded=coded)
        threads, window = shares.threads, shares.window_nbytes
        if self._pieces.events and not outside:
            window = WINDOW_NBYTES
        lent = _BorrowedMemory(self._pieces.arena) if self._pieces.lent else None
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
            self._handle.set_progress(phase, staged=staging.nbytes_copied, written=self._written, total=self._total)
            self._tell_staged()
            staged = self._total if copied else staging.nbytes_copied
            self._telling.progressed(staged=staged, written=self._written, total=self._total)

        sink: Sink = HashingSink(coding.over(self._call.store), staging.take)
        if outside:
            sink = outside.sink(staging, coding, shares.room_nbytes)
        # What another process copies on the way, it has a room for of its own.
        hope = CancelScope(room=None if outside else shares.room, wanted=self._handle.wanted)
        with hope.held(), staging.running():
            write_files(self._call.store, jobs, threads=threads, window_nbytes=window, sink=_ProgressSink(sink, told))
        if staging.nbytes:
            self._telling.phases.add("stage", began_s, self._copied_s, staging.nbytes_copied)
        self._tell_staged()
        self._handle.begin_commit()
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
        self._handle.set_staging_waits()
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


class _BorrowedMemory:
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
