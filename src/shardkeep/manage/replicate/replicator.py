"""
One checkpoint is promoted, by all ranks together: rank 0 says which, each copies its share of the files, rank 0 commits.

What goes wrong on any rank reaches all of them. A near copy that is damaged is no failure of the far root: it is said so,
unless the near copy was deleted or replaced meanwhile, which is nobody's fault.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakMethod

import msgspec

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World
from shardkeep.engine.queue import SaveHandle
from shardkeep.engine.report import Phases, SentPhases, seconds_by_name
from shardkeep.errors import CheckpointError, DamagedCheckpoint, NearCopyDamaged, NotPromoted, SaveCancelled
from shardkeep.events import PromotionBegan, PromotionFailed, PromotionFinished, emit
from shardkeep.manage.background import DaemonWorker, PendingTasks, run_within
from shardkeep.manage.catalog import FAR, NEAR, Catalog, Entry, Tiers
from shardkeep.manage.decisions import RankContext
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import CheckpointLocks, Pruner
from shardkeep.manage.replicate.coordinator import ReplicationCoordinator, ReplicationOrder, ReplicationTerms
from shardkeep.manage.replicate.copy import CopyLimits, Throttle, copy_files
from shardkeep.manage.schedule import Clock
from shardkeep.storage.base import Root
from shardkeep.storage.retry import RetryingRoot, RetryPolicy

log = logging.getLogger("shardkeep")


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its part."""

    copied: int = 0
    files: int = 0
    lost: str = ""
    """What is wrong with the near copy."""
    spans: SentPhases = []


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says of a promotion that did not fail."""

    copied: int = 0
    files: int = 0
    gone: bool = False
    """Whether the near checkpoint was deleted or replaced meanwhile."""


class CollectiveCopies:
    """Promotes one checkpoint after the other. Used by one thread, the same way on all ranks."""

    def __init__(
        self,
        tiers: Tiers,
        leader: ReplicationCoordinator,
        limits: CopyLimits,
        *,
        wanted: Callable[[], bool],
        insist: Callable[[int], None],
        give_way: Callable[[], None],
    ) -> None:
        """
        Begin nothing yet.

        Args:
            tiers: both roots, the far one as promotions see it.
            leader: rank 0's part.
            limits: threads and memory of each rank.
            wanted: says whether what is under way is wanted still.
            insist: raises where the round of this number is not.
            give_way: waits a moment where a save is under way.

        """
        self._tiers = tiers
        self._leader = leader
        self._limits = limits
        self._wanted = wanted
        self._insist = insist
        self._give_way = give_way
        self._where = tiers.urls

    def take(self, title: str, number: int, *, newest: bool, world: World) -> bool:
        """Promote one checkpoint; False where there is none to promote."""
        leader, phases, order, chosen_s = self._leader, Phases(), None, 0.0

        def work() -> bytes:
            self._insist(number)
            return b""

        try:
            with rendezvous(world, f"promotion {title} to {self._where[FAR]}") as meeting:
                told = meeting.agree("choose", work, lambda payloads: [leader.choose(newest=newest)] * len(payloads))
                if not told:
                    return False
                chosen_s = phases.meet()
                phases.add("choose", 0.0, chosen_s)
                order = msgspec.msgpack.decode(told, type=ReplicationOrder)
                self._promote(meeting, order, phases, number, world)
        except BaseException as error:
            if order is not None or not isinstance(error, SaveCancelled):
                self._tell_failed(order, error, phases.now() - chosen_s, world.rank)
            raise
        finally:
            leader.end()
        return True

    def _promote(self, meeting: Rendezvous, order: ReplicationOrder, phases: Phases, number: int, world: World) -> None:
        record, about, began_s = order.decoded(), self._about(order, world.rank), phases.now()
        total, files = record.stored_nbytes, len(record.at_rest)
        emit(PromotionBegan, lambda: PromotionBegan(**about, bytes_total=total))
        told = meeting.agree(
            "copy", lambda: self._copy(order, phases, number, world), lambda said: self._commit(order, phases, said)
        )
        outcome, seconds = msgspec.msgpack.decode(told, type=_Outcome), phases.now() - began_s
        if outcome.gone:
            gone = SaveCancelled(f"{about['source']} was deleted or replaced meanwhile, and is not promoted")
            log.info("%s", gone)
            self._tell_failed(order, gone, seconds, world.rank)
            return
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
                ranks=phases.all_ranks(),
            ),
        )
        if world.rank == 0:
            found = f", {total - outcome.copied:,} bytes of them were there" if outcome.copied < total else ""
            text = "%s is promoted to %s: %s bytes in %d files%s, %.2f s (%s)"
            took = ", ".join(f"{name} {took_s:.2f}" for name, took_s in seconds_by_name(phases.spans).items())
            log.info(text, about["source"], about["where"], f"{total:,}", files, found, seconds, took)
            self._leader.tidy(order)

    def _copy(self, order: ReplicationOrder, phases: Phases, number: int, world: World) -> bytes:
        """Copy this rank's share of the files; what is wrong with the near copy is said and not raised."""
        record = order.decoded()
        near, far = (each.root.place(order.name) for each in self._tiers.all)
        mine = share_files(record.at_rest, world.size)[world.rank]
        began_s = phases.now()
        try:
            copied = copy_files(near, far, record, mine, self._limits, self._wanted, self._give_way)
        except DamagedCheckpoint as error:  # only of the near one: what is wrong with the far one is copied again
            phases.add("copy", began_s, phases.now())
            return msgspec.msgpack.encode(_Share(lost=f"{type(error).__name__}: {error.message}", spans=phases.sent()))
        phases.add("copy", began_s, phases.now(), copied.nbytes)
        self._insist(number)
        return msgspec.msgpack.encode(_Share(copied=copied.nbytes, files=copied.files, spans=phases.sent()))

    def _commit(self, order: ReplicationOrder, phases: Phases, said: list[bytes]) -> list[bytes]:
        """On rank 0, once all have copied."""
        parts = [msgspec.msgpack.decode(each, type=_Share) for each in said]
        phases.collect([part.spans for part in parts])
        phases.add("wait", phases.spans[-1].end_s, phases.now())
        lost = [part.lost for part in parts if part.lost]
        if lost and not self._leader.is_gone(order):
            self._leader.give_up(order)
            raise NearCopyDamaged(
                f"{self._where[NEAR]}/{order.name} is damaged: {lost[0]}",
                hint="it stays as it is, and is not promoted; there may be a copy elsewhere",
            )
        if not lost:
            with phases.phase("commit"):
                self._leader.commit(order)
        copied, files = sum(part.copied for part in parts), sum(part.files for part in parts)
        return [msgspec.msgpack.encode(_Outcome(copied=copied, files=files, gone=bool(lost)))] * len(said)

    def _tell_failed(self, order: ReplicationOrder | None, error: BaseException, seconds: float, rank: int) -> None:
        kind, message, cancelled = type(error).__name__, str(error), isinstance(error, SaveCancelled)
        about = self._about(order, rank)
        emit(
            PromotionFailed,
            lambda: PromotionFailed(**about, kind=kind, message=message, cancelled=cancelled, seconds=seconds),
        )

    def _about(self, order: ReplicationOrder | None, rank: int) -> dict[str, Any]:
        source, where = (root if order is None else f"{root}/{order.name}" for root in self._where)
        return {"rank": rank, "source": source, "where": where, "step": None if order is None else order.step}


