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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.codecs import Codecs, keys_for
from shardkeep.engine.coordinator import CommittedSave, Coordinator, Labels, PlannedSave
from shardkeep.engine.report import SAVE_WORK, Phases, SaveReport, SentPhases, find_slowest
from shardkeep.engine.tensors import host_address, scattered_memory, windows_of
from shardkeep.engine.workers import WINDOW_NBYTES
from shardkeep.engine.writer import FileJob
from shardkeep.errors import CheckpointError
from shardkeep.format.boxes import Box, Boxes, IntArray, relative, slices
from shardkeep.format.data_file import HeaderEntry, build_header
from shardkeep.format.dtypes import by_code
from shardkeep.format.record import FileEntry, checked_meta, checked_step
from shardkeep.format.values import encode_tree, encode_value
from shardkeep.layouts import native, orphans
from shardkeep.options import Options
from shardkeep.plan.save_plan import RankManifest, RankWritePlan, TensorNames, encode, ints
from shardkeep.state.describe import Description, describe, file_groups
from shardkeep.state.objects import Objects, check_same_objects
from shardkeep.storage.base import Store
from shardkeep.storage.cancel import run_with_deadline

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
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
    labels: Labels
    optimizers: Sequence[Optimizer]
    """The optimizers that are in the state as objects."""


class SaveSession:
    """One save of one rank. Used by one thread at a time; the steps are called inside `running`, in their order."""

    def __init__(self, request: SaveArguments, store: Store, world: World, phases: Phases) -> None:
        self.store = store
        self.world = world
        self.phases = phases
        self.options = request.options
        self._request = request
        self.keys = keys_for(request.options)
        self._coordinator = Coordinator(store, overwrite=request.overwrite, codecs=request.codecs, keys=self.keys)
        self._written: list[FileEntry] = []
        self._written_s = 0.0
        self._handed_over = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Rendezvous]:
        """Make the call together with the other ranks; gives what they meet through."""
        title = f"save to {self.store.url}"
        with orphans.holding_claim(self._coordinator.save_id), rendezvous(self.world, title) as ranks:
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
        request, world = self._request, self.world
        try:
            objects = Objects(state, rank=world.rank, world_size=world.size)
        except CheckpointError:  # a state that cannot be walked: describing it then fails on all ranks
            objects = Objects({}, rank=world.rank, world_size=world.size)
        differing = frozenset[str]()
        if objects and world.size > 1:  # ranks meet only then
            with self.phases.phase("plan"):
                differing = _find_differing_state(objects, ranks, allow_pickle=request.allow_pickle)

        def prepare() -> tuple[Labels, dict[str, Any]]:
            if request.check is not None:
                request.check()
            labels = checked_step(request.step), checked_meta(request.meta)
            return labels, objects.states(differing, communicating=False)

        def describe_now() -> DescribedState:
            with self.phases.phase("describe"):
                labels, in_place_of = prepared[0] if prepared else prepare()
                if objects.communicates:
                    in_place_of |= objects.states(differing, communicating=True)
                description = describe(state, rank=world.rank, in_place_of=in_place_of)
                manifest = make_manifest(
                    description, allow_pickle=request.allow_pickle, check_replicas=request.check_replicas
                )
                return DescribedState(description, encode(manifest), labels, objects.optimizers)

        prepared: list[tuple[Labels, dict[str, Any]]] = []
        if objects.communicates:

            def prepare_first() -> bytes:
                with self.phases.phase("describe"):
                    prepared.append(prepare())
                return b""

            ranks.agree("prepare", prepare_first, lambda done: done)
        return describe_now

    def plan(self, ranks: Rendezvous, manifest: Callable[[], bytes]) -> tuple[RankWritePlan, list[PlannedSave]]:
        """Send what this rank holds; return what it has to write, and on rank 0 the plan for all ranks."""
        began_s, on_rank_0 = 0.0, list[PlannedSave]()

        def describing() -> bytes:
            nonlocal began_s
            made = manifest()
            began_s = self.phases.now()
            return made

        def decide(sent: list[bytes]) -> list[bytes]:
            on_rank_0.append(self._coordinator.plan(sent))
            return [encode(each) for each in on_rank_0[0].by_rank]

        answer = ranks.agree("plan", describing, decide)
        self.phases.add("plan", began_s, self.phases.mark_meeting())
        return msgspec.msgpack.decode(answer, type=RankWritePlan), on_rank_0

    def write(
        self, ranks: Rendezvous, on_rank_0: list[PlannedSave], work: Callable[[], list[FileEntry]]
    ) -> list[FileEntry]:
        """Write this rank's files, and wait for the other ranks; return, on rank 0, the files of all of them."""
        began_s, files = self.phases.now(), list[FileEntry]()
        ended_s = began_s

        def writing() -> bytes:
            nonlocal ended_s
            try:
                self._written.extend(work())
            finally:
                ended_s = self.phases.now()
                self.phases.add("write", began_s, ended_s, sum(entry.nbytes for entry in self._written))
            return encode((self._written, self.phases.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=tuple[list[FileEntry], SentPhases]) for payload in payloads]
            self.phases.collect([spans for _, spans in said])
            files.extend(self._coordinator.collect(on_rank_0[0], [written for written, _ in said]))
            return [b""] * len(payloads)

        ranks.agree("write", writing, collect)
        self._written_s = self.phases.now()
        self.phases.add("wait", ended_s, self._written_s)
        return files

    def commit(
        self, ranks: Rendezvous, on_rank_0: list[PlannedSave], files: list[FileEntry], labels: Labels
    ) -> CommittedSave:
        """Publish the checkpoint."""

        def decide(payloads: list[bytes]) -> list[bytes]:
            return [encode(self._coordinator.commit(on_rank_0[0], files, labels))] * len(payloads)

        # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
        self._handed_over = True
        with self.phases.phase("commit"):
            return msgspec.msgpack.decode(ranks.agree("commit", bytes, decide), type=CommittedSave)

    def report(self, committed: CommittedSave, *, seconds: float, blocked_s: float, staged_s: float) -> SaveReport:
        """Return what the save did."""
        ranks = self.phases.all_ranks()
        return SaveReport(
            where=self.store.url,
            save_id=committed.save_id,
            step=committed.step,
            bytes_written=sum(entry.nbytes for entry in self._written),
            bytes_stored=sum(nbytes for entry in self._written for _, nbytes in entry.at_rest),
            bytes_total=committed.bytes_total,
            tensors=committed.tensors,
            seconds=seconds,
            blocked_s=blocked_s,
            staged_s=staged_s,
            written_s=self._written_s,
            phases=self.phases.spans,
            ranks=ranks,
            slowest=find_slowest(ranks, SAVE_WORK),
        )


