"""
Checkpoints that are copied to a far root in the background, by all ranks together, never in the way of training.

Each save is followed by a *round*, on a thread of each rank, the same ones in the same order on all: rank 0 says which
checkpoint is to be promoted next, the newest first, all promote it (`turns`), and so on until nothing is left. What an
earlier job or round could not finish is found that way, too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakMethod

from shardkeep.errors import CheckpointError, SaveCancelled
from shardkeep.manage.aside import Lane, in_time
from shardkeep.manage.catalog import Catalog
from shardkeep.manage.copying import Limits
from shardkeep.manage.courtesy import Courtesy
from shardkeep.manage.entries import Entry
from shardkeep.manage.housekeeping import Housekeeping
from shardkeep.manage.in_use import InUse
from shardkeep.manage.jobs import Job
from shardkeep.manage.lease import Lease
from shardkeep.manage.pending import Pending
from shardkeep.manage.problems import NearCopyDamaged, NotPromoted
from shardkeep.manage.promoting import Promoting, Terms
from shardkeep.manage.seams import Seams
from shardkeep.manage.tiers import FAR, NEAR, Tiers
from shardkeep.manage.turns import Turns
from shardkeep.ranks.world import World
from shardkeep.run.handles import SaveHandle
from shardkeep.store.retrying import Patience
from shardkeep.store.retrying_root import RetryingRoot
from shardkeep.store.roots import Root

log = logging.getLogger("shardkeep")

GRACE_S = 3.0
"""How long what was cancelled may take to end, and the far root to be given back; then both go on by themselves."""


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
        courtesy: Courtesy,
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
        patience = Patience(retries, sleep=seams.sleep, wanted=self._wanted)
        far = Catalog(RetryingRoot(root, patience), tiers.near.naming.template)
        self.leader = Promoting(tiers, far, terms, lease, house, in_use, seams.now)
        """Rank 0's part."""
        self.rounds = Pending()
        """Under way, or failed and not told yet."""
        self._near_house = house
        self._turns = Turns(
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
        self._lane = Lane("shardkeep-promote")
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
