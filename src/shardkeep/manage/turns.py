"""
One checkpoint is promoted, by all ranks together: rank 0 says which, each copies its share of the files, rank 0 commits.

What goes wrong on any rank reaches all of them. A near copy that is damaged is no failure of the far root: it is said so,
unless the near copy was deleted or replaced meanwhile, which is nobody's fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from shardkeep.errors import DamagedCheckpoint, SaveCancelled
from shardkeep.events import PromotionBegan, PromotionFailed, PromotionFinished, tell
from shardkeep.manage.copying import Limits, copy_blobs
from shardkeep.manage.problems import NearCopyDamaged
from shardkeep.manage.promoting import Order, Promoting
from shardkeep.manage.tiers import FAR, NEAR, Tiers
from shardkeep.ranks.agree import Meeting, meet
from shardkeep.ranks.world import World
from shardkeep.run.phases import Phases, Sent, seconds_by_name

log = logging.getLogger("shardkeep")


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its part."""

    copied: int = 0
    files: int = 0
    lost: str = ""
    """What is wrong with the near copy."""
    spans: Sent = []


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says of a promotion that did not fail."""

    copied: int = 0
    files: int = 0
    gone: bool = False
    """Whether the near checkpoint was deleted or replaced meanwhile."""


class Turns:
    """Promotes one checkpoint after the other. Used by one thread, the same way on all ranks."""

    def __init__(
        self,
        tiers: Tiers,
        leader: Promoting,
        limits: Limits,
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
            with meet(world, f"promotion {title} to {self._where[FAR]}") as meeting:
                told = meeting.agree("choose", work, lambda payloads: [leader.choose(newest=newest)] * len(payloads))
                if not told:
                    return False
                chosen_s = phases.meet()
                phases.add("choose", 0.0, chosen_s)
                order = msgspec.msgpack.decode(told, type=Order)
                self._promote(meeting, order, phases, number, world)
        except BaseException as error:
            if order is not None or not isinstance(error, SaveCancelled):
                self._tell_failed(order, error, phases.now() - chosen_s, world.rank)
            raise
        finally:
            leader.end()
        return True

    def _promote(self, meeting: Meeting, order: Order, phases: Phases, number: int, world: World) -> None:
        record, about, began_s = order.decoded(), self._about(order, world.rank), phases.now()
        total, files = record.stored_nbytes, len(record.at_rest)
        tell(PromotionBegan, lambda: PromotionBegan(**about, bytes_total=total))
        told = meeting.agree(
            "copy", lambda: self._copy(order, phases, number, world), lambda said: self._commit(order, phases, said)
        )
        outcome, seconds = msgspec.msgpack.decode(told, type=_Outcome), phases.now() - began_s
        if outcome.gone:
            gone = SaveCancelled(f"{about['source']} was deleted or replaced meanwhile, and is not promoted")
            log.info("%s", gone)
            self._tell_failed(order, gone, seconds, world.rank)
            return
        tell(
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

    def _copy(self, order: Order, phases: Phases, number: int, world: World) -> bytes:
        """Copy this rank's share of the files; what is wrong with the near copy is said and not raised."""
        record = order.decoded()
        near, far = (each.root.place(order.name) for each in self._tiers.all)
        mine = shares(record.at_rest, world.size)[world.rank]
        began_s = phases.now()
        try:
            copied = copy_blobs(near, far, record, mine, self._limits, self._wanted, self._give_way)
        except DamagedCheckpoint as error:  # only of the near one: what is wrong with the far one is copied again
            phases.add("copy", began_s, phases.now())
            return msgspec.msgpack.encode(_Share(lost=f"{type(error).__name__}: {error.message}", spans=phases.sent()))
        phases.add("copy", began_s, phases.now(), copied.nbytes)
        self._insist(number)
        return msgspec.msgpack.encode(_Share(copied=copied.nbytes, files=copied.files, spans=phases.sent()))

    def _commit(self, order: Order, phases: Phases, said: list[bytes]) -> list[bytes]:
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


def shares(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Share out files by size, the largest first, each to the rank that has least; the same on all ranks."""
    loads = [0] * ranks
    found: list[list[str]] = [[] for _ in range(ranks)]
    for name, nbytes in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        rank = loads.index(min(loads))
        loads[rank] += nbytes + 1  # so that empty ones are shared out, too
        found[rank].append(name)
    return found
