"""
Decisions that all ranks follow although only one rank knows the reason: a signal, a request, the time, a failed save.

Rank 0 decides and publishes the decision in torch's key-value store; the other ranks read it. No collective is used, and
ranks wait only for rank 0. They do not communicate at every step: each decision says after how many calls the next
one follows, so that there is about one per second. Requests of other ranks reach rank 0 through keys of their own.

The keys, below one prefix per Checkpointer, all of which are deleted again:

    N           the Nth decision
    N/read      how many ranks have read it; the last one deletes both
    asks/KIND   some rank received a request of this kind
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shardkeep.dist.kv import KVMailbox, StoreUnreachable, with_mailbox
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.queue import SaveHandle
from shardkeep.errors import RanksDisagree, RanksSilent
from shardkeep.manage.schedule import CLOCK, Clock

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_MAX_CALLS = 50
"""Between two decisions: fast steps may become slow ones, and a signal should not wait for many of them."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 decided for a step."""

    step: int
    why: str = ""
    """The reason to save at this step; empty: save only if the step number says so."""
    stop: bool = False
    """Whether a signal is the reason: the call waits for the save, and training should end."""
    failed: list[list[int]] = []
    """Numbers of saves, and of replication rounds, that failed and were not reported before."""
    again: int = 1
    """After how many calls the next decision follows."""


Decide = Callable[[Collection[str]], Decision]
"""Makes a decision, given the requests of other ranks."""


class StepDecisions:
    """The part of one rank in decisions. Used by one thread."""

    def __init__(self, world: World, session: str, clock: Clock = CLOCK) -> None:
        """`session` is the same on all ranks, and new for each Checkpointer."""
        self._world = world.with_prefix(f"decisions/{session}")
        self._clock, self._interval_s = clock.monotonic, clock.interval_s
        self._number = 0
        self._calls_left = self._calls_since = 1
        self._last_s = self._clock()

    def reached(self) -> bool:
        """Count a call, and return whether a decision is made in it."""
        self._calls_left -= 1
        return self._calls_left <= 0

    def request(self, kinds: Collection[str]) -> None:
        """Pass the requests that reached this rank on to rank 0."""

        def ask(mailbox: KVMailbox) -> None:
            for kind in kinds:
                mailbox.put(f"asks/{kind}", b"")

        self._visit(ask, doing="send a request to rank 0")

    def decision(self, step: int, decide: Decide, kinds: Collection[str]) -> Decision:
        """Make the decision for a step on rank 0, or wait for it on other ranks."""
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

        def take_requests(mailbox: KVMailbox) -> list[str]:
            # A request that arrives between `there` and `drop` is honoured too, because the decision is made after both.
            requested = [kind for kind in kinds if mailbox.there(f"asks/{kind}")]
            for kind in requested:
                mailbox.drop(f"asks/{kind}")
            return requested

        requested = self._visit(take_requests, doing="look for requests")
        made = msgspec.structs.replace(decide(requested), again=self._calls_per_interval())
        body = msgspec.msgpack.encode(made)
        self._visit(lambda mailbox: mailbox.put(str(self._number), body), doing="publish a decision")
        return made

    def _follow(self, step: int) -> Decision:
        key, readers = str(self._number), self._world.size - 1
        timeout_s = 2 * self._world.timeout_s

        def errand(mailbox: KVMailbox) -> bytes | None:
            if not mailbox.wait([key], timeout_s):
                return None
            [body] = mailbox.read([key])
            if mailbox.count(f"{key}/read") == readers:
                mailbox.drop(key)
                mailbox.drop(f"{key}/read")
            return body

        body = self._visit(errand, doing="wait for rank 0", within_s=timeout_s)
        if body is None:
            raise RanksSilent(
                f"rank 0 did not decide within {timeout_s:g} s whether step {step} is saved: it has not reached this"
                " step, or has ended",
                hint="call step() on all ranks; a step that takes longer needs a larger Options.timeout_s",
                ranks=[0],
            )
        return msgspec.msgpack.decode(body, type=Decision)

    def _calls_per_interval(self) -> int:
        """Estimate how many calls take about an interval; at most twice as many as last time."""
        now = self._clock()
        each_s = max(1e-6, (now - self._last_s) / self._calls_since)
        self._last_s = now
        return max(1, min(int(self._interval_s / each_s), 2 * self._calls_since, _MAX_CALLS))

    def _visit(self, errand: Callable[[KVMailbox], T], *, doing: str, within_s: float | None = None) -> T:
        if self._world.store is None:  # unreachable: a single rank decides without a store
            raise RanksSilent("there is no key-value store", ranks=[])
        try:
            return with_mailbox(self._world.store, self._world.size, errand, within_s=within_s or self._world.timeout_s)
        except StoreUnreachable as lost:
            others = list(range(1, self._world.size)) if self._world.rank == 0 else [0]
            hint = "the process that held the key-value store has ended: rank 0, or torchrun itself"
            raise RanksSilent(f"could not {doing}: {lost}", hint=hint, ranks=others) from lost


