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

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardkeep.dist.kv import KVMailbox, StoreUnreachable, with_mailbox
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.errors import RanksDisagree, RanksSilent
from shardkeep.manage.schedule import INTERVAL_S, Clock
from shardkeep.storage.base import Root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


T = TypeVar("T")

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


class StepDecisions:
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
        self._visit(lambda mailbox: _put_requests(mailbox, kinds), doing="tell rank 0 of a request")

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
        asked = self._visit(lambda mailbox: _take_requests(mailbox, kinds), doing="look for requests")
        made = msgspec.structs.replace(decide(asked), again=self._pace())
        body = msgspec.msgpack.encode(made)
        self._visit(lambda mailbox: mailbox.put(str(self._number), body), doing="tell the others")
        return made

    def _follow(self, step: int) -> Decision:
        key, readers = str(self._number), self._world.size - 1
        patience_s = 2 * self._world.timeout_s

        def errand(mailbox: KVMailbox) -> bytes | None:
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

    def _visit(self, errand: Callable[[KVMailbox], T], *, doing: str, within_s: float | None = None) -> T:
        if self._store is None:  # unreachable: a rank on its own asks nobody
            raise RanksSilent("there is nobody to talk to", ranks=[])
        try:
            return with_mailbox(self._store, self._world.size, errand, within_s=within_s or self._world.timeout_s)
        except StoreUnreachable as lost:
            others = list(range(1, self._world.size)) if self._world.rank == 0 else [0]
            raise RanksSilent(
                f"could not {doing}: {lost}", hint="the process of rank 0 has ended", ranks=others
            ) from lost


def _put_requests(mailbox: KVMailbox, kinds: Collection[str]) -> None:
    for kind in kinds:
        mailbox.put(f"asks/{kind}", b"")


def _take_requests(mailbox: KVMailbox, kinds: Collection[str]) -> list[str]:
    # What is asked for between the look and the drop is served, too: the decision comes after both.
    asked = [kind for kind in kinds if mailbox.there(f"asks/{kind}")]
    for kind in asked:
        mailbox.drop(f"asks/{kind}")
    return asked


# The ranks of a job, as a Checkpointer sees them: found when first needed, and sure to be of one mind.


class RankContext:
    """What one rank knows of its job."""

    def __init__(
        self,
        root: Root,
        seams: Clock,
        *,
        group: ProcessGroup | World | None,
        timeout_s: float,
        talks: bool,
        told: list[Any],
    ) -> None:
        """
        Talk to nobody yet.

        Args:
            root: where it saves.
            seams: clocks.
            group: the ranks.
            timeout_s: how long they wait for each other.
            talks: whether there is anything to agree on but by the number of a step.
            told: what the Checkpointer was told, which must be the same on all ranks.

        """
        self.talks = talks
        self._root = root
        self._seams = seams
        self._group = group
        self._timeout_s = timeout_s
        self._told = told
        self._world: World | None = None
        self._agreement: StepDecisions | None = None

    @property
    def world(self) -> World:
        """The ranks, which meet apart from those that save or load."""
        if self._world is None:
            world = current_world(self._group, timeout_s=self._timeout_s)
            if world.store is not None:
                from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded: there is a store

                world = replace(world, store=PrefixStore("checkpointers", world.store))
            self._world = world
        return self._world

    @property
    def agreement(self) -> StepDecisions:
        """
        What is decided at some steps; asked for by all ranks at the same time, at first.

        Raises:
            RanksDisagree: their Checkpointers were told different things.

        """
        if self._agreement is None:
            session = ""
            if not self.world.solo:
                with rendezvous(self.world, f"steps of {self._root.url}") as meeting:
                    mine = msgspec.json.encode(self._told)
                    session = meeting.agree("begin", lambda: mine, self._same).decode()
            seams = self._seams
            self._agreement = StepDecisions(self.world, session, interval_s=seams.interval_s, clock=seams.clock)
        return self._agreement

    @staticmethod
    def _same(told: list[bytes]) -> list[bytes]:
        for rank, each in enumerate(told):
            if each != told[0]:
                raise RanksDisagree(
                    f"the Checkpointer of rank {rank} was made with {each.decode()}, that of rank 0 with {told[0].decode()}",
                    hint="make it with the same arguments on all ranks",
                )
        return [secrets.token_hex(8).encode()] * len(told)
