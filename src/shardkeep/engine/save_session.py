"""
A save on one rank, step by step; the same steps whether the caller waits for it or not.

    describe    what this rank holds, as columns; ranks communicate only if objects in the state differ or communicate
    plan        every rank sends its manifest to rank 0, and gets its write plan
    write       every rank writes its files
    commit      every rank hands its files over, and rank 0 publishes them

A failure in any step, on any rank, is raised on all of them. What was written is removed, and a checkpoint that was there
before stays as it was.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from shardkeep.codecs.keys import CachedKeys
from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.codecs import Codecs, FileCodecs
from shardkeep.engine.coordinator import CommittedSave, Coordinator, PlannedSave, RecordLabels
from shardkeep.engine.pools import StagingMemory
from shardkeep.engine.process.client import WriterSession
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import Phases, SaveEvents, SentPhases
from shardkeep.engine.snapshot import DeviceSnapshot
from shardkeep.engine.staging import BackgroundWrite
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.writer import FileJob
from shardkeep.errors import CheckpointError
from shardkeep.format.boxes import Box, Boxes, IntArray, relative, slices
from shardkeep.format.data_file import HeaderEntry, build_header
from shardkeep.format.dtypes import by_code
from shardkeep.format.record import FileEntry
from shardkeep.format.values import encode_tree, encode_value
from shardkeep.layouts import native, orphans
from shardkeep.options import Options
from shardkeep.plan.save_plan import PlainValues, RankManifest, RankWritePlan, TensorNames, encode, ints
from shardkeep.state.describe import Description, describe, file_groups
from shardkeep.state.objects import Objects, check_same_objects
from shardkeep.storage.base import Store
from shardkeep.storage.buffers import view_memory
from shardkeep.storage.cancel import run_with_deadline

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

log = logging.getLogger("shardkeep")

_DIGEST_WINDOW_NBYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class SaveArguments:
    """What a caller asks for: the arguments of `sk.save`."""

    where: str | os.PathLike[str] | Store
    step: int | None = None
    meta: Mapping[str, Any] | None = None
    overwrite: bool = False
    allow_pickle: bool = False
    check_replicas: bool = False
    codecs: Codecs = None
    group: ProcessGroup | World | None = None
    options: Options = field(default_factory=Options)
    check: Callable[[], object] | None = None
    """Called on this rank before the state is described; what it raises fails the save on all ranks."""


@dataclass(frozen=True)
class DescribedState:
    """What this rank holds."""

    description: Description
    manifest: bytes
    labels: RecordLabels
    optimizers: Sequence[Optimizer]
    """The optimizers that are in the state as objects."""


@dataclass(frozen=True)
class RankPlan:
    """The result of the plan step."""

    writes: RankWritePlan
    """The files this rank writes."""
    planned: PlannedSave | None
    """The plan of all ranks; on rank 0."""


@dataclass(frozen=True)
class WrittenFiles:
    """The result of the write step."""

    entries: list[FileEntry]
    """The files of this rank."""
    collected: list[FileEntry]
    """The files of all ranks, in the order of the plan; on rank 0."""
    seconds: float
    """From the call until every rank had written."""


class _RankWritten(msgspec.Struct, frozen=True):
    """What a rank sends when it has written."""

    files: list[FileEntry]
    spans: SentPhases


class SaveSession:
    """One save of one rank. Used by one thread at a time; the steps are called inside `running`."""

    def __init__(
        self, request: SaveArguments, store: Store, world: World, phases: Phases, keys: CachedKeys | None
    ) -> None:
        self.store = store
        self.world = world
        self.phases = phases
        self._request = request
        self._keys = keys
        self._coordinator = Coordinator(store, overwrite=request.overwrite, codecs=request.codecs, keys=keys)
        self._title = f"save to {store.url}"
        self._written: list[FileEntry] = []
        self._handed_over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Rendezvous]:
        """Make the call together with the other ranks; gives what they meet through."""
        with orphans.holding_claim(self._coordinator.save_id), rendezvous(self.world, self._title) as ranks:
            try:
                yield ranks
            except BaseException:
                # With a deadline. The claim is deleted last, so that the next save finds and finishes an interrupted clean-up.
                run_with_deadline(self._clean_up, f"clean up {self.store.url}")
                raise
        if self.world.rank == 0:
            self._coordinator.tidy()

    def _clean_up(self) -> None:
        """Remove what was written of a save that failed."""
        if not self._handed_over:
            orphans.discard(self.store, [name for entry in self._written for name, _ in entry.at_rest])
        if self.world.rank == 0:
            self._coordinator.withdraw()

    def describer(self, ranks: Rendezvous, state: Mapping[str, Any]) -> Callable[[], DescribedState]:
        """
        Find the objects in the state, agree on what differs between ranks, and return a function that describes the state.

        Everything that can fail on one rank alone comes before ranks wait for each other.
        """
        request, rank = self._request, self.world.rank
        objects = _find_objects(state, self.world)
        # Ranks meet only if there are objects.
        with self.phases.phase("plan") if objects and self.world.size > 1 else contextlib.nullcontext():
            differing = find_differing_state(objects, ranks, self.world.size, allow_pickle=request.allow_pickle)

        def prepare() -> tuple[RecordLabels, dict[str, Any]]:
            if request.check is not None:
                request.check()
            labels = RecordLabels.checked(request.step, request.meta)
            return labels, objects.states(differing, communicating=False)

        def describe_now() -> DescribedState:
            with self.phases.phase("describe"):
                labels, in_place_of = prepared or prepare()
                if objects.communicates:
                    in_place_of |= objects.states(differing, communicating=True)
                description = describe(state, rank=rank, in_place_of=in_place_of)
                manifest = make_manifest(
                    description, allow_pickle=request.allow_pickle, check_replicas=request.check_replicas
                )
                return DescribedState(description, encode(manifest), labels, objects.optimizers)

        prepared: tuple[RecordLabels, dict[str, Any]] | None = None
        if objects.communicates:

            def prepare_first() -> bytes:
                nonlocal prepared
                with self.phases.phase("describe"):
                    prepared = prepare()
                return b""

            ranks.agree("prepare", prepare_first, lambda done: done)
        return describe_now

    def plan(self, ranks: Rendezvous, manifest: Callable[[], bytes]) -> RankPlan:
        """Send what this rank holds, and return what it has to write."""
        began_s = 0.0
        planned: PlannedSave | None = None

        def describing() -> bytes:
            nonlocal began_s
            made = manifest()
            began_s = self.phases.now()
            return made

        def decide(payloads: list[bytes]) -> list[bytes]:
            nonlocal planned
            planned = self._coordinator.plan(payloads)
            return [encode(each) for each in planned.rank_plans]

        answer = ranks.agree("plan", describing, decide)
        self.phases.add("plan", began_s, self.phases.mark_meeting())
        return RankPlan(msgspec.msgpack.decode(answer, type=RankWritePlan), planned)

    def file_codecs(self, plan: RankPlan) -> FileCodecs:
        """Open the codecs of this rank's files."""
        return FileCodecs(plan.writes, self._keys)

    def write(self, ranks: Rendezvous, plan: RankPlan, work: Callable[[], list[FileEntry]]) -> WrittenFiles:
        """Write this rank's files, and wait until the other ranks have written theirs."""
        began_s = ended_s = self.phases.now()
        collected: list[FileEntry] = []

        def writing() -> bytes:
            nonlocal ended_s
            try:
                self._written.extend(work())
            finally:
                ended_s = self.phases.now()
                self.phases.add("write", began_s, ended_s, sum(entry.nbytes for entry in self._written))
            return encode(_RankWritten(self._written, self.phases.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=_RankWritten) for payload in payloads]
            self.phases.collect([each.spans for each in said])
            if plan.planned is not None:  # always: this runs on rank 0
                collected.extend(self._coordinator.collect(plan.planned, [each.files for each in said]))
            return [b""] * len(payloads)

        ranks.agree("write", writing, collect)
        written_s = self.phases.now()
        self.phases.add("wait", ended_s, written_s)
        return WrittenFiles(self._written, collected, written_s)

    def commit(self, ranks: Rendezvous, plan: RankPlan, written: WrittenFiles, labels: RecordLabels) -> CommittedSave:
        """Publish the checkpoint."""

        def decide(payloads: list[bytes]) -> list[bytes]:
            if plan.planned is None:  # unreachable: this runs on rank 0
                raise CheckpointError("only rank 0 commits")
            committed = self._coordinator.commit(plan.planned, written.collected, labels, len(payloads))
            return [encode(committed)] * len(payloads)

        # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
        self._handed_over = True
        with self.phases.phase("commit"):
            return msgspec.msgpack.decode(ranks.agree("commit", bytes, decide), type=CommittedSave)


