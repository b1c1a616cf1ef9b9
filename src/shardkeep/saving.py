"""
The save story: describe -> plan -> write -> commit.

Three meetings of the ranks: every rank sends what it holds and learns what it is to write; every rank writes; every
rank gives its files out of its hands, and rank 0 publishes. Where objects stand in the state, ranks compare first what
may differ between them. A failure anywhere, on any rank, reaches all of them,
removes what was written, and leaves whatever checkpoint was there before as it was.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    DamagedCheckpoint,
    PickleRefused,
    StorageError,
    UnsupportedVersion,
)
from shardkeep.format.index import Chunks
from shardkeep.format.record import FileEntry, Record, checked_meta, checked_step
from shardkeep.layout import leftovers, native, torch_files
from shardkeep.options import Options
from shardkeep.plan.draft import decode_draft, encode
from shardkeep.plan.saves import SavePlan, plan_save
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World, current_world
from shardkeep.run.deciding import differing_state
from shardkeep.run.drafting import make_draft, merge_skeletons, merge_values
from shardkeep.run.orders import Orders, cut_orders, file_names, make_jobs
from shardkeep.run.sources import read_record
from shardkeep.run.workers import window_for
from shardkeep.run.write import FileJob, entry_of, write_files
from shardkeep.state.describe import Description, describe
from shardkeep.state.devices import settle
from shardkeep.state.objects.find import Objects
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("shardkeep")

_HOW_TO_REPLACE = "pass overwrite=True to replace it, or save to another place"


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a save did."""

    where: str
    save_id: str
    step: int | None
    bytes_written: int
    """By this rank, headers included."""
    bytes_total: int
    """Tensor bytes of the whole checkpoint."""
    tensors: int
    seconds: float
    """From the call to the commit, on this rank."""

    @property
    def gb_per_s(self) -> float:
        """The whole checkpoint over the time it took."""
        return self.bytes_total / max(self.seconds, 1e-9) / 1e9


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    save_id: str
    step: int | None
    bytes_total: int
    tensors: int