def _find_differing_state(objects: Objects, ranks: Rendezvous, *, allow_pickle: bool) -> frozenset[str]:
    """Return the names of object state whose digests differ between ranks, and which so is saved for each rank."""

    def digests() -> bytes:
        return msgspec.msgpack.encode((objects.names, objects.digests(allow_pickle=allow_pickle)))

    def differing(payloads: list[bytes]) -> list[bytes]:
        said = [msgspec.msgpack.decode(payload, type=tuple[list[str], dict[str, bytes]]) for payload in payloads]
        check_same_objects([names for names, _ in said])
        different = {pair for _, digests in said for pair in digests.items()}
        found = [name for name, times in Counter(name for name, _ in different).items() if times > 1]
        return [msgspec.msgpack.encode(found)] * len(payloads)

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
    values = [encode_value(value, key=key, allow_pickle=allow_pickle) for key, value in d.values.items()]
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
        values=encode((list(d.values), values)),
    )


def _digests(description: Description) -> bytes:
    digests = bytearray()
    for tensor in description.pieces:
        digest = xxhash.xxh3_128()
        for window in windows_of(tensor, WINDOW_NBYTES):
            digest.update(window)
        digests += digest.digest()
    return bytes(digests)


def make_file_jobs(description: Description, plan: RankWritePlan) -> list[FileJob]:
    """Find the memory of every chunk that this rank writes, and build its files' headers."""
    file, start, row = ints(plan.file), ints(plan.start), ints(plan.row)
    boxes = Boxes(*(ints(each).reshape(len(row), plan.axes) for each in (plan.offsets, plan.sizes)))
    jobs = []
    for at, (name, data_nbytes, block) in enumerate(plan.files):
        mine = np.flatnonzero(file == at)
        entries, tensors = _chunks_of_file(description, row[mine], boxes.take(mine), start[mine])
        sidecar = plan.sidecar and plan.chain[at] is None
        header = build_header(
            entries, save_id=plan.save_id, data_nbytes=data_nbytes, block_nbytes=block, sidecar=sidecar
        )
        addresses = np.array([host_address(tensor) for tensor in tensors], np.int64)
        others = {i: scattered_memory(tensors[i], tensors[i].dtype) for i in np.flatnonzero(addresses == 0).tolist()}
        jobs.append(FileJob(name, header, data_nbytes, block, start[mine], addresses, others, sidecar=sidecar))
    return jobs


def _chunks_of_file(
    d: Description, rows: IntArray, boxes: Boxes, starts: IntArray
) -> tuple[list[HeaderEntry], list[torch.Tensor]]:
    """Return the entries of a file's chunks in its header, and the tensors that hold exactly their boxes."""
    tensors = d.row_tensor[rows]
    held = d.boxes.take(rows)
    sizes = boxes.sizes[:, : d.boxes.axes]  # the rest is padding for other ranks' tensors
    columns = zip(
        rows.tolist(),
        tensors.tolist(),
        d.ndim[tensors].tolist(),
        d.dtype[tensors].tolist(),
        starts.tolist(),
        boxes.offsets.tolist(),
        sizes.tolist(),
        np.all(sizes == d.shape[tensors], axis=1).tolist(),
        np.all(sizes == held.sizes, axis=1).tolist(),
        strict=True,
    )
    entries: list[HeaderEntry] = []
    pieces: list[torch.Tensor] = []
    for at, (row, tensor, ndim, code, start, offset, size, is_whole, is_as_held) in enumerate(columns):
        shape, dtype = tuple(size[:ndim]), by_code(code)
        name = native.chunk_name(d.keys[tensor], None if is_whole else Box(tuple(offset[:ndim]), shape))
        kind, stored = dtype.in_safetensors(shape)
        entries.append(HeaderEntry(name, kind, stored, start, start + math.prod(shape) * dtype.itemsize))
        piece = d.pieces[row]
        if not is_as_held:  # replicas share the work
            piece = piece[slices(relative(boxes.box(at, ndim), held.box(at, ndim)))]
        pieces.append(piece)
    return entries, pieces
