"""Which checkpoints are still to be promoted: a pure function of what the two roots have."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec

from shardkeep.engine.coordinator import discard
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
from shardkeep.layouts import orphans as leftovers
from shardkeep.layouts.native import claim_name, read_record
from shardkeep.manage.catalog import (
    FAR,
    Catalog,
    Entry,
    Tiers,
    entry_from_record,
    is_pinned,
    newest_first,
    pin,
    save_order,
)
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import CheckpointLocks, Pruner
from shardkeep.manage.replicate.copy import open_sized
from shardkeep.manage.retention import Policy, plan
from shardkeep.storage.base import Store, Version, free_nbytes
from shardkeep.storage.reread import decode_or_reread

SaveKey = tuple[str, str]
"""A place, and the id of a save in it."""


def save_key(entry: Entry) -> SaveKey:
    """Say which save an entry is."""
    return entry.name, "" if entry.record is None else entry.record.save_id


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
    Name the near checkpoints that are to be in the far root and are not, the newest first.

    Args:
        near: what the near root has.
        far: what the far root has.
        policy: what is kept there: what it would delete at once is not promoted.
        now: with its time zone.
        every: only steps that are a multiple of it, and those that are pinned.
        left_out: saves that cannot be promoted.
        newest: the newest one as well, whatever its step.

    """
    there = {entry.name: entry for entry in far}
    mine = [
        entry
        for entry in newest_first(near)
        if entry.committed and entry.record is not None and save_key(entry) not in left_out
    ]
    due = [entry for at, entry in enumerate(mine) if entry.step % every == 0 or entry.pinned or (newest and at == 0)]
    fresh = {entry.name: entry for entry in due if _may_replace(entry, there.get(entry.name))}
    # What the far root would have after all promotions: whatever of that goes at once need not come first.
    after = [entry for name, entry in there.items() if name not in fresh]
    kept = {entry.name for entry in plan([*after, *fresh.values()], policy, now).kept}
    return [entry for entry in fresh.values() if entry.name in kept]


def _may_replace(entry: Entry, there: Entry | None) -> bool:
    """Tell whether a checkpoint is to be put where another one is, perhaps: only an older save or a damaged one goes."""
    if there is None or there.status == "unfinished":
        return True
    if there.problem is not None:
        return isinstance(there.problem, DamagedCheckpoint)
    return there.record is not None and save_order(there) < save_order(entry)


# Rank 0's part of promotions: what is to be copied to the far root, and when it exists there.
#
# A checkpoint is committed in the far root as it was in the near one: after all of its files, by its record, the very
# same
# bytes, put where none was or over the version that was seen. Until then nobody takes it for a checkpoint, and what
# is
# there of it is left for a later promotion to go on with.

log = logging.getLogger("shardkeep")


class ReplicationOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells all ranks to promote."""

    name: str
    step: int
    record: bytes
    """As it is in the near root."""

    def decoded(self) -> Record:
        """Read the record."""
        return decode_record(self.record, RECORD_NAME)


@dataclass(frozen=True, kw_only=True)
class ReplicationTerms:
    """What is promoted."""

    every: int
    """Steps that are a multiple of it."""
    policy: Policy
    """What is kept there."""
    required: bool
    """Whether the near copy stays until it is promoted."""


class ReplicationCoordinator:
    """What rank 0 knows of the far root. What there is may be asked by any thread; one thread promotes."""

    def __init__(
        self,
        tiers: Tiers,
        far: Catalog,
        terms: ReplicationTerms,
        lease: Lease,
        near_house: Pruner,
        near_in_use: CheckpointLocks,
        now: Callable[[], datetime],
    ) -> None:
        """
        Begin nothing yet.

        Args:
            tiers: both roots.
            far: the far one again, as promotions see it: once they are cancelled, it does nothing for them.
            terms: what is promoted.
            lease: of the far root.
            near_house: keeps the near root in order, and waits for promotions with that.
            near_in_use: places of the near root that must not be deleted.
            now: tells the time, with its zone.

        """
        if tiers.far is None:  # unreachable: without a far root nobody promotes
            raise ValueError("there is no far root")
        self.lease = lease
        self.house = Pruner(far, terms.policy, lease, CheckpointLocks(), now)
        self.house.resumes = self._resumes
        self._near, self._far, self._whole_far = tiers.near, far, tiers.far
        self._terms = terms
        self._near_house = near_house
        self._near_in_use = near_in_use
        self._now = now
        near_house.spares = self.unpromoted
        self._lock = threading.Lock()
        # Only this job changes the far root: it has the lease.
        self._there: dict[str, Entry] = {}
        self._given_up: set[SaveKey] = set()
        self._to_come: set[str] = set()
        self._unsure: set[str] = set()
        """Near places of which nobody knows now whether they are to be promoted: they could not be read."""
        self._half: set[str] = set()
        """Far places in which a promotion was begun, perhaps, that is not committed."""
        self._swept = False
        self._seen: Version | None = None
        self._standing = ExitStack()

    # -- what there is -------------------------------------------------------------------------------------------

    def begin(self) -> list[Entry]:
        """
        Take the far root, and see what it has.

        Raises:
            RootInUse: another job promotes or saves to it.

        """
        self.lease.take()
        entries = self._whole_far.entries()
        with self._lock:
            self._there = {entry.name: replace(entry, tier=FAR) for entry in entries if entry.status != "unfinished"}
        return list(self._there.values())

    def has(self, name: str) -> bool:
        """Say whether the far root has a checkpoint of this name."""
        with self._lock:
            return name in self._there

    def is_pinned(self, name: str) -> bool:
        """Say whether the far root has one, and it is pinned."""
        return self.has(name) and is_pinned(self._whole_far.root, name)

    def unpromoted(self, near: Sequence[Entry]) -> set[str]:
        """Name the near checkpoints that must stay, as they are still to be promoted."""
        return {entry.name for entry in self._wanted(near)} if self._terms.required else set()

    def _wanted(self, near: Sequence[Entry], *, newest: bool = False) -> list[Entry]:
        with self._lock:
            there, left_out = list(self._there.values()), set(self._given_up)
        trusted = [entry for entry in near if entry.name not in self._near_house.distrusted]
        terms = self._terms
        return to_replicate(
            trusted, there, terms.policy, self._now(), every=terms.every, left_out=left_out, newest=newest
        )

    def _resumes(self, name: str) -> bool:
        return name in self._to_come or name in self._unsure

    # -- one promotion -------------------------------------------------------------------------------------------

    def choose(self, *, newest: bool) -> bytes:
        """Say what is to be promoted next, and keep it from being deleted until `end`; nothing where all is there."""
        self.lease.insist()
        near = self._near.entries()
        wanted = self._wanted(near, newest=newest)
        self._to_come = {entry.name for entry in wanted}
        self._unsure = {entry.name for entry in near if entry.problem is not None and not _is_damage(entry.problem)}
        if not self._swept:  # here, in the background: a far root may have thousands of places
            self.house.survey()
            self._swept = True
            self._half = self._to_come | self._unsure  # by an earlier job, perhaps
        for entry in wanted:
            self._near_in_use.begin(entry.name)
            self._standing.callback(self._near_in_use.end, entry.name)
            # Only now: before, it may have been deleted, or replaced.
            data = self._record_of(entry)
            if data is None:
                self._standing.close()
                continue
            self._sweep_half()  # before room is looked for
            self._prepare(entry, self._far.root.place(entry.name))
            return msgspec.msgpack.encode(ReplicationOrder(name=entry.name, step=entry.step, record=data))
        self._sweep_half()
        return b""

    def _sweep_half(self) -> None:
        """Remove what was copied of near checkpoints that went, were replaced, or are damaged: nobody goes on with it."""
        for name in self._half - self._to_come - self._unsure:
            self.house.sweep_at(name)
            self._half.discard(name)

    def _record_of(self, entry: Entry) -> bytes | None:
        """Return the record of an entry as it is in its place; None where it is not there now."""
        try:
            data, record = _record_at(self._near.root.place(entry.name))
        except DamagedCheckpoint:  # and was not a moment ago: the next one to look will know
            return None
        except BlobNotFound:
            data, record = b"", None
        if record == entry.record:
            return data
        self._to_come.discard(entry.name)
        return None

    def _prepare(self, entry: Entry, place: Store) -> None:
        """Say in the far place who writes there, and that it all fits."""
        if entry.record is None:  # unreachable: others are not promoted
            return
        self._seen = place.version(RECORD_NAME)
        sizes = entry.record.at_rest
        there = {info.name: info.nbytes for info in place.list()}
        free = free_nbytes(place)
        wanted = sum(sizes.values()) - sum(nbytes for name, nbytes in there.items() if name in sizes)
        if free is not None and free < wanted:
            raise StorageFull(
                f"{place.url}: the checkpoint takes {wanted:,} bytes, and {free:,} are free there",
                hint="delete checkpoints that are needed no more, or keep fewer there (keep_promoted)",
                errno=errno.ENOSPC,
            )
        save_id = entry.record.save_id
        self._standing.enter_context(leftovers.holding_claim(save_id))
        if claim_name(save_id) in there:  # of the job that was cut short; the lease says that it is over
            leftovers.sweep_uploads_of(place, [save_id])
        place.delete(claim_name(save_id))
        self._half.add(entry.name)
        leftovers.make_claim(place, save_id)

    def is_gone(self, order: ReplicationOrder) -> bool:
        """Say whether the near checkpoint was deleted or replaced meanwhile."""
        try:
            return _record_at(self._near.root.place(order.name))[0] != order.record
        except BlobNotFound:
            return True
        except DamagedCheckpoint:
            return False

    def give_up(self, order: ReplicationOrder) -> None:
        """Do not try this one again: the near copy is damaged."""
        with self._lock:
            self._given_up.add((order.name, order.decoded().save_id))
        self._near_house.distrusted.add(order.name)

    def commit(self, order: ReplicationOrder) -> None:
        """
        Make the copy a checkpoint, once all of its files are there.

        Raises:
            CheckpointExists: somebody else committed there meanwhile.

        """
        record, place = order.decoded(), self._far.root.place(order.name)
        _require_files(place, record)
        pinned = is_pinned(self._near.root, order.name)
        if pinned:
            pin(self._far.root, order.name)
        data = self._as_it_is_now(order)
        self.lease.insist()
        try:
            place.put(RECORD_NAME, data, over=self._seen)
        except StorageError as exc:
            if exc.errno != errno.EEXIST:
                raise
            raise CheckpointExists(
                f"{place.url}: a checkpoint was committed here by somebody else meanwhile",
                hint="let only one job promote to a root",
            ) from exc
        _require_record(place, data)
        discard(place, [claim_name(record.save_id)])
        self._half.discard(order.name)
        with self._lock:
            self._there[order.name] = replace(
                entry_from_record(order.name, order.step, record, pinned=pinned), tier=FAR
            )

    def _as_it_is_now(self, order: ReplicationOrder) -> bytes:
        """Return the near record of the same save: its keys may have been rotated while its files were copied."""
        was = order.decoded()
        try:
            data, now = _record_at(self._near.root.place(order.name))
        except (BlobNotFound, DamagedCheckpoint):
            return order.record
        return data if (now.save_id, now.at_rest) == (was.save_id, was.at_rest) else order.record

    def tidy(self, order: ReplicationOrder) -> None:
        """After a commit: remove what it replaced, and what no policy wants, in both roots. Never raises."""
        place = self._far.root.place(order.name)
        try:
            found = leftovers.survey(place, self.lease.gone)
            kept = {*read_record(place).names}
            discard(place, [name for name in found.dead + found.ended if name not in kept])
        except Exception as error:  # noqa: BLE001 - what is committed has not failed because of this
            log.warning("could not remove replaced files in %s: %s", place.url, error)
        with self._lock:
            newest = newest_first(entry for entry in self._there.values() if entry.committed)
        removed = self.house.tidy_up(order.name, latest=newest[0].name)
        with self._lock:
            for name in removed:
                self._there.pop(name, None)
        self.end()
        self._near_house.after_promotion(order.name)

    def end(self) -> None:
        """Let go of what `choose` held, whatever became of it."""
        self._standing.close()


def _is_damage(problem: CheckpointError) -> bool:
    """Say whether a record that could not be read is certainly damaged: not where it came out different each time."""
    return isinstance(problem, DamagedCheckpoint) and problem.details.get("same_twice") is not False


def _record_at(place: Store) -> tuple[bytes, Record]:
    """Read a commit record, and its bytes; one that comes damaged is read again."""
    where = f"{place.url}/{RECORD_NAME}"

    def read() -> bytes:
        return place.get(RECORD_NAME, limit=MAX_RECORD_NBYTES)

    return decode_or_reread(read(), lambda data: (data, decode_record(data, where)), read, name=where)


def _require_record(place: Store, data: bytes) -> None:
    """Look whether the record that was put is what is there; before the near copy may go."""
    try:
        same = _record_at(place)[0] == data
    except (BlobNotFound, DamagedCheckpoint):
        same = False
    if not same:
        raise StorageError(
            f"{place.url}/{RECORD_NAME} was written, and is not read back as it was",
            hint="the store or its disk changes bytes: look at its log; the near copy is promoted anew",
            name=RECORD_NAME,
            errno=errno.EIO,
        )


def _require_files(place: Store, record: Record) -> None:
    """Look whether rank 0, too, sees all files, with their sizes."""
    listed = {info.name: info.nbytes for info in place.list()}
    for name, nbytes in record.at_rest.items():
        if listed.get(name) == nbytes:
            continue
        try:
            # A network file system may list what was there a while ago; asked for by name it looks again.
            open_sized(place, name, nbytes).close()
        except WrongSize as exc:
            raise StorageError(
                f"{place.url}: {name} of {nbytes} bytes was copied there, and rank 0 does not find it",
                hint="all ranks must see one file system or object store",
                name=name,
            ) from exc
