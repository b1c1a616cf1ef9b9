"""
Rank 0's part of replication: what is copied to the far root next, and when the copy exists there.

A checkpoint is committed in the far root as it was in the near one: after all its files, by the very same bytes of its
commit record, put where there was none or over the version that was seen. Until then the copy is not a checkpoint, and
what is there of it is left for a later attempt to continue.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec

from shardkeep.engine.reader import open_sized
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    CheckpointExists,
    DamagedCheckpoint,
    StorageError,
    StorageFull,
    WrongSize,
)
from shardkeep.format.record import MAX_RECORD_NBYTES, RECORD_NAME, Record, decode_record
from shardkeep.layouts import orphans
from shardkeep.layouts.native import claim_name
from shardkeep.manage.catalog import FAR, Catalog, Entry, Tiers, entry_from_record, is_pinned, newest_first, pin
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import CheckpointLocks, Pruner
from shardkeep.manage.retention import Policy, plan
from shardkeep.storage.base import Store, Version, free_nbytes
from shardkeep.storage.reread import decode_or_reread

log = logging.getLogger("shardkeep")

SaveKey = tuple[str, str]
"""The name of a checkpoint, and the id of the save that wrote it."""


class ReplicationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that all ranks copy next."""

    name: str
    step: int
    record: bytes
    """The commit record, as it is in the near root."""

    def decoded(self) -> Record:
        """Decode the record."""
        return decode_record(self.record, RECORD_NAME)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What rank 0 keeps of an order until it is carried out."""

    order: ReplicationOrder
    over: Version | None
    """The version of the far record that the commit replaces."""


@dataclass(frozen=True, kw_only=True)
class ReplicationTerms:
    """Which checkpoints are copied to the far root."""

    every: int
    """Steps that are a multiple of it."""
    policy: Policy
    """What is kept in the far root."""
    required: bool
    """Whether the near copy must stay until the far one exists."""


def to_replicate(
    near: Iterable[Entry],
    far: Iterable[Entry],
    policy: Policy,
    now: datetime,
    *,
    every: int = 1,
    left_out: Collection[SaveKey] = (),
    newest: bool = False,
) -> list[Entry]:
    """
    Return the near checkpoints that belong in the far root and are not there, the newest first. A pure function.

    A checkpoint that `policy` would delete from the far root at once is not copied. Others are if their step is a multiple
    of `every`, if they are pinned, or with `newest` if they are the newest, unless they are `left_out`.
    """
    there = {entry.name: entry for entry in far}
    mine = [
        entry
        for entry in newest_first(near)
        if entry.committed and entry.record is not None and (entry.name, entry.save_id) not in left_out
    ]
    due = [entry for at, entry in enumerate(mine) if entry.step % every == 0 or entry.pinned or (newest and at == 0)]
    fresh = {entry.name: entry for entry in due if _may_replace(entry, there.get(entry.name))}
    # Apply the policy to what the far root would have after all copies.
    after = [entry for name, entry in there.items() if name not in fresh]
    kept = {entry.name for entry in plan([*after, *fresh.values()], policy, now).kept}
    return [entry for entry in fresh.values() if entry.name in kept]


def _may_replace(entry: Entry, there: Entry | None) -> bool:
    """Return whether a checkpoint may be put where another one is: only over an older save or a damaged one."""
    if there is None or there.status == "unfinished":
        return True
    if there.problem is not None:
        return isinstance(there.problem, DamagedCheckpoint)
    return there.record is not None and there.save_order < entry.save_order


class ReplicationCoordinator:
    """What rank 0 knows of the far root. Any thread may ask what is there; one thread replicates."""

    def __init__(
        self,
        tiers: Tiers,
        far: Catalog,
        terms: ReplicationTerms,
        lease: Lease,
        near_pruner: Pruner,
        near_locks: CheckpointLocks,
        now: Callable[[], datetime],
    ) -> None:
        """`far` is the far root of `tiers` once more, through a store that stops working when replication is cancelled."""
        if tiers.far is None:  # unreachable: nothing is replicated without a far root
            raise ValueError("there is no far root")
        self.lease = lease
        self.pruner = Pruner(far, terms.policy, lease, CheckpointLocks(), now, resumed=self._resumes)
        self._near, self._far, self._uncancelled_far = tiers.near, far, tiers.far
        self._terms = terms
        self._near_pruner = near_pruner
        self._near_locks = near_locks
        self._now = now
        self._lock = threading.Lock()
        self._there: dict[str, Entry] = {}
        """What the far root has. Only this job changes it, because it holds the lease."""
        self._damaged: set[SaveKey] = set()
        """Saves that are damaged in the near root, and are not tried again."""
        self._to_come: set[str] = set()
        self._unsure: set[str] = set()
        """Near checkpoints that could not be read, so it is not known whether they will be copied."""
        self._partial: set[str] = set()
        """Far checkpoints whose copy may have begun, and is not committed."""
        self._swept = False

    # -- what there is -------------------------------------------------------------------------------------------

    def acquire_root(self) -> list[Entry]:
        """Acquire the lease of the far root, and return what the root has; raise `RootInUse` if another job holds it."""
        self.lease.acquire()
        entries = self._uncancelled_far.entries()
        with self._lock:
            self._there = {entry.name: replace(entry, tier=FAR) for entry in entries if entry.status != "unfinished"}
            return list(self._there.values())

    def distrust(self, names: Collection[str]) -> None:
        """Do not count these far checkpoints as kept, because they could not be restored."""
        self.pruner.distrusted = set(names)

    def has(self, name: str) -> bool:
        """Return whether the far root has a checkpoint of this name."""
        with self._lock:
            return name in self._there

    def is_pinned(self, name: str) -> bool:
        """Return whether the far root has a checkpoint of this name, and it is pinned."""
        return self.has(name) and is_pinned(self._uncancelled_far.root, name)

    def unreplicated(self, near: Sequence[Entry]) -> set[str]:
        """Return the near checkpoints that must stay because they are still to be copied."""
        return {entry.name for entry in self._wanted(near)} if self._terms.required else set()

    def _wanted(self, near: Sequence[Entry], *, newest: bool = False) -> list[Entry]:
        with self._lock:
            there, left_out = list(self._there.values()), set(self._damaged)
        trusted = [entry for entry in near if entry.name not in self._near_pruner.distrusted]
        terms = self._terms
        return to_replicate(
            trusted, there, terms.policy, self._now(), every=terms.every, left_out=left_out, newest=newest
        )

    def _resumes(self, name: str) -> bool:
        return name in self._to_come or name in self._unsure

    # -- one checkpoint ------------------------------------------------------------------------------------------

    def choose(self, held: ExitStack, *, newest: bool) -> Chosen | None:
        """Choose the checkpoint to copy next, and keep it from being deleted while `held` is open."""
        self.lease.check()
        near = self._near.entries()
        wanted = self._wanted(near, newest=newest)
        self._to_come = {entry.name for entry in wanted}
        self._unsure = {entry.name for entry in near if entry.problem is not None and not _is_damage(entry.problem)}
        if not self._swept:  # here, in the background, because a far root may have thousands of directories
            self.pruner.sweep_all()
            self._swept = True
            self._partial = self._to_come | self._unsure  # an earlier job may have begun to copy them
        for entry in wanted:
            self._near_locks.acquire(entry.name)
            held.callback(self._near_locks.release, entry.name)
            # The record must be read after the lock, because until then the checkpoint may be deleted or replaced.
            data = self._record_of(entry)
            if data is None:
                held.close()
                continue
            self._sweep_partial()  # before the free space is checked
            over = self._prepare(entry, self._far.root.place(entry.name), held)
            return Chosen(order=ReplicationOrder(name=entry.name, step=entry.step, record=data), over=over)
        self._sweep_partial()
        return None

    def _sweep_partial(self) -> None:
        """Remove partial copies that will not be continued, because the near checkpoint is gone, replaced or damaged."""
        for name in self._partial - self._to_come - self._unsure:
            self.pruner.sweep_one(name)
            self._partial.discard(name)

    def _record_of(self, entry: Entry) -> bytes | None:
        """Return the near record of an entry; None if it changed since the entry was read."""
        try:
            data, record = _read_record(self._near.root.place(entry.name))
        except DamagedCheckpoint:  # it was readable a moment ago; the next attempt will see it as damaged
            return None
        except BlobNotFound:
            data, record = b"", None
        if record == entry.record:
            return data
        self._to_come.discard(entry.name)
        return None

    def _prepare(self, entry: Entry, place: Store, held: ExitStack) -> Version | None:
        """Check that a checkpoint fits into the far root, and claim its directory there; return the version to replace."""
        over = place.version(RECORD_NAME)
        sizes = {} if entry.record is None else entry.record.at_rest
        there = {info.name: info.nbytes for info in place.list()}
        free = free_nbytes(place)
        wanted = sum(sizes.values()) - sum(nbytes for name, nbytes in there.items() if name in sizes)
        if free is not None and free < wanted:
            raise StorageFull(
                f"{place.url}: the checkpoint takes {wanted:,} bytes, and {free:,} are free there",
                hint="delete checkpoints that are not needed any more, or keep fewer there (keep_promoted)",
                errno=errno.ENOSPC,
            )
        held.enter_context(orphans.holding_claim(entry.save_id))
        place.delete(claim_name(entry.save_id))  # of a job that was cut short
        self._partial.add(entry.name)
        orphans.make_claim(place, entry.save_id)
        return over

    def is_gone(self, order: ReplicationOrder) -> bool:
        """Return whether the near checkpoint was deleted or replaced meanwhile."""
        try:
            return _read_record(self._near.root.place(order.name))[0] != order.record
        except BlobNotFound:
            return True
        except DamagedCheckpoint:
            return False

    def leave_out(self, order: ReplicationOrder) -> None:
        """Do not try this checkpoint again, because the near copy is damaged."""
        with self._lock:
            self._damaged.add((order.name, order.decoded().save_id))
        self._near_pruner.distrusted.add(order.name)

    def commit(self, chosen: Chosen) -> None:
        """Make the copy a checkpoint, once all its files are there; raise `CheckpointExists` if another one is there."""
        order = chosen.order
        record, place = order.decoded(), self._far.root.place(order.name)
        _require_files(place, record)
        pinned = is_pinned(self._near.root, order.name)
        if pinned:
            pin(self._far.root, order.name)
        data = self._current_record(order)
        self.lease.check()
        try:
            place.put(RECORD_NAME, data, over=chosen.over)
        except StorageError as exc:
            if exc.errno != errno.EEXIST:
                raise
            raise CheckpointExists(
                f"{place.url}: another job has committed a checkpoint here meanwhile",
                hint="let only one job promote to a root",
            ) from exc
        _require_record(place, data)
        orphans.discard(place, [claim_name(record.save_id)])
        self._partial.discard(order.name)
        with self._lock:
            self._there[order.name] = replace(
                entry_from_record(order.name, order.step, record, pinned=pinned), tier=FAR
            )

    def _current_record(self, order: ReplicationOrder) -> bytes:
        """Return the near record of the same save: its keys may have been rotated while its files were copied."""
        was = order.decoded()
        try:
            data, now = _read_record(self._near.root.place(order.name))
        except (BlobNotFound, DamagedCheckpoint):
            return order.record
        return data if (now.save_id, now.at_rest) == (was.save_id, was.at_rest) else order.record

    def clean_up(self, order: ReplicationOrder, held: ExitStack) -> None:
        """After a commit: remove what it replaced, and what no policy wants, in both roots. Never raises."""
        place = self._far.root.place(order.name)
        try:
            orphans.discard(place, orphans.deletable(place, orphans.survey(place, self.lease.gone)))
        except Exception as error:  # noqa: BLE001 - a committed copy must not fail because of this
            log.warning("could not remove replaced files in %s: %s", place.url, error)
        with self._lock:
            newest = newest_first(entry for entry in self._there.values() if entry.committed)
        deleted = self.pruner.prune(order.name, latest=newest[0].name)
        with self._lock:
            for name in deleted:
                self._there.pop(name, None)
        held.close()  # the near copy may be deleted from now on
        self._near_pruner.after_replication(order.name)


def _is_damage(problem: CheckpointError) -> bool:
    """Return whether an unreadable record is certainly damaged, and did not just read differently each time."""
    return isinstance(problem, DamagedCheckpoint) and problem.details.get("same_twice") is not False


def _read_record(place: Store) -> tuple[bytes, Record]:
    """Read a commit record and its bytes; a damaged one is read twice."""
    where = f"{place.url}/{RECORD_NAME}"

    def read() -> bytes:
        return place.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)

    return decode_or_reread(read(), lambda data: (data, decode_record(data, where)), read, name=where)


def _require_record(place: Store, data: bytes) -> None:
    """Check that the record is read back as it was written, before the near copy may be deleted."""
    try:
        same = _read_record(place)[0] == data
    except (BlobNotFound, DamagedCheckpoint):
        same = False
    if not same:
        raise StorageError(
            f"{place.url}/{RECORD_NAME} was written, and is not read back as it was",
            hint="the store or its disk changes bytes: look at its log; the near copy is promoted again",
            name=RECORD_NAME,
            errno=errno.EIO,
        )


def _require_files(place: Store, record: Record) -> None:
    """Check that rank 0, too, sees all files with their sizes."""
    listed = {info.name: info.nbytes for info in place.list()}
    for name, nbytes in record.at_rest.items():
        if listed.get(name) == nbytes:
            continue
        try:
            # A network file system may show an old listing; opening a file by name looks again.
            open_sized(place, name, nbytes).close()
        except WrongSize as exc:
            raise StorageError(
                f"{place.url}: {name} of {nbytes} bytes was copied there, and rank 0 does not find it",
                hint="all ranks must see one file system or object store",
                name=name,
            ) from exc
