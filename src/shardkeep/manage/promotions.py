"""
Checkpoints that are copied to a far root in the background, by all ranks together, never in the way of training.

Each save is followed by a *round*, on a thread of each rank, the same ones in the same order on all: rank 0 says which
checkpoint is to be promoted next, the newest first; every rank copies its share of the files; rank 0 commits; and so on
until nothing is left. What an earlier job or round could not finish is found that way, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakMethod

import msgspec

from shardkeep.errors import CheckpointError, DamagedCheckpoint, SaveCancelled
from shardkeep.events import PromotionBegan, PromotionFailed, PromotionFinished, tell
from shardkeep.manage.aside import Lane, in_time
from shardkeep.manage.catalog import Catalog
from shardkeep.manage.copying import Limits, copy_blobs
from shardkeep.manage.housekeeping import Housekeeping
from shardkeep.manage.in_use import InUse
from shardkeep.manage.jobs import Job
from shardkeep.manage.lease import Lease
from shardkeep.manage.pending import Pending
from shardkeep.manage.problems import NearCopyDamaged, NotPromoted
from shardkeep.manage.promoting import Order, Promoting, Terms
from shardkeep.manage.seams import Seams
from shardkeep.manage.tiers import FAR, NEAR, Tiers
from shardkeep.ranks.agree import Meeting, meet
from shardkeep.ranks.world import World
from shardkeep.run.handles import SaveHandle
from shardkeep.store.retrying import Patience
from shardkeep.store.retrying_root import RetryingRoot
from shardkeep.store.roots import Root

log = logging.getLogger("shardkeep")

GRACE_S = 3.0
"""How long what was cancelled may take to end, and the far root to be given back; then both go on by themselves."""


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its part."""

    copied: int = 0
    lost: str = ""
    """What is wrong with the near copy."""


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says of a promotion that did not fail."""

    copied: int = 0
    gone: bool = False
    """Whether the near checkpoint was deleted or replaced meanwhile."""


class Promotions:
    """Promotions of one Checkpointer. Used by one thread."""

    def __init__(
        self,
        root: Root,
        tiers: Tiers,
        job: Job,
        seams: Seams,
        lease: Lease,
        house: Housekeeping,
        in_use: InUse,
        terms: Terms,
        limits: Limits,
        retries: int,
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

        """
        self._under_way = 0
        """The number of the round that is."""
        self._cancelled = 0
        """Rounds of lower numbers are not wanted any more."""
        patience = Patience(retries, sleep=seams.sleep, wanted=self._wanted)
        far = Catalog(RetryingRoot(root, patience), tiers.near.naming.template)
        self.leader = Promoting(tiers, far, terms, lease, house, in_use, seams.now)
        """Rank 0's part."""
        self.rounds = Pending()
        """Under way, or failed and not told yet."""
        self._tiers = Tiers(tiers.near, far)
        self._job = job
        self._limits = limits
        self._where = [each.root.url for each in tiers.all]
        self._world: World | None = None
        self._lane = Lane("shardkeep-promote")
        self._futures: list[Future[None]] = []

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

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:
        """
        Wait for all rounds, and return what went wrong; not for those that `stop` has left.

        Raises:
            TimeoutError: they are not over in time; they go on.

        """
        if self._lane.left:
            return []
        if futures.wait(self._futures, timeout_s).not_done:
            raise TimeoutError(f"not all checkpoints were promoted to {self._where[FAR]} within {timeout_s:g} s")
        return self.rounds.end(self.rounds.before(self.rounds.count))

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
            in_time(self.leader.lease.release, GRACE_S)

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
                if not self._turn(f"{number}.{turn}", number, newest, world):
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

    def _turn(self, title: str, number: int, newest: bool, world: World) -> bool:
        """Promote one checkpoint; False where there is none to promote."""
        leader, began, order = self.leader, time.perf_counter(), None

        def work() -> bytes:
            self._insist(number)
            return b""

        try:
            with meet(world, f"promotion {title} to {self._where[FAR]}") as meeting:
                told = meeting.agree("choose", work, lambda payloads: [leader.choose(newest=newest)] * len(payloads))
                if not told:
                    return False
                order = msgspec.msgpack.decode(told, type=Order)
                self._promote(meeting, order, number, world)
        except BaseException as error:
            if order is not None or not isinstance(error, SaveCancelled):
                self._tell_failed(order, error, time.perf_counter() - began, world.rank)
            raise
        finally:
            leader.end()
        return True

    def _promote(self, meeting: Meeting, order: Order, number: int, world: World) -> None:
        began, about, total = time.perf_counter(), self._about(order, world.rank), order.decoded().stored_nbytes
        tell(PromotionBegan, lambda: PromotionBegan(**about, bytes_total=total))
        told = meeting.agree("copy", lambda: self._copy(order, number, world), lambda said: self._commit(order, said))
        outcome, seconds = msgspec.msgpack.decode(told, type=_Outcome), time.perf_counter() - began
        if outcome.gone:
            gone = SaveCancelled(f"{about['source']} was deleted or replaced meanwhile, and is not promoted")
            log.info("%s", gone)
            self._tell_failed(order, gone, seconds, world.rank)
            return
        tell(
            PromotionFinished,
            lambda: PromotionFinished(**about, bytes_total=total, bytes_copied=outcome.copied, seconds=seconds),
        )
        if world.rank == 0:
            found = f", {total - outcome.copied:,} of them were there" if outcome.copied < total else ""
            text = "%s is promoted to %s: %s bytes%s, %.2f s"
            log.info(text, about["source"], about["where"], f"{total:,}", found, seconds)
            self.leader.tidy(order)

    def _tell_failed(self, order: Order | None, error: BaseException, seconds: float, rank: int) -> None:
        kind, message, cancelled = type(error).__name__, str(error), isinstance(error, SaveCancelled)
        about = self._about(order, rank)
        tell(
            PromotionFailed,
            lambda: PromotionFailed(**about, kind=kind, message=message, cancelled=cancelled, seconds=seconds),
        )

    def _about(self, order: Order | None, rank: int) -> dict[str, Any]:
        source, where = (root if order is None else f"{root}/{order.name}" for root in self._where)
        return {"rank": rank, "source": source, "where": where, "step": None if order is None else order.step}

    def _copy(self, order: Order, number: int, world: World) -> bytes:
        """Copy this rank's share of the files; what is wrong with the near copy is said and not raised."""
        record = order.decoded()
        near, far = (each.root.place(order.name) for each in self._tiers.all)
        mine = shares(record.at_rest, world.size)[world.rank]

        try:
            copied = copy_blobs(near, far, record, mine, self._limits, self._wanted)
        except DamagedCheckpoint as error:  # only of the near one: what is wrong with the far one is copied again
            return msgspec.msgpack.encode(_Share(lost=f"{type(error).__name__}: {error.message}"))
        self._insist(number)
        return msgspec.msgpack.encode(_Share(copied=copied.nbytes))

    def _commit(self, order: Order, said: list[bytes]) -> list[bytes]:
        """On rank 0, once all have copied."""
        parts = [msgspec.msgpack.decode(each, type=_Share) for each in said]
        lost = [part.lost for part in parts if part.lost]
        if lost and not self.leader.is_gone(order):
            self.leader.give_up(order)
            raise NearCopyDamaged(
                f"{self._where[NEAR]}/{order.name} is damaged: {lost[0]}",
                hint="it stays as it is, and is not promoted; there may be a copy elsewhere",
            )
        if not lost:
            self.leader.commit(order)
        outcome = _Outcome(copied=sum(part.copied for part in parts), gone=bool(lost))
        return [msgspec.msgpack.encode(outcome)] * len(said)

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


def shares(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Share out files by size, the largest first, each to the rank that has least; the same on all ranks."""
    loads = [0] * ranks
    found: list[list[str]] = [[] for _ in range(ranks)]
    for name, nbytes in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        rank = loads.index(min(loads))
        loads[rank] += nbytes + 1  # so that empty ones are shared out, too
        found[rank].append(name)
    return found


def _at_exit(cancel: Any) -> None:
    """Have a method called at exit, before threads are waited for, if its object is still there and was not forked."""
    method, process_id = WeakMethod(cancel), os.getpid()

    def call() -> None:
        found = method()
        if found is not None and os.getpid() == process_id:
            found()

    threading._register_atexit(call)  # type: ignore[attr-defined]  # there is no public way
