"""
Copies checkpoints to a far root in the background, by all ranks together, without slowing training down.

Each save is followed by a *round* on a thread of each rank; all ranks run the same rounds in the same order. In a round,
rank 0 chooses the checkpoint to copy next, the newest first, each rank copies its share of the files, rank 0 commits, and
so on until nothing is left. This also continues what an earlier job or round could not finish. A copy is committed as the
near checkpoint was: after all its files, by the very same bytes of its commit record, put where there was none or over the
version that was seen. If the near copy is damaged, the error names the near root, and other checkpoints are still copied.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any

import msgspec

from shardkeep import errors
from shardkeep.display import format_count, format_seconds, format_size
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.team import Team
from shardkeep.dist.world import World
from shardkeep.engine.native_save import first_missing
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import CommonMoment, Phases, SentPhases, seconds_by_name
from shardkeep.events import PromotionBegan, PromotionFailed, PromotionFinished, RankPhases, emit
from shardkeep.format.record import RECORD_NAME, Record, decode_record
from shardkeep.layouts import orphans
from shardkeep.layouts.native import claim_name, read_record, record_and_bytes_in
from shardkeep.manage.catalog import LATEST_NAME, Catalog, KnownEntries, Tiers, is_pinned, pin
from shardkeep.manage.decisions import PendingTasks, RankContext, at_exit
from shardkeep.manage.entry import FAR, NEAR, Entry, newest_first, with_record
from shardkeep.manage.file_copy import copy_files, throttle
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import Pruner
from shardkeep.manage.retention import Policy, plan
from shardkeep.manage.schedule import Clock
from shardkeep.options import Options, decodable
from shardkeep.storage.base import Root, Store, Version, free_nbytes, put_if_unchanged
from shardkeep.storage.cancel import run_with_deadline, spawn_daemon
from shardkeep.storage.retry import RetryingStore, RetryPolicy

log = logging.getLogger("shardkeep")

SaveKey = tuple[str, str]
"""The name of a checkpoint, and the id of the save that wrote it."""


class ReplicationOrder(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    step: int
    record: bytes

    def decoded(self) -> Record:
        return decode_record(self.record, RECORD_NAME)


@dataclass(frozen=True, kw_only=True)
class ReplicationTerms:
    every: int
    policy: Policy
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
    """Return the near checkpoints that belong in the far root and are not there, the newest first. A pure function."""
    # Those whose step is a multiple of `every`, pinned ones, and with `newest` the newest, unless they are `left_out`, or
    # `policy` would delete them from the far root at once.
    there = {entry.name: entry for entry in far}
    mine = [
        entry
        for entry in newest_first(near)
        if entry.committed and entry.save_id and (entry.name, entry.save_id) not in left_out
    ]
    due = [entry for at, entry in enumerate(mine) if entry.step % every == 0 or entry.pinned or (newest and at == 0)]

    def may_copy(entry: Entry, over: Entry | None) -> bool:
        """Return whether a checkpoint may be put where another one is: only over an older save or a damaged one."""
        if over is None or over.status == "unfinished":
            return True
        if over.problem is not None:
            return isinstance(over.problem, errors.DamagedCheckpoint)
        return bool(over.save_id) and over.save_order < entry.save_order

    fresh = {entry.name: entry for entry in due if may_copy(entry, there.get(entry.name))}
    # Apply the policy to what the far root would have after all copies.
    after = [entry for name, entry in there.items() if name not in fresh]
    kept = {entry.name for entry in plan([*after, *fresh.values()], policy, now).kept}
    return [entry for entry in fresh.values() if entry.name in kept]


class ReplicationCoordinator:
    """What rank 0 knows of the far root. Any thread may ask what is there; one thread replicates."""

    def __init__(
        self, tiers: Tiers, far: Catalog, terms: ReplicationTerms, lease: Lease, near_pruner: Pruner, clock: Clock
    ) -> None:
        """`far` is the far root of `tiers` once more, through a store that stops working when replication is cancelled."""
        self.lease = lease
        resumed = lambda name: name in self._to_come or name in self._unsure  # noqa: E731
        self.pruner = Pruner(far, terms.policy, lease, clock.now, resumed=resumed)
        self._near, self._far, self._uncancelled_far = tiers.near, far, tiers.all[FAR]
        self.near_known = KnownEntries(tiers.near)
        self._terms, self._now, self._near_pruner = terms, clock.now, near_pruner
        self._lock = threading.Lock()
        self._there: dict[str, Entry] = {}
        """What the far root has. Only this job changes it, because it holds the lease."""
        self._damaged: set[SaveKey] = set()  # saves that are damaged in the near root, and are not tried again
        self._to_come: set[str] = set()
        self._unsure: set[str] = set()
        """Near checkpoints that could not be read, so it is not known whether they will be copied."""
        self._partial: set[str] = set()  # far checkpoints whose copy may have begun, and is not committed
        self._swept = False

    def acquire_root(self) -> None:
        """Acquire the lease of the far root, and list it; raise `RootInUse` if another job holds it."""
        self.lease.acquire()
        entries = self._uncancelled_far.entries()
        with self._lock:
            self._there = {
                entry.name: replace(entry, tier=FAR, record=None) for entry in entries if entry.status != "unfinished"
            }

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._there

    def is_pinned(self, name: str) -> bool:
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

    def choose(self, held: ExitStack, *, newest: bool) -> tuple[ReplicationOrder, Version | None] | None:
        """Choose what to copy next, which stays while `held` is open; also return the far record's version to replace."""
        self.lease.check()
        near = self.near_known.look()
        wanted = self._wanted(near, newest=newest)
        self._to_come = {entry.name for entry in wanted}
        self._unsure = {
            entry.name
            for entry in near
            if entry.problem is not None
            # A record that read differently each time is not certainly damaged.
            and not (
                isinstance(entry.problem, errors.DamagedCheckpoint) and entry.problem.details.get("same_twice", True)
            )
        }
        if not self._swept:  # here, in the background, because a far root may have thousands of directories
            for _ in self.pruner.sweeping():
                pass
            self._swept = True
            self._partial = self._to_come | self._unsure  # an earlier job may have begun to copy them
        for entry in wanted:
            self._near_pruner.locks.acquire(entry.name)
            held.callback(self._near_pruner.locks.release, entry.name)
            # The record must be read after the lock, because until then the checkpoint may be deleted or replaced.
            found = self._record_of(entry)
            if found is None:
                held.close()
                continue
            self._sweep_partial()  # before the free space is checked
            over = self._prepare(entry, found[0], self._far.root.place(entry.name), held)
            return ReplicationOrder(name=entry.name, step=entry.step, record=found[1]), over
        self._sweep_partial()
        return None

    def _sweep_partial(self) -> None:
        """Remove partial copies that will not be continued, because the near checkpoint is gone, replaced or damaged."""
        for name in self._partial - self._to_come - self._unsure:
            self.pruner.sweep_one(name)
            self._partial.discard(name)

    def _record_of(self, entry: Entry) -> tuple[Record, bytes] | None:
        """Return the near record of an entry, and its bytes; None if it is of another save by now."""
        try:
            found = record_and_bytes_in(self._near.root.place(entry.name))
            if found[0].save_id == entry.save_id:
                return found
            self._to_come.discard(entry.name)
        except errors.DamagedCheckpoint:
            pass  # it was readable before; the next attempt will see it as damaged
        except errors.BlobNotFound:
            self._to_come.discard(entry.name)
        self.near_known.forget(entry.name)
        return None

    def _prepare(self, entry: Entry, record: Record, place: Store, held: ExitStack) -> Version | None:
        """Check that a checkpoint fits into the far root, and claim its directory there; return the version to replace."""
        over = place.version(RECORD_NAME)
        sizes = record.at_rest
        there = {info.name: info.nbytes for info in place.list()}
        free = free_nbytes(place)
        wanted = sum(sizes.values()) - sum(nbytes for name, nbytes in there.items() if name in sizes)
        if free is not None and free < wanted:
            raise errors.StorageFull(
                f"{place.url}: the checkpoint takes {format_size(wanted)}, and {format_size(free)} are free there",
                hint="delete checkpoints that are not needed any more, or keep fewer there (keep_promoted)",
                errno=errno.ENOSPC,
            )
        held.enter_context(orphans.holding_claim(entry.save_id))
        place.delete(claim_name(entry.save_id))  # of a job that was cut short
        self._partial.add(entry.name)
        orphans.make_claim(place, entry.save_id)
        return over

    def leave_out(self, order: ReplicationOrder) -> bool:
        """Do not try a damaged checkpoint again; return False if it was only deleted or replaced meanwhile."""
        with suppress(errors.DamagedCheckpoint):
            try:
                if record_and_bytes_in(self._near.root.place(order.name))[1] != order.record:
                    return False
            except errors.BlobNotFound:
                return False
        with self._lock:
            self._damaged.add((order.name, order.decoded().save_id))
        self._near_pruner.distrusted.add(order.name)
        return True

    def commit(self, order: ReplicationOrder, over: Version | None) -> None:
        """Make the copy a checkpoint, once all its files are there, unless there is another one: `CheckpointExists`."""
        record, place = order.decoded(), self._far.root.place(order.name)
        if (name := first_missing(place, record.at_rest)) is not None:
            raise errors.StorageError(
                f"{place.url}: {name} of {record.at_rest[name]} bytes was copied there, and rank 0 does not find it",
                hint="all ranks must see one file system or object store",
                name=name,
            )
        pinned = is_pinned(self._near.root, order.name)
        if pinned:
            pin(self._far.root, order.name)
        data = order.record
        with suppress(errors.BlobNotFound, errors.DamagedCheckpoint):
            # Its keys may have been rotated while its files were copied.
            now, latest = record_and_bytes_in(self._near.root.place(order.name))
            data = latest if (now.save_id, now.at_rest) == (record.save_id, record.at_rest) else data
        entry = Entry(name=order.name, step=order.step, status="committed", pinned=pinned, tier=FAR)
        entry = replace(with_record(entry, record), record=None)
        with self._lock:
            newest_timeline = max((each.timeline for each in self._there.values()), default=0)
        self.lease.check()
        if entry.timeline > newest_timeline:  # see `Walk`
            self._far.root.delete(LATEST_NAME)
        if not put_if_unchanged(place, RECORD_NAME, data, over):
            raise errors.CheckpointExists(
                f"{place.url}: another job has committed a checkpoint here meanwhile",
                hint="let only one job promote to a root",
            )
        _require_record(place, data)
        orphans.discard(place, [claim_name(record.save_id)])
        self._partial.discard(order.name)
        with self._lock:
            self._there[order.name] = entry

    def clean_up(self, order: ReplicationOrder, held: ExitStack) -> None:
        """After a commit: remove what it replaced, and what no policy wants, in both roots. Never raises."""
        place = self._far.root.place(order.name)
        try:
            found = orphans.survey(place, self.lease.gone)
            kept = {*read_record(place).names}  # raises if the record is not visible yet: nothing must be deleted then
            orphans.discard(place, [name for name in found.dead + found.ended if name not in kept])
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


