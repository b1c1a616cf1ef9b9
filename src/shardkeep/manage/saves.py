"""
Which attempt at its steps a job makes, and which steps it may overwrite.

A job that restores step 100 while 200 exists, and goes on from there, saves other steps than those that are there. They
are of a new timeline, which is newer than the old one whatever its numbers: the next `restore_latest` takes 150 of the
new one and not 200 of the old. No clock has a say in this.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from shardkeep.dist.rendezvous import rendezvous
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import SaveReport
from shardkeep.errors import CheckpointError, CheckpointExists, EarlierSaveFailed, StateError, StorageError
from shardkeep.events import Retried, emit
from shardkeep.manage.background import PendingTasks, run_within
from shardkeep.manage.catalog import (
    FAR,
    NEAR,
    Entry,
    Tiers,
    began_after,
    build_meta,
    merge_tiers,
    pinned,
    require_readable,
    restore_order,
)
from shardkeep.manage.decisions import RankContext
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import CheckpointLocks, Pruner
from shardkeep.manage.replicate.coordinator import ReplicationTerms
from shardkeep.manage.replicate.copy import CopyLimits, Throttle
from shardkeep.manage.replicate.replicator import NoReplicator, Replicator
from shardkeep.manage.restore import Candidate, Restored
from shardkeep.manage.retention import Policy
from shardkeep.manage.schedule import Clock
from shardkeep.saving import async_save, save
from shardkeep.storage.base import Root, Store
from shardkeep.storage.retry import RetryingStore, RetryPolicy


@dataclass
class Timeline:
    """Where a job is. Only rank 0 has to know."""

    number: int = 0
    after: int | None = None
    """The step it goes on from; None where nothing was restored."""
    began_after: tuple[int, int] | None = None
    """Which timeline and step it began after; None for the first."""
    saved: set[int] = field(default_factory=set)
    """Steps that it has committed."""

    def may_overwrite(self, step: int) -> bool:
        """Say whether what there is of a step is of a past that this job has gone back from."""
        return self.after is not None and step > self.after and step not in self.saved


def find_timeline(
    entries: Sequence[Entry], restored: tuple[int, int] | None, step: int, *, roots: Sequence[str]
) -> Timeline:
    """
    Find out where a job is that is about to save its first step.

    Args:
        entries: what the root has.
        restored: timeline and step that were restored.
        step: what is to be saved.
        roots: what the roots are called, the nearest first.

    Raises:
        CheckpointExists: nothing was restored, and the root has this step or later ones.
        StateError: the step is before the one that was restored.
        StorageError: a record cannot be read now, which may be of the newest timeline: its number would be used twice.

    """
    where = " and ".join(roots)
    there = [entry for entry in restore_order(require_readable(entries, roots)) if entry.status != "unfinished"]
    highest = max((entry.timeline for entry in there), default=0)
    if restored is None:
        newest = max((entry.step for entry in there), default=-1)
        if step <= newest:
            raise CheckpointExists(
                f"{where} has checkpoints up to step {newest}, this job restored none of them and saves step {step}",
                hint="call restore_latest() or restore(step) first, or choose another root",
            )
        return Timeline(highest, began_after=began_after(there, highest))
    if step < restored[1]:
        raise StateError(
            f"{where}: step {step} is to be saved, and step {restored[1]} was restored",
            hint="count steps over the whole run; to go back, restore an earlier step",
        )
    newer = any(entry.age > restored for entry in there)
    if newer:
        return Timeline(highest + 1, after=restored[1], began_after=restored)
    return Timeline(restored[0], after=restored[1], began_after=began_after(there, restored[0]))


# What rank 0 knows to be wrong with a save before it begins: raised inside it, from where it reaches all ranks.
#
# Raised in the call of rank 0 alone it would leave the others waiting.


def meta_or_refusal(
    meta: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None, timeline: Timeline
) -> Mapping[str, Any]:
    """Put metrics and the timeline to the user's own meta, or refuse the save."""
    try:
        return build_meta(meta, metrics, timeline.number, timeline.began_after)
    except StateError as error:
        return Refused(error)


