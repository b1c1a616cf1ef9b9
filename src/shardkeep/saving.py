"""
The save story: describe -> plan -> write -> commit.

Two meetings of the ranks: every rank sends what it holds and learns what it is to write; every rank writes, and rank
0 publishes. A failure anywhere, on any rank, reaches all of them, removes what was written, and leaves whatever
checkpoint was there before as it was.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shardkeep.errors import CheckpointError, CheckpointExists, CheckpointNotFound
from shardkeep.format.dtypes import by_code
from shardkeep.format.header import HeaderEntry, block_nbytes_for, build_header
from shardkeep.format.index import Chunks
from shardkeep.format.record import RECORD_NAME, FileEntry, Record
from shardkeep.format.region import Box, relative, slices
from shardkeep.layout import leftovers, native
from shardkeep.options import Options
from shardkeep.plan.draft import decode_draft, encode, ints
from shardkeep.run.drafting import make_draft, merge_skeletons, merge_values
from shardkeep.plan.saves import SavePlan, plan_save
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World, current_world
from shardkeep.run.workers import window_for
from shardkeep.run.write import FileJob, write_files
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.state.describe import Description, describe
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("shardkeep")


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


class _Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells a rank to write."""

    save_id: str
    files: list[tuple[str, int]]
    """Name and bytes of data of each file."""
    file: bytes
    """For each chunk: its file's position in `files`, where it starts, the rank's row it comes from, and its box."""
    start: bytes
    row: bytes
    axes: int
    offsets: bytes
    sizes: bytes


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
            plain values, and `PerRank` of any of these.
        where: a path, or a store.
        step: kept in the commit record.
        meta: JSON values of your own, kept in the commit record. Rank 0's are taken.
        overwrite: replace a committed checkpoint; without it, one that is there is an error.
        allow_pickle: pickle leaves that have no safe form; loading them needs it again.
        check_replicas: hash replicated tensors on every rank and insist that they are equal.
        group: the ranks that take part.
        options: threads, memory and deadlines.

    Raises:
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
    store = open_store(where, direct=options.direct_io)
    coordinator = _Coordinator(store, step=step, meta=dict(meta or {}), overwrite=overwrite)
    written: list[FileEntry] = []
    with meet(world, f"save to {store.url}") as meeting:
        description: Description | None = None

        def draft() -> bytes:
            nonlocal description
            description = describe(state, rank=world.rank)
            return encode(make_draft(description, allow_pickle=allow_pickle, check_replicas=check_replicas))

        def write() -> bytes:
            jobs = _make_jobs(description, orders) if description else []
            written.extend(_write(store, jobs, options))
            return encode(written)

        try:
            orders = msgspec.msgpack.decode(meeting.agree("plan", draft, coordinator.plan), type=_Orders)
            outcome = msgspec.msgpack.decode(meeting.agree("write", write, coordinator.commit), type=_Outcome)
        except BaseException:
            _discard(store, [entry.name for entry in written])
            if world.rank == 0:
                coordinator.withdraw()
            raise
    if world.rank == 0:
        coordinator.tidy()
    report = SaveReport(
        where=store.url,
        save_id=outcome.save_id,
        step=outcome.step,
        bytes_written=sum(entry.nbytes for entry in written),
        bytes_total=outcome.bytes_total,
        tensors=outcome.tensors,
        seconds=time.perf_counter() - began,
    )
    if world.rank == 0:
        log.info("saved %s: %.3f GB in %.2f s (%.2f GB/s)", store.url, report.bytes_total / 1e9, report.seconds, report.gb_per_s)
    return report