BackgroundTask = SaveHandle[Any] | Future[Any]
"""A save, or a replication round."""


class PendingTasks:
    """Background tasks whose end was not reported yet, numbered by calls: a number means the same on all ranks."""

    def __init__(self, *, raises: bool = False) -> None:
        """`raises`: errors are raised by a later call, so an error that was never raised is printed at exit."""
        self._raises = raises
        self._tasks: dict[int, BackgroundTask] = {}
        self.count = 0
        """How many tasks were begun, including skipped ones."""

    def add(self, task: BackgroundTask) -> None:
        """Add a task. The Checkpointer, and not the next save of the process, reports the error of a save."""
        if isinstance(task, SaveHandle):
            task.retrieved, task.reported_later = True, self._raises
        self._tasks[self.count] = task
        self.count += 1

    def skip(self) -> None:
        """Count a task that failed to begin on this rank, because it may run on other ranks."""
        self.count += 1

    def failed(self) -> list[int]:
        """Return the numbers of tasks that have failed by now on this rank; forget those that succeeded."""
        ended = [number for number, task in self._tasks.items() if task.done()]
        failed = [number for number in ended if _error_of(self._tasks[number]) is not None]
        for number in set(ended) - set(failed):
            del self._tasks[number]
        return failed

    def running(self) -> bool:
        """Return whether a task has not ended; may be called by any thread."""
        return any(not task.done() for task in list(self._tasks.values()))

    def end(self, numbers: Collection[int]) -> list[BaseException]:
        """Wait for tasks to end, forget them, and return their errors."""
        errors = []
        for number in sorted(numbers):
            task = self._tasks.get(number)
            if task is None:  # it succeeded here, or its call raised
                continue
            error = _error_of(task)
            del self._tasks[number]
            if isinstance(task, SaveHandle):
                task.reported_later = False
            if error is not None:
                errors.append(error)
        return errors

    def end_all(self, but: int = 0) -> list[BaseException]:
        """Wait for all tasks to end, except for the last `but`; forget them, and return their errors."""
        return self.end([number for number in self._tasks if number < self.count - but])


def _error_of(task: BackgroundTask) -> BaseException | None:
    """Wait, and return the error without marking it as retrieved by the user."""
    return task.outcome() if isinstance(task, SaveHandle) else task.exception()


class RankContext:
    """The ranks of a Checkpointer. Nothing is exchanged before `world` or `decisions` is first used."""

    def __init__(
        self, url: str, clock: Clock, *, group: ProcessGroup | World | None, timeout_s: float, arguments: list[Any]
    ) -> None:
        """`url` is the root, in messages; `arguments` are those of the Checkpointer that must be the same on all ranks."""
        self.clock = clock
        self._url, self._arguments, self._group, self._timeout_s = url, arguments, group, timeout_s
        # Not cached properties: before Python 3.12 these share one lock, and ranks that are threads would block each other.
        self._world: World | None = None
        self._decisions: StepDecisions | None = None

    @property
    def world(self) -> World:
        """The ranks, with keys of their own, apart from those of saves and loads."""
        if self._world is None:
            self._world = current_world(self._group, timeout_s=self._timeout_s).with_prefix("checkpointers")
        return self._world

    def why_gone(self, world: World) -> str:
        """Return why the ranks that there were can do nothing together any more; empty if they can."""
        try:
            now = current_world(self._group, timeout_s=self._timeout_s)
        except (RanksDisagree, ValueError, RuntimeError):  # torch does not know the group
            now = None
        return "" if now and now.size == world.size else "the process group no longer exists"

    @property
    def decisions(self) -> StepDecisions:
        """The decisions of the ranks; first used by all ranks at the same time, which compares their arguments."""
        if self._decisions is None:
            session = ""
            if not self.world.solo:
                with rendezvous(self.world, f"steps of {self._url}") as meeting:
                    mine = msgspec.json.encode(self._arguments)
                    session = meeting.agree("begin", lambda: mine, _new_session).decode()
            self._decisions = StepDecisions(self.world, session, self.clock)
        return self._decisions


def _new_session(arguments: list[bytes]) -> list[bytes]:
    for rank, each in enumerate(arguments):
        if each != arguments[0]:
            raise RanksDisagree(
                f"the Checkpointer of rank {rank} was made with {each.decode()}, that of rank 0 with"
                f" {arguments[0].decode()}",
                hint="make it with the same arguments on all ranks",
            )
    return [secrets.token_hex(8).encode()] * len(arguments)
