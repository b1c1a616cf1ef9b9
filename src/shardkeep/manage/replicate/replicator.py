"""
Copies checkpoints to a far root in the background, by all ranks together, without slowing training down.

Each save is followed by a *round* on a thread of each rank; all ranks run the same rounds in the same order. In a round,
rank 0 chooses the checkpoint to copy next, the newest first, each rank copies its share of the files, rank 0 commits, and
so on until nothing is left. This also continues what an earlier job or round could not finish.

An error on any rank reaches all ranks. A damaged near copy is not a failure of the far root: it is reported as such,
unless the near copy was deleted or replaced meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
from shardkeep.manage.background import DaemonWorker, PendingTasks
from shardkeep.manage.catalog import FAR, NEAR, Catalog, Tiers
from shardkeep.manage.decisions import RankContext
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import CheckpointLocks, Pruner
from shardkeep.manage.replicate.coordinator import Chosen, ReplicationCoordinator, ReplicationOrder, ReplicationTerms
from shardkeep.manage.replicate.copy import copy_files, throttle
from shardkeep.manage.schedule import Clock
from shardkeep.options import Options
from shardkeep.storage.base import Root
from shardkeep.storage.cancel import run_with_deadline
from shardkeep.storage.retry import RetryingRoot, RetryPolicy

log = logging.getLogger("shardkeep")

GRACE_S = 3.0
"""How long cancelled work may take to end, and the far lease to be released, before both are left to themselves."""


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports of its share."""

    copied: int = 0
    files: int = 0
    damage: str = ""
    """What is wrong with the near copy."""
    spans: SentPhases = []


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 reports of a copy that did not fail."""

    copied: int = 0
    files: int = 0
    gone: bool = False
    """Whether the near checkpoint was deleted or replaced meanwhile."""


class Replicator:
    """The replication of one Checkpointer. Used by one thread."""

    def __init__(
        self,
        root: Root,
        tiers: Tiers,
        ranks: RankContext,
        clock: Clock,
        *,
        lease: Lease,
        near_pruner: Pruner,
        near_locks: CheckpointLocks,
        terms: ReplicationTerms,
        options: Options,
        retries: int,
        is_saving: Callable[[], bool],
    ) -> None:
        """`root` is the far root without retries, and `lease` its lease."""
        self._running_round = 0
        self._cancelled_before = 0
        """Rounds with lower numbers are cancelled."""
        policy = RetryPolicy(retries, sleep=clock.sleep, wanted=self._is_wanted)
        far = Catalog(RetryingRoot(root, policy), tiers.near.naming.template)
        self.coordinator = ReplicationCoordinator(tiers, far, terms, lease, near_pruner, near_locks, clock.now)
        """Rank 0's part."""
        self.rounds = PendingTasks()
        self._catalogs = tiers.near, far
        self._urls = tiers.urls
        self._ranks = ranks
        self._options = options
        self._pause = partial(throttle, is_saving, clock.sleep)
        self._near_pruner = near_pruner
        self._world: World | None = None
        """The ranks, once `begin` was called."""
        self._worker = DaemonWorker("shardkeep-promote")
        self._futures: list[Future[None]] = []

    # -- rounds --------------------------------------------------------------------------------------------------

    def begin(self, session: str) -> None:
        """Begin, once this job holds the far root, with what earlier jobs could not finish."""
        if self._world is not None:
            return
        world = self._ranks.world.with_prefix(f"promotions/{session}")
        # Ranks only wait for each other here, and rank 0 reads both roots while the others wait.
        self._world = replace(world, alone_s=world.timeout_s)
        _at_exit(self._leave)
        self.after(None)

    def after(self, saved: Any, *, newest: bool = False) -> None:
        """Begin a round once a save has ended; `newest`: copy the newest checkpoint whatever its step."""
        if self._world is None or self._worker.closed:
            return
        future = self._worker.submit(self._run_round, self.rounds.count, saved, newest, self._world)
        self.rounds.add(future)
        self._futures = [each for each in self._futures if not each.done()] + [future]

    def wait(self, timeout_s: float | None = None) -> list[BaseException]:
        """
        Wait for all rounds that `stop` has not abandoned, and for the deletes after them; return their errors.

        Raises:
            TimeoutError: they did not end in time; they go on.

        """
        errors: list[BaseException] = []
        if not self._worker.abandoned:
            if futures.wait(self._futures, timeout_s).not_done:
                raise TimeoutError(f"not all checkpoints were promoted to {self._urls[FAR]} within {timeout_s:g} s")
            errors = self.rounds.end_all()
        self._near_pruner.wait()
        return errors

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
        self._cancelled_before = self.rounds.count

    def stop(self) -> None:
        """
        Begin no more rounds, and wait a little for those that were begun, which have ended or are cancelled.

        A round that does not end in time waits for an answer of the store. It is abandoned, and does nothing after that.
        """
        if not self._worker.abandoned and not self._worker.close(GRACE_S):
            log.warning("%s does not answer: the request to it is abandoned", self._urls[FAR])

    def close(self) -> None:
        """Stop, and release the far root. If it does not answer, its lease expires."""
        try:
            self.stop()
            self.coordinator.pruner.close()
        finally:
            run_with_deadline(self.coordinator.lease.release, "shardkeep-release", GRACE_S)

    def _leave(self) -> None:
        """At exit."""
        self.cancel()
        self.close()

    def _is_wanted(self) -> bool:
        return self._running_round >= self._cancelled_before

    def _check_wanted(self, number: int) -> None:
        if number < self._cancelled_before:
            raise SaveCancelled(f"promotions to {self._urls[FAR]} were cancelled")

    # -- on the thread -------------------------------------------------------------------------------------------

    def _run_round(self, number: int, saved: Any, newest: bool, world: World) -> None:
        self._running_round = number
        if isinstance(saved, SaveHandle):
            saved.wait_for_end()
        damaged: NotPromoted | None = None
        for turn in count():
            try:
                if not self._copy_next(f"{number}.{turn}", number, newest=newest, world=world):
                    break
            except SaveCancelled:
                log.info("promotions to %s were cancelled", self._urls[FAR])
                return
            except Exception as error:
                if self._worker.abandoned:  # the far root was released, and no caller waits for this round
                    log.info("a cancelled promotion to %s has ended: %s", self._urls[FAR], error)
                    return
                failed = self._failure(error)
                if world.rank == 0:  # now, because the next save that would report it may be far away
                    log.error("%s", failed, exc_info=error)  # noqa: TRY400 - the error is given
                if not isinstance(error, NearCopyDamaged):
                    raise failed from error
                failed.__cause__, damaged = error, damaged or failed  # go on with other checkpoints
        if damaged is not None:
            raise damaged

    def _failure(self, error: Exception) -> NotPromoted:
        what = f"checkpoints of {self._urls[NEAR]} could not be promoted to {self._urls[FAR]}"
        hint = "they are intact, and are tried again after the next save, or by the next job"
        if isinstance(error, NearCopyDamaged):
            hint = error.hint
        return NotPromoted(f"{what}: {error.message if isinstance(error, CheckpointError) else repr(error)}", hint=hint)

    # -- one checkpoint ------------------------------------------------------------------------------------------

    def _copy_next(self, title: str, number: int, *, newest: bool, world: World) -> bool:
        """Copy one checkpoint, together with all ranks; return False if there is none to copy."""
        phases, order, chosen_s = Phases(), None, 0.0
        chosen: list[Chosen] = []

        def work() -> bytes:
            self._check_wanted(number)
            return b""

        with ExitStack() as held:

            def choose(payloads: list[bytes]) -> list[bytes]:
                found = self.coordinator.choose(held, newest=newest)
                chosen.extend([] if found is None else [found])
                return [b"" if found is None else msgspec.msgpack.encode(found.order)] * len(payloads)

            try:
                with rendezvous(world, f"promotion {title} to {self._urls[FAR]}") as meeting:
                    answer = meeting.agree("choose", work, choose)
                    if not answer:
                        return False
                    chosen_s = phases.mark_meeting()
                    phases.add("choose", 0.0, chosen_s)
                    order = msgspec.msgpack.decode(answer, type=ReplicationOrder)
                    if self._copy_together(meeting, order, chosen, phases, number, world) and world.rank == 0:
                        self.coordinator.clean_up(order, held)
            except BaseException as error:
                if order is not None or not isinstance(error, SaveCancelled):
                    self._report_failure(order, error, phases.now() - chosen_s, world.rank)
                raise
        return True

    def _copy_together(
        self,
        meeting: Rendezvous,
        order: ReplicationOrder,
        chosen: list[Chosen],
        phases: Phases,
        number: int,
        world: World,
    ) -> bool:
        """Copy and commit one checkpoint; return False if the near copy is gone. `chosen` has one element on rank 0."""
        record, about, began_s = order.decoded(), self._about(order, world.rank), phases.now()
        total, files = record.stored_nbytes, len(record.at_rest)
        emit(PromotionBegan, lambda: PromotionBegan(**about, bytes_total=total))
        answer = meeting.agree(
            "copy",
            lambda: self._copy_share(order, record, phases, number, world),
            lambda shares: self._commit(chosen[0], phases, shares),
        )
        outcome, seconds = msgspec.msgpack.decode(answer, type=_Outcome), phases.now() - began_s
        if outcome.gone:
            gone = SaveCancelled(f"{about['source']} was deleted or replaced meanwhile, and is not promoted")
            log.info("%s", gone)
            self._report_failure(order, gone, seconds, world.rank)
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
                ranks=phases.all_ranks(),
            ),
        )
        if world.rank == 0:
            found = f", {total - outcome.copied:,} bytes of them were there" if outcome.copied < total else ""
            text = "%s is promoted to %s: %s bytes in %d files%s, %.2f s (%s)"
            took = ", ".join(f"{name} {took_s:.2f}" for name, took_s in seconds_by_name(phases.spans).items())
            log.info(text, about["source"], about["where"], f"{total:,}", files, found, seconds, took)
        return True

    def _copy_share(self, order: ReplicationOrder, record: Any, phases: Phases, number: int, world: World) -> bytes:
        """Copy this rank's share of the files; damage of the near copy is reported to rank 0, and not raised."""
        near, far = (each.root.place(order.name) for each in self._catalogs)
        mine = share_files(record.at_rest, world.size)[world.rank]
        began_s = phases.now()
        try:
            copied = copy_files(near, far, record, mine, self._options, self._is_wanted, self._pause)
        except DamagedCheckpoint as error:  # of the near copy: a damaged far copy is replaced
            phases.add("copy", began_s, phases.now())
            damage = f"{type(error).__name__}: {error.message}"
            return msgspec.msgpack.encode(_Share(damage=damage, spans=phases.sent()))
        phases.add("copy", began_s, phases.now(), copied.nbytes)
        self._check_wanted(number)
        return msgspec.msgpack.encode(_Share(copied=copied.nbytes, files=copied.files, spans=phases.sent()))

    def _commit(self, chosen: Chosen, phases: Phases, shares: list[bytes]) -> list[bytes]:
        """On rank 0, once all ranks have copied."""
        parts = [msgspec.msgpack.decode(each, type=_Share) for each in shares]
        phases.collect([part.spans for part in parts])
        phases.add("wait", phases.spans[-1].end_s, phases.now())
        damage = [part.damage for part in parts if part.damage]
        if damage and not self.coordinator.is_gone(chosen.order):
            self.coordinator.leave_out(chosen.order)
            raise NearCopyDamaged(
                f"{self._urls[NEAR]}/{chosen.order.name} is damaged: {damage[0]}",
                hint="it stays as it is, and is not promoted; there may be a copy elsewhere",
            )
        if not damage:
            with phases.phase("commit"):
                self.coordinator.commit(chosen)
        copied, files = sum(part.copied for part in parts), sum(part.files for part in parts)
        return [msgspec.msgpack.encode(_Outcome(copied=copied, files=files, gone=bool(damage)))] * len(shares)

    def _report_failure(self, order: ReplicationOrder | None, error: BaseException, seconds: float, rank: int) -> None:
        kind, message, cancelled = type(error).__name__, str(error), isinstance(error, SaveCancelled)
        about = self._about(order, rank)
        emit(
            PromotionFailed,
            lambda: PromotionFailed(**about, kind=kind, message=message, cancelled=cancelled, seconds=seconds),
        )

    def _about(self, order: ReplicationOrder | None, rank: int) -> dict[str, Any]:
        source, where = (url if order is None else f"{url}/{order.name}" for url in self._urls)
        return {"rank": rank, "source": source, "where": where, "step": None if order is None else order.step}


def share_files(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Assign files to ranks by size, the largest first, each to the rank that has least; the same on all ranks."""
    loads = [0] * ranks
    found: list[list[str]] = [[] for _ in range(ranks)]
    for name, nbytes in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        rank = loads.index(min(loads))
        loads[rank] += nbytes + 1  # one more, so that empty files are spread, too
        found[rank].append(name)
    return found


def _at_exit(method: Any) -> None:
    """Call a method at exit before threads are joined, if its object still exists and the process was not forked."""
    reference, process_id = WeakMethod(method), os.getpid()

    def call() -> None:
        found = reference()
        if found is not None and os.getpid() == process_id:
            found()

    threading._register_atexit(call)  # type: ignore[attr-defined]  # there is no public way