class Refused(Mapping[str, Any]):
    """Meta that raises when it is looked at: inside the save, from where it reaches all ranks."""

    def __init__(self, error: CheckpointError) -> None:
        self._error = error

    def __getitem__(self, key: str) -> NoReturn:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        return 1


# Stores of the checkpoints of a Checkpointer, which try again what fails in passing, and tell of it.


class CheckpointStores:
    """Where checkpoints are written to and read from."""

    def __init__(
        self, roots: Sequence[Root], retries: int, sleep: Callable[[float], object], lease: Lease, job: RankContext
    ) -> None:
        """
        Open nothing yet.

        Args:
            roots: the near one, and perhaps a far one.
            retries: how often an operation is tried again.
            sleep: waits for so many seconds.
            lease: of the near root, which rank 0 insists on before each commit.
            job: the ranks.

        """
        self._roots = roots
        self._retries = retries
        self._sleep = sleep
        self._lease = lease
        self._job = job

    def to_read(self, candidate: Candidate) -> Store:
        """Return where a checkpoint is read from."""
        place = self._roots[candidate.tier].place(candidate.name)
        # Files of torch's layout may be called, and be links to, anything: their reader knows the plain store.
        return place if candidate.torch else RetryingStore(place, self._patience(place, candidate.step))

    def to_write(self, name: str, step: int) -> Store:
        """Return where the checkpoint of a step is saved."""
        place = self._roots[NEAR].place(name)
        before_put: Callable[[], None] | None = self._lease.insist if self._job.world.rank == 0 else None
        return RetryingStore(place, self._patience(place, step), before_put=before_put)

    def _patience(self, place: Store, step: int) -> RetryPolicy:
        rank = self._job.world.rank

        def told(attempt: int, error: StorageError, wait_s: float) -> None:
            kind, message = type(error).__name__, str(error)
            emit(
                Retried,
                lambda: Retried(
                    rank=rank, where=place.url, step=step, attempt=attempt, kind=kind, message=message, wait_s=wait_s
                ),
            )

        return RetryPolicy(self._retries, told=told, sleep=self._sleep)


# The saves of a Checkpointer: where each goes, what it may overwrite, and what is done before the first and after
# each.

Saved = SaveHandle[SaveReport] | SaveReport
"""A save that goes on, or what one did that is over."""

PINNED = "pinned"
"""In the details of a refusal to overwrite a checkpoint that is pinned."""

_RELEASE_S = 10.0
"""How long giving back the root may take."""

log = logging.getLogger("shardkeep")


