"""
How ranks agree on what only one of them knows: a signal, a request, the time, a save that failed.

Rank 0 decides, and says so in the key-value store that torch made; the others read it. No collective is made. Nobody
waits for the others but for rank 0, and they do not talk at every step: with each decision rank 0 says in how many steps
there is the next, so that there is about one a second. What a rank is asked for reaches rank 0 by a key of its own.

The keys, below one prefix for each Checkpointer, all of which are deleted again:

    N           the Nth decision
    N/read      how many ranks have read it; the last one deletes both
    asks/KIND   some rank was asked for this
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardkeep.errors import RanksDisagree, RanksSilent
from shardkeep.ranks.mailbox import Mailbox, MailLost, visit
from shardkeep.ranks.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

INTERVAL_S = 1.0
"""Between decisions, about."""
_MOST_STEPS = 50
"""Quick steps may become slow ones, and a signal should not wait for many of them."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says."""

    step: int
    """At which it says so."""
    why: str = ""
    """Why to save at this step; nothing: do not, unless its number says so."""
    stop: bool = False
    """Whether a signal asked for it: the save is to be waited for, and training should end."""
    failed: list[int] = []
    """Numbers of saves that have failed, and were not told of before."""
    unpromoted: list[int] = []
    """The same of rounds of promotions."""
    again: int = 1
    """In how many calls there is the next decision."""


Decide = Callable[[Collection[str]], Decision]
"""Given what other ranks were asked for, decides."""


class Agreement:
    """What this rank has to do with decisions. Used by one thread."""

    def __init__(
        self,
        world: World,
        session: str,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Begin.

        Args:
            world: the ranks.
            session: the same on all ranks, and new each time.
            interval_s: about how long there is between decisions.
            clock: never jumps.

        """
        self._world = world
        self._interval_s = interval_s
        self._clock = clock
        self._store: Store | None = None
        if world.store is not None:
            from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded, as there is a store

            self._store = PrefixStore(f"decisions/{session}", world.store)
        self._number = 0
        self._calls_left = 1
        self._calls_since = 1
        self._last_s = clock()

    def reached(self) -> bool:
        """Count a call, and say whether a decision is to be made in it."""
        self._calls_left -= 1
        return self._calls_left <= 0

    def ask(self, kinds: Collection[str]) -> None:
        """Let rank 0 know what this rank was asked for."""
        self._visit(lambda mailbox: _put_asks(mailbox, kinds), doing="tell rank 0 of a request")

    def decision(self, step: int, decide: Decide, kinds: Collection[str]) -> Decision:
        """
        Make rank 0's decision for a step, or wait for it.

        Raises:
            RanksSilent: rank 0 says nothing, or the store cannot be reached.
            RanksDisagree: rank 0 is at another step.

        """
        made = self._lead(decide, kinds) if self._world.rank == 0 else self._follow(step)
        self._number += 1
        self._calls_left = self._calls_since = made.again
        if made.step != step:
            raise RanksDisagree(
                f"rank {self._world.rank} is at step {step}, and rank 0 at step {made.step}",
                hint="call step() on all ranks, with the same steps in the same order",
            )
        return made

    def _lead(self, decide: Decide, kinds: Collection[str]) -> Decision:
        if self._world.solo:
            return msgspec.structs.replace(decide(()), again=1)
        asked = self._visit(lambda mailbox: _take_asks(mailbox, kinds), doing="look for requests")
        made = msgspec.structs.replace(decide(asked), again=self._pace())
        body = msgspec.msgpack.encode(made)
        self._visit(lambda mailbox: mailbox.put(str(self._number), body), doing="tell the others")
        return made

    def _follow(self, step: int) -> Decision:
        key, readers = str(self._number), self._world.size - 1
        patience_s = 2 * self._world.timeout_s

        def errand(mailbox: Mailbox) -> bytes | None:
            if not mailbox.wait([key], patience_s):
                return None
            [body] = mailbox.read([key])
            if mailbox.count(f"{key}/read") == readers:
                mailbox.drop(key)
                mailbox.drop(f"{key}/read")
            return body

        body = self._visit(errand, doing="wait for rank 0", within_s=patience_s)
        if body is None:
            raise RanksSilent(
                f"rank 0 did not say within {patience_s:g} s whether step {step} is to be saved: it has not come to this"
                " step, or has ended",
                hint="call step() on all ranks; a step that takes longer needs a larger Options.timeout_s",
                ranks=[0],
            )
        return msgspec.msgpack.decode(body, type=Decision)

    def _pace(self) -> int:
        """Choose so many calls as take about an interval, and never many more than last time."""
        now = self._clock()
        each_s = max(1e-6, (now - self._last_s) / self._calls_since)
        self._last_s = now
        return max(1, min(int(self._interval_s / each_s), 2 * self._calls_since, _MOST_STEPS))

    def _visit(self, errand: Callable[[Mailbox], T], *, doing: str, within_s: float | None = None) -> T:
        if self._store is None:  # unreachable: a rank on its own asks nobody
            raise RanksSilent("there is nobody to talk to", ranks=[])
        try:
            return visit(self._store, self._world.size, errand, within_s=within_s or self._world.timeout_s)
        except MailLost as lost:
            others = list(range(1, self._world.size)) if self._world.rank == 0 else [0]
            raise RanksSilent(
                f"could not {doing}: {lost}", hint="the process of rank 0 has ended", ranks=others
            ) from lost


def _put_asks(mailbox: Mailbox, kinds: Collection[str]) -> None:
    for kind in kinds:
        mailbox.put(f"asks/{kind}", b"")


def _take_asks(mailbox: Mailbox, kinds: Collection[str]) -> list[str]:
    # What is asked for between the look and the drop is served, too: the decision comes after both.
    asked = [kind for kind in kinds if mailbox.there(f"asks/{kind}")]
    for kind in asked:
        mailbox.drop(f"asks/{kind}")
    return asked