def _find_objects(state: Mapping[str, Any], world: World) -> Objects:
    """Find the objects in a state; none in one that cannot be walked: describing it then fails on all ranks."""
    try:
        return Objects(state, rank=world.rank, world_size=world.size)
    except CheckpointError:
        return Objects({}, rank=world.rank, world_size=world.size)


def find_differing_state(objects: Objects, ranks: Rendezvous, size: int, *, allow_pickle: bool) -> frozenset[str]:
    """
    Return the names of object state that differs between ranks, and so is saved for each rank.

    A scheduler's state is the same everywhere, a data loader's is not, and neither says so: ranks compare digests.
    """
    if size == 1 or not objects:
        return frozenset()

    def digests() -> bytes:
        return msgspec.msgpack.encode((objects.names, objects.digests(allow_pickle=allow_pickle)))

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

    return frozenset(msgspec.msgpack.decode(ranks.agree("compare", digests, differing), type=list[str]))


def make_manifest(description: Description, *, allow_pickle: bool, check_replicas: bool) -> RankManifest:
    """Encode a description; a plain value that has no safe form raises an error that names it."""
    d = description
    held = np.bincount(d.row_tensor, minlength=len(d.keys)) > 0
    names = TensorNames(
        keys=d.keys,
        groups=file_groups(d.tree, d.keys),
        dtype=d.dtype.tobytes(),
        ndim=d.ndim.tobytes(),
        origin=d.origin.tobytes(),
    )
    values = PlainValues(
        keys=list(d.values),
        data=[encode_value(value, key=key, allow_pickle=allow_pickle) for key, value in d.values.items()],
    )
    return RankManifest(
        axes=d.boxes.axes,
        names=encode(names),
        shape=d.shape.tobytes(),
        alias=np.where(held, d.alias, -1).tobytes(),
        row_tensor=d.row_tensor.tobytes(),
        row_offsets=d.boxes.offsets.tobytes(),
        row_sizes=d.boxes.sizes.tobytes(),
        check_replicas=check_replicas,
        row_digest=_digests(description) if check_replicas else b"",
        tree=encode_tree(d.tree),
        values=encode(values),
    )