def share_files(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Share out files by size, the largest first, each to the rank that has least; the same on all ranks."""
    loads = [0] * ranks
    found: list[list[str]] = [[] for _ in range(ranks)]
    for name, nbytes in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        rank = loads.index(min(loads))
        loads[rank] += nbytes + 1  # so that empty ones are shared out, too
        found[rank].append(name)
    return found


# What takes the place of promotions where there is no root to promote to: nothing is done, and nothing fails.


class NoReplicator:
    """As `Promotions`, to nowhere."""

    def distrust(self, names: Collection[str]) -> None:
        """Nothing is there."""

    def take_root(self) -> list[Entry]:
        """Nothing is there."""
        return []

    def begin(self, session: str) -> None:
        """Begin nothing."""

    def after(self, saved: Any, *, newest: bool = False) -> None:
        """Begin nothing."""

    def skip(self) -> None:
        """Count nothing."""

    def failed(self) -> list[int]:
        """None has."""
        return []

    def end(self, numbers: Collection[int]) -> list[BaseException]:  # noqa: ARG002 - there are none
        """Wait for nothing."""
        return []

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:  # noqa: ARG002 - it is over
        """Wait for nothing."""
        return []

    def finish(self, timeout_s: float | None, *, newest: bool) -> list[BaseException]:  # noqa: ARG002 - it is over
        """Wait for nothing."""
        return []

    def cancel(self) -> None:
        """Nothing is under way."""

    def stop(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""

    def has(self, name: str) -> bool:  # noqa: ARG002 - whatever it is called
        """Nothing is there."""
        return False

    def is_pinned(self, name: str) -> bool:  # noqa: ARG002 - whatever it is called
        """Nothing is there."""
        return False


# Checkpoints that are copied to a far root in the background, by all ranks together, never in the way of training.
#
# Each save is followed by a *round*, on a thread of each rank, the same ones in the same order on all: rank 0 says
# which
# checkpoint is to be promoted next, the newest first, all promote it (`turns`), and so on until nothing is left. What
# an
# earlier job or round could not finish is found that way, too.

GRACE_S = 3.0
"""How long what was cancelled may take to end, and the far root to be given back; then both go on by themselves."""


class Replicator:
    """Promotions of one Checkpointer. Used by one thread."""

    def __init__(
        self,
        root: Root,
        tiers: Tiers,
        job: RankContext,
        seams: Clock,
        lease: Lease,
        house: Pruner,
        in_use: CheckpointLocks,
        terms: ReplicationTerms,
        limits: CopyLimits,
        retries: int,
        courtesy: Throttle,
    ) -> None:
        """
        Begin nothing yet.

        Args:
            root: the far one.
            tiers: both roots, which try again what fails in passing.
            job: the ranks.
            seams: clocks and waits.
            lease: of the far root.
            house: keeps the near root in order.
            in_use: places of the near root that must not be deleted.
            terms: what is promoted.
            limits: threads and memory of each rank.
            retries: how often an operation of the far root is tried again.
            courtesy: says when a save is to go first.

        """
        self._under_way = 0
        """The number of the round that is."""
        self._cancelled = 0
        """Rounds of lower numbers are not wanted any more."""
        patience = RetryPolicy(retries, sleep=seams.sleep, wanted=self._wanted)
        far = Catalog(RetryingRoot(root, patience), tiers.near.naming.template)
        self.leader = ReplicationCoordinator(tiers, far, terms, lease, house, in_use, seams.now)
        """Rank 0's part."""
        self.rounds = PendingTasks()
        """Under way, or failed and not told yet."""
        self._near_house = house
        self._turns = CollectiveCopies(
            Tiers(tiers.near, far),
            self.leader,
            limits,
            wanted=self._wanted,
            insist=self._insist,
            give_way=courtesy.give_way,
        )
        self._job = job
        self._where = tiers.urls
        self._world: World | None = None
        self._lane = DaemonWorker("shardkeep-promote")
        self._futures: list[Future[None]] = []

    # -- what is there -------------------------------------------------------------------------------------------

    def take_root(self) -> list[Entry]:
        """On rank 0: take the far root, and see what it has."""
        return self.leader.begin()

    def distrust(self, names: Collection[str]) -> None:
        """Count far checkpoints for nothing, as they could not be restored."""
        self.leader.house.distrusted = set(names)

    def has(self, name: str) -> bool:
        """On rank 0: say whether the far root has a checkpoint of this name."""
        return self.leader.has(name)

    def is_pinned(self, name: str) -> bool:
        """On rank 0: say whether the far root has one, and it is pinned."""
        return self.leader.is_pinned(name)

    # -- rounds --------------------------------------------------------------------------------------------------

    def begin(self, session: str) -> None:
        """Begin, once the far root is this job's: with what earlier jobs could not finish."""
        if self._world is not None:
            return
        world = self._job.world
        if world.store is not None:
            from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded: there is a store

            world = replace(world, store=PrefixStore(f"promotions/{session}", world.store))
        # They are waited for by nobody but each other, and rank 0 looks at both roots while the others wait.
        self._world = replace(world, alone_s=world.timeout_s)
        _at_exit(self._leave)
        self.after(None)

    def after(self, saved: Any, *, newest: bool = False) -> None:
        """Begin a round once a save has ended; `newest`: whatever its step, the newest checkpoint is promoted."""
        if self._world is None or self._lane.closed:
            return
        future = self._lane.submit(self._round, self.rounds.count, saved, newest, self._world)
        self.rounds.add(future)
        self._futures = [each for each in self._futures if not each.done()] + [future]

    def skip(self) -> None:
        """Count a round that is not made here, as its save failed in the call; it may be made on other ranks."""
        self.rounds.skip()

    def failed(self) -> list[int]:
        """Number the rounds that have failed by now, on this rank."""
        return self.rounds.failed()

    def end(self, numbers: Collection[int]) -> list[BaseException]:
        """Wait for some rounds to end, and return what went wrong."""
        return self.rounds.end(numbers)

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:
        """
        Wait for all rounds, and for what follows them; return what went wrong. Not for those that `stop` has left.

        Raises:
            TimeoutError: they are not over in time; they go on.

        """
        errors: list[BaseException] = []
        if not self._lane.left:
            if futures.wait(self._futures, timeout_s).not_done:
                raise TimeoutError(f"not all checkpoints were promoted to {self._where[FAR]} within {timeout_s:g} s")
            errors = self.rounds.end(self.rounds.before(self.rounds.count))
        self._near_house.wait()
        return errors

    def finish(self, timeout_s: float | None, *, newest: bool) -> list[BaseException]:
        """Wait for all rounds, the newest checkpoint's too if it is wanted, or cancel them when time is up."""
        if newest:
            self.after(None, newest=True)
        try:
            return self.wait(timeout_s)
        except TimeoutError as late:
            log.warning("%s; the next job goes on with them", late)
            self.cancel()
            self.stop()
            return self.wait()

    def cancel(self) -> None:
        """Give up all rounds that were begun; what was copied is found by a later one."""
        self._cancelled = self.rounds.count

    def stop(self) -> None:
        """
        Begin no more rounds, and wait a little for those that were begun, which are over or cancelled.

        One that is not over then waits for an answer: it is left to itself, and does nothing after that.
        """
        if not self._lane.left and not self._lane.close(GRACE_S):
            log.warning("%s does not answer: what is under way there is left to itself", self._where[FAR])

    def close(self) -> None:
        """Stop, and give back the far root, or try to: where it does not answer, its lease runs out."""
        try:
            self.stop()
            self.leader.house.close()
        finally:
            run_within(self.leader.lease.release, GRACE_S)

    def _leave(self) -> None:
        """At exit."""
        self.cancel()
        self.close()

    # -- on the thread -------------------------------------------------------------------------------------------

    def _round(self, number: int, saved: Any, newest: bool, world: World) -> None:
        self._under_way = number
        if isinstance(saved, SaveHandle):
            saved.wait_for_end()
        damaged: NotPromoted | None = None
        for turn in count():
            try:
                if not self._turns.take(f"{number}.{turn}", number, newest=newest, world=world):
                    break
            except SaveCancelled:
                log.info("promotions to %s were cancelled", self._where[FAR])
                return
            except Exception as error:
                if self._lane.left:  # nobody waits for it, and the far root was given back
                    log.info("a promotion to %s that was cancelled has ended: %s", self._where[FAR], error)
                    return
                failed = self._failure(error)
                if world.rank == 0:  # said now, as nobody may ask before the next save
                    log.error("%s", failed, exc_info=error)  # noqa: TRY400 - the error is given
                if not isinstance(error, NearCopyDamaged):
                    raise failed from error
                failed.__cause__, damaged = error, damaged or failed  # there are others
        if damaged is not None:
            raise damaged

    def _wanted(self) -> bool:
        return self._under_way >= self._cancelled

    def _insist(self, number: int) -> None:
        if number < self._cancelled:
            raise SaveCancelled(f"promotions to {self._where[FAR]} were cancelled")

    def _failure(self, error: Exception) -> NotPromoted:
        what = f"checkpoints of {self._where[NEAR]} could not be promoted to {self._where[FAR]}"
        hint = "they are as they were, and are tried again after the next save, or by the next job"
        if isinstance(error, NearCopyDamaged):
            hint = error.hint
        return NotPromoted(f"{what}: {error.message if isinstance(error, CheckpointError) else repr(error)}", hint=hint)


def _at_exit(cancel: Any) -> None:
    """Have a method called at exit, before threads are waited for, if its object is still there and was not forked."""
    method, process_id = WeakMethod(cancel), os.getpid()

    def call() -> None:
        found = method()
        if found is not None and os.getpid() == process_id:
            found()

    threading._register_atexit(call)  # type: ignore[attr-defined]  # there is no public way