def save(
    state: Mapping[str, Any],
    where: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    meta: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    check_replicas: bool = False,
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
        group: the ranks that take part.
        options: threads, memory and deadlines.

    Raises:
        StateError: `step` or `meta` cannot be kept in the commit record.
        UnsupportedLeaf: a leaf cannot be stored; names its key.
        InvalidShards: the ranks' shards do not make up their tensors.
        CheckpointExists: a checkpoint is there, and `overwrite` was not given.
        StorageError: the store failed.
        RanksSilent: ranks did not answer in time; names them.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where = tempfile.mkdtemp() + "/step-1"
        >>> report = sk.save({"model": {"w": torch.ones(4, 4)}, "step": 1}, where)
        >>> report.bytes_total
        64

    """
    began = time.perf_counter()
    options = options or Options()
    world = current_world(group, timeout_s=options.timeout_s)
    try:
        store = open_store(where, direct=options.direct_io)
    except CheckpointError:
        with meet(world, f"save to {where!r}"):  # or the others would wait for this rank
            raise
    coordinator = _Coordinator(store, overwrite=overwrite)
    written: list[FileEntry] = []
    with leftovers.claiming(coordinator.save_id), meet(world, f"save to {store.url}") as meeting:
        description: Description

        in_place_of: dict[str, Any] = {}

        def prepare() -> bytes:
            coordinator.label(step, meta)
            in_place_of.update(objects.give(differing, communicating=False))
            return b""

        def draft() -> bytes:
            nonlocal description
            if not objects.communicates:
                prepare()
            else:
                in_place_of.update(objects.give(differing, communicating=True))
            description = describe(state, rank=world.rank, in_place_of=in_place_of)
            return encode(make_draft(description, allow_pickle=allow_pickle, check_replicas=check_replicas))

        def write() -> bytes:
            settle(description.pieces)
            written.extend(_write(store, make_jobs(description, orders), options))
            return encode(written)

        given = False
        try:
            objects = _objects_of(state, world)
            differing = differing_state(objects, meeting, world.size, allow_pickle=allow_pickle)
            if objects.communicates:  # all that can fail on a rank alone comes before ranks wait for each other
                meeting.agree("prepare", prepare, lambda done: done)
            orders = msgspec.msgpack.decode(meeting.agree("plan", draft, coordinator.plan), type=Orders)
            meeting.agree("write", write, coordinator.collect)
            # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
            given = True
            outcome = msgspec.msgpack.decode(meeting.agree("commit", bytes, coordinator.commit), type=_Outcome)
        except BaseException:
            if not given:
                _discard(store, [entry.name for entry in written])
            if world.rank == 0:
                coordinator.withdraw()
            raise
    seconds = time.perf_counter() - began
    if world.rank == 0:
        coordinator.tidy()
    report = SaveReport(
        where=store.url,
        save_id=outcome.save_id,
        step=outcome.step,
        bytes_written=sum(entry.nbytes for entry in written),
        bytes_total=outcome.bytes_total,
        tensors=outcome.tensors,
        seconds=seconds,
    )
    if world.rank == 0:
        log.info(
            "saved %s: %.3f GB in %.2f s (%.2f GB/s)",
            store.url,
            report.bytes_total / 1e9,
            report.seconds,
            report.gb_per_s,
        )
    return report


class _Coordinator:
    """Rank 0's part of a save: what it decides, and what it takes back."""

    def __init__(self, store: Store, *, overwrite: bool) -> None:
        self.store = store
        self.overwrite = overwrite
        self.save_id = native.new_save_id()
        # Known after `label`.
        self.step: int | None
        self.meta: dict[str, Any]
        # Known after `plan`.
        self.saved: SavePlan
        self.values: list[tuple[str, bytes]]
        self.tree: bytes
        # Known after `collect`, in the order of the plan's files.
        self.files: list[FileEntry]
        self.committed: Record | None = None
        self._publishing = False

    def label(self, step: int | None, meta: Mapping[str, Any] | None) -> None:
        """Take what the caller wants in the record, if a record can hold it."""
        self.step, self.meta = checked_step(step), checked_meta(meta)

    def plan(self, payloads: list[bytes]) -> list[bytes]:
        """Check that the place is free, claim it, and share out the work."""
        self._check_place()
        drafts = [decode_draft(payload) for payload in payloads]
        self.saved = plan_save(drafts)
        self.values = merge_values(drafts, self.saved.keys)
        self.tree = merge_skeletons(drafts)
        leftovers.make_claim(self.store, self.save_id)
        return [encode(orders) for orders in cut_orders(self.saved, self.save_id, len(drafts))]

    def collect(self, payloads: list[bytes]) -> list[bytes]:
        """Note what all ranks wrote, and insist that it is here."""
        written: dict[str, FileEntry] = {}
        for payload in payloads:
            written |= {entry.name: entry for entry in msgspec.msgpack.decode(payload, type=list[FileEntry])}
        self.files = [written[name] for name in file_names(self.saved, self.save_id, len(payloads))]
        listed = {info.name: info.nbytes for info in self.store.list()}
        for entry, plan in zip(self.files, self.saved.files, strict=True):
            # A network file system may list what was there a while ago; asked for by name it looks again.
            if listed.get(entry.name) != entry.nbytes and self._nbytes(entry.name) != entry.nbytes:
                raise StorageError(
                    f"{self.store.url}: rank {plan.rank} wrote {entry.name} of {entry.nbytes} bytes, which rank 0"
                    " does not find there",
                    hint="all ranks must see one file system",
                    name=entry.name,
                )
        return [b""] * len(payloads)

    def _nbytes(self, name: str) -> int | None:
        try:
            with contextlib.closing(self.store.open(name)) as blob:
                return blob.nbytes
        except BlobNotFound:
            return None

    def commit(self, payloads: list[bytes]) -> list[bytes]:
        """Publish it."""
        plan, pieces = self.saved, self.saved.pieces_by_tensor()
        self._publishing = True
        record = native.publish(
            self.store,
            save_id=self.save_id,
            keys=plan.keys,
            tensors=plan.tensors,
            chunk_ends=np.searchsorted(pieces.tensor, np.arange(len(plan.keys)), "right"),
            chunks=Chunks(pieces.offsets, pieces.sizes, pieces.file, pieces.start),
            values=self.values,
            tree=self.tree,
            files=self.files,
            tensor_bytes=int(pieces.nbytes.sum()),
            world_size=len(payloads),
            step=self.step,
            meta=self.meta,
            overwrite=self.overwrite,
        )
        self.committed = record
        totals = record.totals
        outcome = _Outcome(
            save_id=self.save_id, step=self.step, bytes_total=totals.tensor_bytes, tensors=totals.tensors
        )
        return [encode(outcome)] * len(payloads)

    def withdraw(self) -> None:
        """Remove every file of a save that failed, also those of ranks that died; never raises."""
        claim = native.claim_name(self.save_id)
        try:
            if self._has_committed():
                _discard(self.store, [claim])
                return
            mine = [info.name for info in self.store.list() if native.save_id_of(info.name) == self.save_id]
        except CheckpointError as exc:
            log.warning("could not look for the files of a failed save in %s: %s", self.store.url, exc)
            return
        # The claim goes last: while it is there, nobody takes the rest for a finished save's.
        _discard(self.store, [name for name in mine if name != claim] + [claim])

    def _has_committed(self) -> bool:
        """Tell whether the record is in place: it may be, however the attempt to put it there has ended."""
        if not self._publishing:
            return False
        try:
            return self.committed is not None or native.read_record(self.store).save_id == self.save_id
        except CheckpointNotFound:
            return False

    def tidy(self) -> None:
        """After the commit: remove the claim, what was replaced, and what dead saves left. Failure loses nothing."""
        _discard(self.store, [native.claim_name(self.save_id)])
        try:
            # Metadata first: without them, data files of torch's layout mean nothing.
            names = [info.name for info in self.store.list()]
            if replaced := list(filter(torch_files.is_metadata, names)):
                _discard(self.store, [*replaced, *filter(torch_files.is_data, names)])
            self._sweep(leftovers.survey(self.store))
        except CheckpointError as exc:
            log.warning("could not remove replaced files in %s: %s", self.store.url, exc)

    def _sweep(self, found: leftovers.Survey) -> None:
        """Delete the files of saves that are over, but for those of the committed checkpoint."""
        if not found.dead and not found.ended:
            return
        try:
            record = native.read_record(self.store)
        except CheckpointNotFound:
            # Files that nobody claims any more may be a checkpoint whose record was lost or is not visible yet.
            _discard(self.store, found.dead)
            return
        except (DamagedCheckpoint, UnsupportedVersion) as exc:
            log.warning("nothing is removed from %s, in case its commit record can be mended: %s", self.store.url, exc)
            return
        kept = {record.index.name, *(file.name for file in record.files)}
        _discard(self.store, [name for name in found.dead + found.ended if name not in kept])

    def _check_place(self) -> None:
        if not self.overwrite:
            try:
                read_record(self.store)
            except CheckpointNotFound:
                pass
            except (DamagedCheckpoint, UnsupportedVersion, PickleRefused) as exc:
                raise CheckpointExists(
                    f"{self.store.url}: a checkpoint that cannot be read is already there: {exc.message}",
                    hint=_HOW_TO_REPLACE,
                ) from exc
            else:
                raise CheckpointExists(
                    f"{self.store.url}: a committed checkpoint is already there", hint=_HOW_TO_REPLACE
                )
        found = leftovers.survey(self.store)
        if found.living:
            raise CheckpointExists(
                f"{self.store.url}: another save is writing here (process {found.living.pid})",
                hint="wait for it, or save to another place",
            )
        # Before the first byte, or a job that dies in every save would fill the disk.
        self._sweep(found)


def _objects_of(state: Mapping[str, Any], world: World) -> Objects:
    """Find the objects in a state; none in one that cannot be walked, which describing it says to all ranks."""
    try:
        return Objects(state, rank=world.rank, world_size=world.size)
    except CheckpointError:
        return Objects({}, rank=world.rank, world_size=world.size)


def _write(store: Store, jobs: list[FileJob], options: Options) -> list[FileEntry]:
    threads, window = window_for(options.io_threads, options.host_budget_bytes)
    write_files(store, jobs, threads=threads, window_nbytes=window)
    return [entry_of(job) for job in jobs]


def _discard(store: Store, names: list[str]) -> None:
    """Delete files of a save that is not to be; never raises."""
    for name in names:
        try:
            store.delete(name)
        except CheckpointError as exc:
            log.warning("could not remove %s from %s: %s", name, store.url, exc)