def _digests(description: Description) -> bytes:
    buffer = memoryview(bytearray(_DIGEST_WINDOW_NBYTES))
    digests = bytearray()
    for tensor in description.pieces:
        nbytes = tensor.numel() * tensor.element_size()
        address = host_address(tensor)
        digest = xxhash.xxh3_128()
        source = None if address else scattered_memory(tensor, tensor.dtype)
        for start in range(0, nbytes, _DIGEST_WINDOW_NBYTES):
            stop = min(start + _DIGEST_WINDOW_NBYTES, nbytes)
            if source is None:
                digest.update(view_memory(address + start, stop - start))
            else:
                source.read(start, stop, buffer[: stop - start])
                digest.update(buffer[: stop - start])
        digests += digest.digest()
    return bytes(digests)


def make_file_jobs(description: Description, plan: RankWritePlan) -> list[FileJob]:
    """Find the memory of every chunk that this rank writes, and build its files' headers."""
    file, start, row = ints(plan.file), ints(plan.start), ints(plan.row)
    offsets = ints(plan.offsets).reshape(len(row), plan.axes)
    sizes = ints(plan.sizes).reshape(len(row), plan.axes)
    jobs = []
    for at, (name, data_nbytes, block) in enumerate(plan.files):
        mine = np.flatnonzero(file == at)
        chunks = _FileChunks(description, row[mine], Boxes(offsets[mine], sizes[mine]), start[mine])
        sidecar = plan.sidecar and plan.chain[at] is None
        header = build_header(
            chunks.entries(), save_id=plan.save_id, data_nbytes=data_nbytes, block_nbytes=block, sidecar=sidecar
        )
        tensors = chunks.tensors()
        addresses = [host_address(tensor) for tensor in tensors]
        others = {
            i: scattered_memory(tensors[i], tensors[i].dtype) for i, address in enumerate(addresses) if not address
        }
        begins = np.array(addresses, np.int64)
        jobs.append(FileJob(name, header, data_nbytes, block, start[mine], begins, others, sidecar=sidecar))
    return jobs