class Saves:
    """Saves of one Checkpointer. Used by one thread."""

    def __init__(
        self,
        roots: Sequence[Root],
        tiers: Tiers,
        job: RankContext,
        seams: Clock,
        *,
        policy: Policy,
        terms: ReplicationTerms | None,
        limits: CopyLimits,
        retries: int,
        takeover: bool,
        max_in_flight: int,
        asynchronous: bool,
        raises: bool,
        how: Mapping[str, Any],
        how_asynchronous: Mapping[str, Any],
    ) -> None:
        """
        Begin nothing yet.

        Args:
            roots: where to save, and where to promote to, if anywhere.
            tiers: the same; they, and what is done to roots but for saves, try again what fails in passing.
            job: the ranks.
            seams: clocks and waits.
            policy: what is kept.
            terms: what is promoted; None: nothing is.
            limits: what promotions take of the machine.
            retries: how often an operation of a store is tried again.
            takeover: take the root from another job.
            max_in_flight: how many saves may be under way.
            asynchronous: save while training goes on.
            raises: failures are raised, sooner or later.
            how: arguments of all saves.
            how_asynchronous: more arguments of asynchronous ones.

        """
        self.pending = PendingTasks(raises=raises)
        self._last: tuple[int, Saved | None] | None = None
        """What was restored or saved last, and the save."""
        self._highest: int | None = None
        self._roots = roots
        self._root = roots[NEAR]
        self._tiers = tiers
        self._catalog = tiers.near
        self._job = job
        self._seams = seams
        self._max_in_flight = max_in_flight
        self._asynchronous = asynchronous
        self._how = how
        self._how_asynchronous = how_asynchronous
        leases = [
            Lease(each.root, lasts_s=seams.lease_s, takeover=takeover, clock=seams.clock, sleep=seams.sleep)
            for each in tiers.all
        ]
        self._lease = leases[NEAR]
        self.places = CheckpointStores(roots, retries, seams.sleep, self._lease, job)
        self._in_use = CheckpointLocks()
        self._house = Pruner(tiers.near, policy, self._lease, self._in_use, seams.now)
        self._session = secrets.token_hex(8)
        """Rank 0's is that of all."""
        self._courtesy = Throttle(seams.sleep)
        self.promotions: Replicator | NoReplicator = NoReplicator()
        if terms is not None:
            about_near = self._house, self._in_use
            self.promotions = Replicator(
                roots[FAR], tiers, job, seams, leases[FAR], *about_near, terms, limits, retries, self._courtesy
            )
        self._timeline: Timeline | None = None
        self._restored: Restored | None = None

    def restored(self, restored: Restored) -> None:
        """Go on from a checkpoint."""
        self._restored = restored
        self._timeline = None
        self._last, self._highest = (restored.step, None), restored.step
        self._house.distrusted = {each.name for each in restored.skipped if each.tier == NEAR}
        self.promotions.distrust({each.name for each in restored.skipped if each.tier == FAR})

    def failed(self) -> tuple[list[int], list[int]]:
        """Number the saves, and the rounds of promotions, that have failed by now, on this rank."""
        return self.pending.failed(), self.promotions.failed()

    def end(self, saves: Collection[int], promotions: Collection[int]) -> list[BaseException]:
        """Wait for some to end, and return what went wrong."""
        return self.pending.end(saves) + self.promotions.end(promotions)

    def make_room(self) -> list[BaseException]:
        """Wait until another save may begin, and return what went wrong with those that it waited for."""
        errors = self.pending.end(self.pending.before(self.pending.count - self._max_in_flight + 1))
        # One round of deletes may go on beside a save, so that old checkpoints never pile up; the other ranks wait.
        self._house.catch_up(self._max_in_flight, within_s=self._job.world.timeout_s / 2)
        return errors

    def wait(self) -> list[BaseException]:
        """Wait for all saves, and for what follows them; return what went wrong."""
        errors = self.pending.end(self.pending.before(self.pending.count))
        self._house.wait()
        return errors

    def wait_for(self, saved: Saved) -> None:
        """Wait for a save, and for what follows it; raises what went wrong."""
        if isinstance(saved, SaveHandle):
            for error in self.pending.end([self.pending.count - 1]):
                raise error
        self._house.wait()

    def close(self) -> None:
        """Give back the roots, and end threads."""
        with ExitStack() as ends:  # each, whatever becomes of the others; the last one first
            ends.callback(self.promotions.close)
            ends.callback(run_within, self._lease.release, _RELEASE_S)
            ends.callback(self._house.close)
            ends.callback(self.promotions.stop)  # it uses the near root

    def check(self, step: int) -> None:
        """
        Refuse a step that goes back: it would be older than what is there, and be deleted first.

        Raises:
            StateError: it is below what this job restored or has saved.

        """
        if self._highest is not None and step < self._highest:
            raise StateError(
                f"{self._root.url}: step {step} comes after step {self._highest}, which this job restored or saved",
                hint="count steps over the whole run, not over an epoch; to go back, restore(step) first",
            )

    def is_last(self, step: int) -> bool:
        """Say whether a step was restored or saved last; waits for its save, as one that failed was not saved."""
        if self._last is None or self._last[0] != step:
            return False
        saved = self._last[1]
        return not isinstance(saved, SaveHandle) or saved.outcome() is None

    def begin(self, step: int) -> None:
        """
        Before the first save, and the first after a restore: take the root, sweep it, and find out what it has.

        Raises:
            RootInUse: another job saves to it.
            CheckpointExists: it has this step or later ones, and nothing was restored.

        """
        if self._timeline is not None:
            return
        # Rank 0 may have to outwait the lease of a job that is gone.
        patient = replace(self._job.world, alone_s=2 * self._seams.lease_s)
        with rendezvous(patient, f"begin to save step {step} to {self._root.url}") as meeting:
            found: list[Timeline] = []
            told = meeting.agree("begin", bytes, lambda payloads: self._begin(step, found, payloads))
        # Only now, so that all ranks begin again if one could not.
        self._timeline = next(iter(found), Timeline())
        self.promotions.begin(told.decode())

    @property
    def begun(self) -> bool:
        """Whether `begin` has succeeded since the last restore."""
        return self._timeline is not None

    def _begin(self, step: int, found: list[Timeline], payloads: list[bytes]) -> list[bytes]:
        """On rank 0."""
        self._lease.take()
        far = self.promotions.take_root()
        restored = None if self._restored is None else (self._restored.timeline, self._restored.step)
        found.append(find_timeline(merge_tiers([*self._house.survey(), *far]), restored, step, roots=self._tiers.urls))
        return [self._session.encode()] * len(payloads)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None,
        meta: Mapping[str, Any] | None,
        overwrite: bool,
    ) -> Saved:
        """Save, or begin to, after `begin`."""
        self._last, self._highest = None, step
        timeline = self._timeline or Timeline()
        name = self._catalog.naming.name(step)
        ours: Mapping[str, Any] = meta_or_refusal(meta, metrics, timeline)
        if not overwrite and timeline.may_overwrite(step):
            overwrite = not self._is_pinned(name)
            if not overwrite and self._is_there(step):
                ours = Refused(
                    CheckpointExists(
                        f"{self._root.url}/{name} is pinned, and is not overwritten by a job that has gone back from it",
                        hint=f"unpin({step}), or save(..., overwrite=True)",
                        **{PINNED: True},
                    )
                )
        elif not overwrite and self.promotions.has(name):
            ours = Refused(
                CheckpointExists(
                    f"{self._roots[FAR].url}/{name}: a committed checkpoint is already there",
                    hint="save(..., overwrite=True) replaces it, or choose other roots",
                )
            )
        how = {"step": step, "meta": ours, "overwrite": overwrite, **self._how}
        store = self.places.to_write(name, step)
        first = self._job.world.rank == 0
        if first:
            self._in_use.begin(name)
        elsewhere: EarlierSaveFailed | None = None
        saved: Saved
        try:
            with self._courtesy.in_call():
                if self._asynchronous:
                    saved = async_save(state, store, **how, **self._how_asynchronous)
                else:
                    saved = save(state, store, **how)
        except EarlierSaveFailed as error:  # one that is none of ours
            elsewhere, saved = error, error.response
        except BaseException:
            self.pending.skip()
            self.promotions.skip()
            if first:
                self._in_use.end(name)
            raise
        self._last = step, saved
        if isinstance(saved, SaveHandle):
            self.pending.add(saved)
            self._courtesy.until_end_of(saved)
        if first:
            self._house.after(name, lambda: _ended_well(saved, step, timeline))
        self.promotions.after(saved)
        if elsewhere is not None:
            raise elsewhere
        return saved

    def _is_there(self, step: int) -> bool:
        try:
            if self.promotions.has(self._catalog.naming.name(step)):
                return True
            found = self._catalog.find(step)
        except CheckpointError as error:
            log.warning("%s: cannot look for step %d: %s", self._root.url, step, error)
            return True
        return found is not None and found.status != "unfinished"

    def _is_pinned(self, name: str) -> bool:
        try:
            return self.promotions.is_pinned(name) or name in pinned(self._catalog.root)
        except CheckpointError as error:
            log.warning("%s: cannot look for pins: %s", self._root.url, error)
            return True


def _ended_well(saved: Saved, step: int, timeline: Timeline) -> bool:
    """Wait for a save, and say whether it is committed."""
    error = saved.outcome() if isinstance(saved, SaveHandle) else None
    if error is None:
        timeline.saved.add(step)
    elif isinstance(saved, SaveHandle):  # said now, as nobody may ask before the next save
        log.error("an asynchronous save, to %s, failed: %s", saved.where, error, exc_info=error)
    return error is None