class _Coordinator:
    """Rank 0's part of a save: what it decides, and what it takes back."""

    def __init__(self, store: Store, *, step: int | None, meta: dict[str, Any], overwrite: bool) -> None:
        self.store = store
        self.step = step
        self.meta = meta
        self.overwrite = overwrite
        self.save_id = native.new_save_id()
        self.committed: Record | None = None

    def plan(self, payloads: list[bytes]) -> list[bytes]:
        """Check that the place is free, claim it, and share out the work."""
        self._check_place()
        drafts = [decode_draft(payload) for payload in payloads]
        self.saved = plan_save(drafts)
        self.values = merge_values(drafts)
        self.tree = merge_skeletons(drafts)
        leftovers.make_claim(self.store, self.save_id)
        return [encode(orders) for orders in _orders(self.saved, self.save_id, len(drafts))]

    def commit(self, payloads: list[bytes]) -> list[bytes]:
        """Publish what all ranks wrote."""
        entries = {e.name: e for payload in payloads for e in msgspec.msgpack.decode(payload, type=list[FileEntry])}
        names = _file_names(self.saved, self.save_id, len(payloads))
        plan, pieces = self.saved, self.saved.pieces_by_tensor()
        record = native.publish(
            self.store,
            save_id=self.save_id,
            keys=plan.keys,
            tensors=plan.tensors,
            chunk_ends=np.searchsorted(pieces.tensor, np.arange(len(plan.keys)), "right"),
            chunks=Chunks(pieces.offsets, pieces.sizes, pieces.file, pieces.start),
            values=self.values,
            tree=self.tree,
            files=[entries[name] for name in names],
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
        if self.committed is not None:
            return
        try:
            mine = [info.name for info in self.store.list() if native.save_id_of(info.name) == self.save_id]
        except CheckpointError as exc:
            log.warning("could not look for the files of a failed save in %s: %s", self.store.url, exc)
            return
        claim = native.claim_name(self.save_id)
        # The claim goes last: while it is there, nobody takes the rest for a finished save's.
        _discard(self.store, [name for name in mine if name != claim] + [claim])

    def tidy(self) -> None:
        """After the commit: remove the claim, what was replaced, and what dead saves left. Failure loses nothing."""
        if self.committed is None:
            return
        keep = {RECORD_NAME, self.committed.index.name, *(file.name for file in self.committed.files)}
        _discard(self.store, [native.claim_name(self.save_id)])
        try:
            if native.read_record(self.store).save_id == self.save_id:
                leftovers.sweep(self.store, keep=keep, before=self.save_id)
        except CheckpointError as exc:
            log.warning("could not remove replaced files in %s: %s", self.store.url, exc)

    def _check_place(self) -> None:
        if not self.overwrite:
            try:
                native.read_record(self.store)
            except CheckpointNotFound:
                pass
            else:
                raise CheckpointExists(
                    f"{self.store.url}: a committed checkpoint is already there",
                    hint="pass overwrite=True to replace it, or save to another place",
                )
        if other := leftovers.living_claim(self.store):
            raise CheckpointExists(
                f"{self.store.url}: another save is writing here (process {other.pid})",
                hint="wait for it, or save to another place",
            )


def _file_names(plan: SavePlan, save_id: str, world_size: int) -> list[str]:
    return [native.data_name(file.group, file.rank, world_size, save_id) for file in plan.files]


def _orders(plan: SavePlan, save_id: str, world_size: int) -> list[_Orders]:
    """Cut the plan, which is sorted by file and so by rank, into each rank's part."""
    names = _file_names(plan, save_id, world_size)
    ranks = np.array([file.rank for file in plan.files], np.int64)
    first_file = np.searchsorted(ranks, np.arange(world_size + 1))
    first_piece = np.searchsorted(plan.pieces.file, first_file)
    orders = []
    for rank in range(world_size):
        low, high = int(first_file[rank]), int(first_file[rank + 1])
        pieces = plan.pieces.take(slice(int(first_piece[rank]), int(first_piece[rank + 1])))
        orders.append(
            _Orders(
                save_id=save_id,
                files=[(names[i], plan.files[i].data_nbytes) for i in range(low, high)],
                file=(pieces.file - low).tobytes(),
                start=pieces.start.tobytes(),
                row=pieces.row.tobytes(),
                axes=pieces.boxes.axes,
                offsets=pieces.offsets.tobytes(),
                sizes=pieces.sizes.tobytes(),
            )
        )
    return orders


def _make_jobs(description: Description, orders: _Orders) -> list[FileJob]:
    """Find the memory behind every chunk this rank is to write, and build its files' headers."""
    file, start, row = ints(orders.file), ints(orders.start), ints(orders.row)
    offsets = ints(orders.offsets).reshape(len(row), orders.axes)
    sizes = ints(orders.sizes).reshape(len(row), orders.axes)
    jobs = []
    for at, (name, data_nbytes) in enumerate(orders.files):
        rows = np.flatnonzero(file == at)
        entries, addresses, others = [], np.zeros(len(rows), np.int64), {}
        columns = zip(row[rows].tolist(), offsets[rows].tolist(), sizes[rows].tolist(), start[rows].tolist(), strict=True)
        for slot, (source, offset, size, begin) in enumerate(columns):
            entry, tensor = _chunk(description, source, offset, size, begin)
            entries.append(entry)
            addresses[slot] = host_address(tensor)
            if not addresses[slot]:
                others[slot] = scattered(tensor, tensor.dtype)
        block = block_nbytes_for(data_nbytes)
        header = build_header(entries, save_id=orders.save_id, data_nbytes=data_nbytes, block_nbytes=block)
        jobs.append(FileJob(name, header, data_nbytes, block, start[rows], addresses, others))
    return jobs


def _chunk(
    description: Description, row: int, offsets: list[int], sizes: list[int], start: int
) -> tuple[HeaderEntry, Any]:
    """Return a chunk's entry in the header, and the tensor that holds exactly its box."""
    d = description
    tensor = int(d.row_tensor[row])
    ndim = int(d.ndim[tensor])
    held = d.pieces[row]
    box = Box(tuple(offsets[:ndim]), tuple(sizes[:ndim]))
    if box.sizes != held.shape:
        held = held[slices(relative(box, d.boxes.box(row, ndim)))]
    dtype = by_code(int(d.dtype[tensor]))
    name = native.chunk_name(d.keys[tensor], box.offsets, box.sizes, d.shape[tensor, :ndim].tolist())
    kind, shape = dtype.in_safetensors(box.sizes)
    return HeaderEntry(name, kind, shape, start, start + box.volume * dtype.itemsize), held


def _write(store: Store, jobs: list[FileJob], options: Options) -> list[FileEntry]:
    threads, window = window_for(options.io_threads, options.host_budget_bytes)
    return write_files(store, jobs, threads=threads, window_nbytes=window)


def _discard(store: Store, names: list[str]) -> None:
    """Delete files of a save that is not to be; never raises."""
    for name in names:
        try:
            store.delete(name)
        except CheckpointError as exc:
            log.warning("could not remove %s from %s: %s", name, store.url, exc)