def _require_record(place: Store, data: bytes) -> None:
    """Check that the record is read back as it was written, before the near copy may be deleted."""
    try:
        same = record_and_bytes_in(place)[1] == data
    except (errors.BlobNotFound, errors.DamagedCheckpoint):
        same = False
    if not same:
        raise errors.StorageError(
            f"{place.url}/{RECORD_NAME} was written, and is not read back as it was",
            hint="the store or its disk changes bytes: look at its log; the near copy is promoted again",
            name=RECORD_NAME,
            errno=errno.EIO,
        )


GRACE_S = 3.0
"""How long cancelled work may take to end, and the far lease to be released, before both are left to themselves."""


@decodable
class _Share(msgspec.Struct, frozen=True, kw_only=True):
    copied: int = 0
    files: int = 0
    damage: str = ""
    """What is wrong with the near copy; of all shares: it was deleted or replaced meanwhile."""
    spans: SentPhases = []


class Replicator:
    def __init__(
        self,
        root: Root,
        tiers: Tiers,
        ranks: RankContext,
        near_pruner: Pruner,
        terms: ReplicationTerms,
        *,
        lease: Lease,
        options: Options,
        retry_policy: RetryPolicy,
        is_saving: Callable[[], bool],
    ) -> None:
        """`root` is the far root without retries, and `lease` its lease."""
        self._running_round = 0
        self._begun = self._cancelled_before = 0  # of rounds: how many were begun, and those below it are cancelled
        retrying = RetryingStore(root, replace(retry_policy, wanted=self._is_wanted))
        far = Catalog(retrying, tiers.near.naming.template)
        self.coordinator = ReplicationCoordinator(tiers, far, terms, lease, near_pruner, ranks.clock)  # rank 0's part
        self.rounds = PendingTasks()
        self._catalogs = tiers.near, far
        self._urls = tiers.urls
        self._ranks = ranks
        self._options = options
        self._pause = partial(throttle, is_saving, ranks.clock.sleep)
        self._near_pruner = near_pruner
        self._world: World | None = None  # the ranks, once `begin` was called
        self._futures: list[Future[None]] = []
        self._stopped = False
        self._abandoned = False  # whether a round was still running when all were stopped

    def begin(self, session: str) -> None:
        """Begin, once this job holds the far root, with what earlier jobs could not finish."""
        if self._world is not None:
            return
        world = self._ranks.world.with_prefix(f"promotions/{session}")
        # Ranks only wait for each other here, and rank 0 reads both roots while the others wait.
        self._world = replace(world, alone_s=world.timeout_s)
        at_exit(self._leave)
        self.after(None)

    def after(self, saved: Any, name: str = "", *, newest: bool = False) -> None:
        """Begin a round once a save of this name has ended; `newest`: copy the newest checkpoint whatever its step."""
        if self._world is None or self._stopped:
            return
        # A daemon thread: Python does not wait for it at exit, so that a store that does not answer cannot block the exit.
        arguments = (self.rounds.count, self._futures[-1:], saved, name, newest, self._world)
        self._begun = self.rounds.count + 1  # before the thread begins: `cancel` may come from it
        try:
            future = spawn_daemon(partial(self._run_round, *arguments), "shardkeep-promote")
        except RuntimeError as error:  # the interpreter is shutting down
            log.warning("%s: the next job continues with promotions: %s", self._urls[FAR], error)
            self.rounds.skip()
            return
        self.rounds.add(future)
        self._futures = [each for each in self._futures if not each.done()] + [future]

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:
        """Wait for all rounds that `stop` has not abandoned, and for the deletes after them; return their errors."""
        found: list[BaseException] = []
        if not self._abandoned:
            if futures.wait(self._futures, timeout_s).not_done:
                raise TimeoutError(f"not all checkpoints were promoted to {self._urls[FAR]} within {timeout_s:g} s")
            found = self.rounds.end_all()
        self._near_pruner.wait()
        return found

    def finish(self, timeout_s: float | None, *, newest: bool) -> list[BaseException]:
        """Wait for all rounds, with the newest checkpoint if wanted, and cancel them when the time is up."""
        if newest:
            self.after(None, newest=True)
        try:
            return self.wait(timeout_s)
        except TimeoutError as late:
            log.warning("%s; the next job continues with them", late)
            self.cancel()
            self.stop()
            return self.wait()

    def cancel(self) -> None:
        """Cancel all rounds that were begun; a later round finds what was copied."""
        self._cancelled_before = self._begun

    def stop(self) -> None:
        """Begin no more rounds, and wait a little for cancelled ones; one that waits for the store is abandoned."""
        self._stopped = True
        if not self._abandoned and futures.wait(self._futures, GRACE_S).not_done:
            self._abandoned = True
            log.warning("%s does not answer: the request to it is abandoned", self._urls[FAR])

    def close(self) -> None:
        """Stop, and release the far root. If it does not answer, its lease expires."""
        try:
            self.stop()
            self.coordinator.pruner.close()
        finally:
            run_with_deadline(self.coordinator.lease.release, "shardkeep-release", GRACE_S)

    def _leave(self) -> None:
        self.cancel()
        self.close()

    def _is_wanted(self) -> bool:
        return self._running_round >= self._cancelled_before

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise errors.SaveCancelled(f"promotions to {self._urls[FAR]} were cancelled")

    def _run_round(
        self, number: int, before: Sequence[Future[None]], saved: Any, name: str, newest: bool, world: World
    ) -> None:
        futures.wait(before)
        self._running_round = number
        if isinstance(saved, SaveHandle):
            saved.outcome()
        self.coordinator.near_known.forget(name)  # it may have been overwritten
        damaged: errors.NotPromoted | None = None
        for turn in count():
            try:
                if not self._copy_next(f"{number}.{turn}", newest=newest, world=world):
                    break
            except errors.SaveCancelled:
                log.info("promotions to %s were cancelled", self._urls[FAR])
                return
            except Exception as error:
                if self._abandoned:  # the far root was released, and no caller waits for this round
                    log.info("a cancelled promotion to %s has ended: %s", self._urls[FAR], error)
                    return
                intact = "they are intact, and are tried again after the next save, or by the next job"
                failed = errors.NotPromoted(
                    f"checkpoints of {self._urls[NEAR]} could not be promoted to {self._urls[FAR]}: "
                    + (error.message if isinstance(error, errors.CheckpointError) else repr(error)),
                    hint=error.hint if isinstance(error, errors.NearCopyDamaged) else intact,
                )
                if world.rank == 0:  # now, because the next save that would report it may be far away
                    log.error("%s", failed, exc_info=error)  # noqa: TRY400 - the error is given
                if not isinstance(error, errors.NearCopyDamaged):
                    raise failed from error
                failed.__cause__, damaged = error, damaged or failed  # go on with other checkpoints
        if damaged is not None:
            raise damaged

    def _copy_next(self, title: str, *, newest: bool, world: World) -> bool:
        """Copy one checkpoint, together with all ranks; return False if there is none to copy."""
        phases, order, chosen_s = Phases(), None, 0.0
        over: Version | None = None
        with ExitStack() as held:

            def choose() -> list[ReplicationOrder]:
                nonlocal over
                found, over = self.coordinator.choose(held, newest=newest) or (None, None)
                return [found] if found else []

            try:
                with rendezvous(world, f"promotion {title} to {self._urls[FAR]}") as meeting:
                    team = Team(world, meeting)
                    self._check_wanted()
                    orders = team.on_rank_0("choose", choose, list[ReplicationOrder])
                    if not orders:
                        return False
                    [order] = orders
                    met = phases.met()
                    phases.add("choose", 0.0, chosen_s := met.at_s)
                    if self._copy_together(team, order, over, met) and team.leads:
                        self.coordinator.clean_up(order, held)
            except BaseException as error:
                if order is not None or not isinstance(error, errors.SaveCancelled):
                    self._report_failure(order, error, phases.now() - chosen_s, world.rank)
                raise
        return True

    def _copy_together(self, team: Team, order: ReplicationOrder, over: Version | None, met: CommonMoment) -> bool:
        """Copy and commit one checkpoint; return False if the near copy is gone."""
        phases, ranks = met.phases, list[RankPhases]()
        record, about, began_s = order.decoded(), self._about(order, team.world.rank), phases.now()
        total, files = record.stored_nbytes, len(record.at_rest)
        emit(PromotionBegan, partial(PromotionBegan, **about, bytes_total=total))
        answer = team.meeting.agree(
            "copy",
            lambda: self._copy_share(order, record, met, team),
            lambda shares: self._commit(order, over, met, shares, ranks),
        )
        outcome, seconds = msgspec.msgpack.decode(answer, type=_Share), phases.now() - began_s
        if outcome.damage:
            gone = errors.SaveCancelled(f"{about['source']} was deleted or replaced meanwhile, and is not promoted")
            log.info("%s", gone)
            self._report_failure(order, gone, seconds, team.world.rank)
            return False
        emit(
            PromotionFinished,
            lambda: PromotionFinished(
                **about,
                bytes_total=total,
                bytes_copied=outcome.copied,
                seconds=seconds,
                called_s=phases.called_s,
                files_total=files,
                files_copied=outcome.files,
                ranks=phases.all_ranks(ranks),
            ),
        )
        if team.leads:
            found = f", {format_size(total - outcome.copied)} of them were there" if outcome.copied < total else ""
            what = f"{format_size(total)} in {format_count(files, 'file')}{found}, {format_seconds(seconds)}"
            took = ", ".join(f"{name} {format_seconds(s)}" for name, s in seconds_by_name(phases.spans).items())
            log.info("%s is promoted to %s: %s (%s)", about["source"], about["where"], what, took)
        return True

    def _copy_share(self, order: ReplicationOrder, record: Record, met: CommonMoment, team: Team) -> bytes:
        """Copy this rank's share of the files; damage of the near copy is reported to rank 0, and not raised."""
        near, far = (each.root.place(order.name) for each in self._catalogs)
        mine = team.share(sorted(record.at_rest), record.at_rest.__getitem__)
        phases = met.phases
        began_s = phases.now()
        try:
            copied = copy_files(near, far, record, mine, self._options, self._is_wanted, self._pause)
        except errors.DamagedCheckpoint as error:  # of the near copy: a damaged far copy is replaced
            phases.add("copy", began_s, phases.now())
            damage = f"{type(error).__name__}: {error.message}"
            return msgspec.msgpack.encode(_Share(damage=damage, spans=met.sent()))
        phases.add("copy", began_s, phases.now(), copied.nbytes)
        self._check_wanted()
        return msgspec.msgpack.encode(_Share(copied=copied.nbytes, files=copied.files, spans=met.sent()))

    def _commit(
        self,
        order: ReplicationOrder,
        over: Version | None,
        met: CommonMoment,
        shares: list[bytes],
        ranks: list[RankPhases],
    ) -> list[bytes]:
        """On rank 0, once all ranks have copied; `ranks` gets what they did."""
        phases = met.phases
        parts = [msgspec.msgpack.decode(each, type=_Share) for each in shares]
        ranks.extend(met.of_ranks([part.spans for part in parts]))
        phases.add("wait", phases.spans[-1].end_s, phases.now())
        damage = next((part.damage for part in parts if part.damage), "")
        if damage and self.coordinator.leave_out(order):
            raise errors.NearCopyDamaged(
                f"{self._urls[NEAR]}/{order.name} is damaged: {damage}",
                hint="it stays as it is, and is not promoted; there may be a copy elsewhere",
            )
        if not damage:
            with phases.phase("commit"):
                self.coordinator.commit(order, over)
        copied, files = sum(part.copied for part in parts), sum(part.files for part in parts)
        return [msgspec.msgpack.encode(_Share(copied=copied, files=files, damage=damage))] * len(shares)

    def _report_failure(self, order: ReplicationOrder | None, error: BaseException, seconds: float, rank: int) -> None:
        kind, message, cancelled = type(error).__name__, str(error), isinstance(error, errors.SaveCancelled)
        what: dict[str, Any] = {"kind": kind, "message": message, "cancelled": cancelled, "seconds": seconds}
        emit(PromotionFailed, partial(PromotionFailed, **self._about(order, rank), **what))

    def _about(self, order: ReplicationOrder | None, rank: int) -> dict[str, Any]:
        source, where = (url if order is None else f"{url}/{order.name}" for url in self._urls)
        return {"rank": rank, "source": source, "where": where, "step": None if order is None else order.step}