class _FileChunks:
    """The chunks of one file: their entries in its header, and the tensors that hold exactly their boxes."""

    def __init__(self, description: Description, row: IntArray, boxes: Boxes, start: IntArray) -> None:
        d = description
        self.rows = row.tolist()
        self.pieces = d.pieces
        self.tensor = d.row_tensor[row]
        self.boxes = boxes
        self.start = start
        self.keys = d.keys
        self.ndim = d.ndim[self.tensor].tolist()
        self.dtype = [by_code(code) for code in d.dtype[self.tensor].tolist()]
        axes = d.boxes.axes
        self.held = d.boxes.take(row)
        narrow = Boxes(boxes.offsets[:, :axes], boxes.sizes[:, :axes])  # the rest is padding for other ranks' tensors
        self.offsets, self.sizes = narrow.offsets.tolist(), narrow.sizes.tolist()
        self.whole = np.all(narrow.sizes == d.shape[self.tensor], axis=1).tolist()
        self.as_held = np.all(narrow.sizes == self.held.sizes, axis=1).tolist()

    def entries(self) -> Iterator[HeaderEntry]:
        """Yield the entries of the header."""
        columns = zip(self.tensor.tolist(), self.ndim, self.dtype, self.offsets, self.sizes, self.whole, strict=True)
        for start, (tensor, ndim, dtype, offsets, sizes, whole) in zip(self.start.tolist(), columns, strict=True):
            shape = tuple(sizes[:ndim])
            name = native.chunk_name(self.keys[tensor], None if whole else Box(tuple(offsets[:ndim]), shape))
            kind, stored = dtype.in_safetensors(shape)
            yield HeaderEntry(name, kind, stored, start, start + math.prod(shape) * dtype.itemsize)

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of each chunk: a tensor of the state, or a slice of one if replicas share the work."""
        found = [self.pieces[row] for row in self.rows]
        for at, as_held in enumerate(self.as_held):
            if not as_held:
                ndim = self.ndim[at]
                found[at] = found[at][slices(relative(self.boxes.box(at, ndim), self.held.box(at, ndim)))]
        return found


class BackgroundSave(BackgroundWrite):
    """The part of an asynchronous save that goes on after its call has returned: plan, stage and write, commit."""

    def __init__(
        self,
        session: SaveSession,
        described: DescribedState,
        snapshot: DeviceSnapshot,
        handle: SaveHandle[Any],
        memory: StagingMemory,
        options: Options,
        events: SaveEvents,
        writer: WriterSession | None = None,
    ) -> None:
        """Start nothing yet. Without `writer`, threads of this process hash and write."""
        super().__init__(snapshot, handle, memory, options, events)
        self._session = session
        self._writer = writer
        self._described = [described]
        """Popped when its file jobs are made: from then on only these hold the tensors."""
        self._labels = described.labels
        self._manifest = described.manifest

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        """Release the state and the memory at the end, whatever happens inside."""
        with super().releasing():
            try:
                yield
            finally:
                self._described.clear()

    def run(self, ranks: Rendezvous) -> tuple[CommittedSave, WrittenFiles]:
        """Make the rest of the save."""
        session = self._session
        plan = session.plan(ranks, lambda: self._manifest)
        jobs = self._make_jobs(plan)
        try:
            written = session.write(ranks, plan, lambda: self._write_files(jobs, session.file_codecs(plan)))
        finally:
            jobs.clear()  # frames of an error that is kept hold the list, and must not hold the tensors with it
        self._handle.set_progress(
            "committing", staged=self._bytes_total, written=self._bytes_written, total=self._bytes_total
        )
        return session.commit(ranks, plan, written, self._labels), written

    def _make_jobs(self, plan: RankPlan) -> list[FileJob]:
        """Make the file jobs, which alone hold the tensors from here on, and drop each when it is copied."""
        description = self._described.pop().description
        jobs = make_file_jobs(replace(description, pieces=self._snapshot.tensors), plan.writes)
        self._snapshot.tensors.clear()
        return jobs

    def _write_files(self, jobs: list[FileJob], codecs: FileCodecs) -> list[FileEntry]:
        self.write(self._session.store, jobs, codecs, self._writer)
        self._handle.begin_commit()
        entries = [codecs.entry_of(job) for job in jobs]
        self._events.written(sum(entry.nbytes for entry in entries))
        return entries
