"""
Decisions that all ranks follow although only one rank knows the reason: a signal, a request, the time, a failed save.

Rank 0 decides some calls ahead, so that a call finds its decision in memory. A thread of rank 0 decides and publishes in
torch's key-value store; a thread of each other rank reads. How many calls ahead follows from the time that calls take: far
enough for every rank to read in time, and no farther, because a request is honoured at the first call that is not decided.
If calls are slow, that is the next one, which is decided shortly before it is expected. A rank that makes a call before
its decision has arrived waits for it. No collective is used, and ranks wait only for rank 0.

Most decisions say that nothing is to be done: they are part of one number. The keys, below one prefix per Checkpointer:

    now             how many calls are decided, and how many of them are events; overwritten
    event/N         the Nth event: a decision to do something
    event/N/read    how many ranks have read it; the last one deletes both
    asks/KIND       some rank received a request of this kind; deleted by rank 0
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from operator import sub
from statistics import median
from typing import TYPE_CHECKING, Any, cast
from weakref import ReferenceType, WeakMethod, ref

import msgspec

from shardkeep.dist.kv import GRACE_S, KVMailbox
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World, current_world
from shardkeep.engine.queue import SaveHandle
from shardkeep.errors import CheckpointError, RanksDisagree, RanksSilent
from shardkeep.manage.schedule import CLOCK, REQUEST_KINDS, Clock

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_MOST_AHEAD = 50  # calls: fast steps may become slow ones, and a signal should not wait for many of them
_LOOKS_PER_S = 8192
"""How many times a second all ranks together look for new decisions. A TCPStore answers 35,000 requests a second."""
_TIMED = 6  # from how many calls the time of a call is estimated: by the median, so that one slow step changes nothing
_REMEMBERED = 4 * _MOST_AHEAD  # calls whose steps are kept, to be compared with rank 0's


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    step: int = -1
    """The step that the rank is at; not sent."""
    why: str = ""
    """The reason to save at this step; empty: save only if the step number says so."""
    stop: bool = False
    """Whether a signal is the reason: the call waits for the save, and training should end."""
    failed: list[list[int]] = []
    """Numbers of saves, and of replication rounds, that failed and were not reported before."""

    @property
    def is_event(self) -> bool:
        return bool(self.why) or any(self.failed)


class _Progress(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 publishes again and again."""

    decided: int
    """Calls with lower numbers are decided."""
    events: int
    """How many of them are events."""
    call: int
    step: int


Decide = Callable[[Collection[str]], Decision]
"""Makes a decision on rank 0, given the requests of other ranks. Called by one thread, which need not be the main one."""
TakeRequests = Callable[[], Collection[str]]
"""Returns the requests that reached this rank since the last call."""


class StepDecisions:
    """The decisions of one rank: one thread asks for them, and another one makes or reads them ahead."""

    def __init__(
        self, world: World, session: str, take_requests: TakeRequests, decide: Decide, clock: Clock = CLOCK
    ) -> None:
        """`session` is the same on all ranks, and new for each Checkpointer."""
        self._world = world.with_prefix(f"decisions/{session}")
        self._take_requests, self._decide, self._clock = take_requests, decide, clock.monotonic
        self._tick_s = clock.interval_s / 4
        """How often the thread looks for requests of its own rank. 0: a call is decided only when rank 0 makes it."""
        self._look_s = max(self._tick_s, world.size / _LOOKS_PER_S)
        """How often a rank looks for new decisions when it needs some."""
        self._changed = threading.Condition()
        self._calls = self._decided = self._events_seen = 0
        """How many calls this rank has made, how many are known to be decided, and how many of those are events."""
        self._events: dict[int, Decision] = {}  # events that are still to come, by their calls
        self._held = False
        """On rank 0: the last call that is decided is an event. What follows depends on it, and is decided after it."""
        self._begun_s: deque[float] = deque(maxlen=_TIMED)  # when the last calls began
        self._looked_s = -math.inf
        self._steps: dict[int, int] = {}  # the steps of the last calls of this rank
        self._leader_steps: dict[int, int] = {}  # steps of rank 0 at calls that this rank has not made yet
        self._thread: threading.Thread | None = None
        self._asking = False  # whether a request to the key-value store has not ended
        self._failure: Exception | None = None  # why the thread has ended
        self._closed = False

    def next(self, step: int) -> Decision:
        """Count a call, and return what was decided for it. Waits only if that has not arrived."""
        if self._world.solo:
            return msgspec.structs.replace(self._decide(()), step=step)
        with self._changed:
            call, self._calls = self._calls, self._calls + 1
            self._begun_s.append(self._clock())
            self._steps[call] = step
            self._steps.pop(call - _REMEMBERED, None)
            if call >= self._decided:
                self._wait_for(call, step)
            self._compare(call, self._leader_steps.pop(call, step))
            made = self._events.pop(call, None) or Decision()
        return msgspec.structs.replace(made, step=step)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(GRACE_S)

    def _wait_for(self, call: int, step: int) -> None:
        if self._thread is None:
            mailbox = KVMailbox(cast("Store", self._world.store), self._world.size, threading.Event())
            takes = ref(self), self._changed, mailbox
            self._thread = threading.Thread(target=_take_turns, args=takes, daemon=True, name="shardkeep-decisions")
            self._thread.start()
            at_exit(self.close)  # a thread that Python ends inside torch's store may end the process with a fault
        self._changed.notify_all()
        timeout_s = self._world.timeout_s * (2 if self._world.rank else 1)
        self._changed.wait_for(lambda: self._decided > call or self._failure is not None, timeout_s + GRACE_S)
        if self._decided > call:
            return
        failure = self._failure
        if failure is not None:  # a later call tries again
            self._failure = self._thread = None
            if isinstance(failure, CheckpointError) or not isinstance(failure, (RuntimeError, OSError)):
                raise failure
        elif self._world.rank and not self._asking:
            raise RanksSilent(
                f"rank 0 did not decide within {timeout_s:g} s whether step {step} is saved: it has not reached this"
                " step, or has ended",
                hint="call step() on all ranks; a step that takes longer needs a larger Options.timeout_s",
                ranks=[0],
            )
        what = "wait for rank 0" if self._world.rank else "publish a decision"
        # torch's stores raise RuntimeError, and append a C++ stack.
        why = next(iter(str(failure or f"the store did not answer for {timeout_s:g} s").strip().splitlines()), failure)
        raise RanksSilent(
            f"could not {what}: {why}",
            hint="the process that held the key-value store has ended: rank 0, or torchrun itself",
            ranks=[0] if self._world.rank else list(range(1, self._world.size)),
        ) from failure

    def _compare(self, call: int, leader_step: int) -> None:
        """Compare the step of this rank at a call, if it is remembered, with that of rank 0."""
        step = self._steps.get(call, leader_step)
        if step != leader_step:
            raise RanksDisagree(
                f"rank {self._world.rank} is at step {step}, and rank 0 at step {leader_step}",
                hint="call step() on all ranks, with the same steps in the same order",
            )

    def _call_s(self) -> float:
        """Estimate how long a call and the training before it take; infinite while too few were made."""
        begun = list(self._begun_s)
        return max(1e-6, median(map(sub, begun[1:], begun))) if len(begun) > 2 and self._tick_s else math.inf

    def _least_ahead_s(self) -> float:
        """Return how early a call must be decided: other ranks look in intervals."""
        return min(self._look_s + self._tick_s, self._call_s() * _MOST_AHEAD / 2)

    def _next_s(self) -> float:
        """Estimate the time to this rank's next call; negative if that is late."""
        return self._begun_s[-1] + self._call_s() - self._clock()

    def _due_in_s(self) -> float:
        """Return how long the thread may wait before it decides or looks."""
        waits = self._calls > self._decided
        if not waits and (self._held or self._call_s() == math.inf):
            return math.inf
        # Until the first call that is not decided is so near that it should be.
        left_s = max(0.0, self._next_s()) + (self._decided - self._calls) * self._call_s() - self._least_ahead_s()
        if self._world.rank == 0:
            return 0.0 if waits else left_s
        looked_s = self._clock() - self._looked_s
        if waits:
            waited_s = self._clock() - self._begun_s[-1]
            quick_s, slow_s = self._world.size / _LOOKS_PER_S / 2, max(0.1, 2 * self._look_s)
            return min(slow_s, max(0.0005, quick_s, waited_s / 4)) - looked_s if looked_s < waited_s else 0.0
        return max(left_s, self._look_s - looked_s, -self._next_s() / 4 - looked_s)

    def _decide_until(self) -> int:
        """Return how many calls to decide now, of all that are ever made."""
        each_s, least = self._call_s(), self._decided + 1
        if each_s == math.inf:
            return least
        ahead = (self._least_ahead_s() + self._look_s - max(0.0, self._next_s())) / each_s
        return max(least, self._calls + min(_MOST_AHEAD, math.ceil(ahead)))

    def _turn(self, mailbox: KVMailbox) -> None:
        try:
            with self._changed:
                due = self._due_in_s() <= 0
            self._asking = True
            if self._world.rank > 0:
                for kind in self._take_requests():
                    mailbox.put(f"asks/{kind}", b"")
            if due and not self._closed:
                self._look(mailbox) if self._world.rank else self._lead(mailbox)
            self._asking = False
        except Exception as error:  # noqa: BLE001 - raised by the call that waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _pause_s(self) -> float | None:
        """Return how long the thread may wait; None if it is to end."""
        if self._closed or self._failure is not None:
            return None
        pause_s = self._due_in_s()
        if pause_s > 0 and self._calls <= self._decided:  # the later a call is, the longer training may pause
            pause_s = max(pause_s, -self._next_s() / 4)
        return min(pause_s, self._tick_s or threading.TIMEOUT_MAX)

    def _lead(self, mailbox: KVMailbox) -> None:
        """Decide some calls ahead, and publish that; the first one is an event if there is something to do."""
        # A request that arrives between `there` and `drop` is honoured too, because the decision is made after both.
        requested = [kind for kind in REQUEST_KINDS if mailbox.there(f"asks/{kind}")]
        for kind in requested:
            mailbox.drop(f"asks/{kind}")
        made = self._decide(requested)
        with self._changed:
            event, call = self._decided, self._calls - 1
            decided = event + 1 if made.is_event else self._decide_until()
            step = self._steps[call]
        if made.is_event:
            mailbox.put(f"event/{self._events_seen}", msgspec.msgpack.encode((event, made)))
        events = self._events_seen + made.is_event
        mailbox.put("now", msgspec.msgpack.encode(_Progress(decided, events, call, step)))
        with self._changed:
            if made.is_event:
                self._events[event] = made
            self._decided, self._events_seen, self._held = decided, events, made.is_event
            self._changed.notify_all()

    def _look(self, mailbox: KVMailbox) -> None:
        body = mailbox.peek("now")
        self._looked_s = self._clock()
        if body is None:
            return
        now = msgspec.msgpack.decode(body, type=_Progress)
        events: dict[int, Decision] = {}
        for number in range(self._events_seen, now.events):
            key = f"event/{number}"
            call, made = msgspec.msgpack.decode(mailbox.read([key])[0], type=tuple[int, Decision])
            events[call] = made
            if mailbox.count(f"{key}/read") == self._world.size - 1:
                mailbox.drop(key)
                mailbox.drop(f"{key}/read")
        with self._changed:
            # First: if the comparison fails, these events must not be read again, because they may be deleted by then.
            self._events |= events
            self._events_seen = now.events
            if now.call >= self._calls:
                self._leader_steps[now.call] = now.step
            else:
                self._compare(now.call, now.step)
            self._decided = now.decided
            self._changed.notify_all()


def _take_turns(decisions: ReferenceType[StepDecisions], changed: threading.Condition, mailbox: KVMailbox) -> None:
    """The thread. It holds nothing while it waits, so that a Checkpointer that is dropped without `close` is freed."""
    while True:
        with changed:
            found = decisions()
            if found is None or (pause_s := found._pause_s()) is None:
                return
            found = None
            if pause_s > 0:
                changed.wait(pause_s)
        if (found := decisions()) is not None:
            found._turn(mailbox)
            found = None


BackgroundTask = SaveHandle[Any] | Future[Any]


class PendingTasks:
    """Background tasks whose end was not reported yet, numbered by calls: a number means the same on all ranks."""

    def __init__(self, *, raises: bool = False) -> None:
        """`raises`: errors are raised by a later call, so an error that was never raised is printed at exit."""
        self._raises = raises
        self._tasks: dict[int, BackgroundTask] = {}
        self.count = 0  # how many tasks were begun, including skipped ones

    def add(self, task: BackgroundTask) -> None:
        """Add a task. The Checkpointer, and not the next save of the process, reports the error of a save."""
        if isinstance(task, SaveHandle):
            task.retrieved, task.reported_later = True, self._raises
        for number, each in list(self._tasks.items()):
            if each.done() and _error_of(each) is None:
                del self._tasks[number]
        self._tasks[self.count] = task
        self.count += 1

    def skip(self) -> None:
        self.count += 1  # a task that failed to begin on this rank may run on other ranks

    def failed(self) -> list[int]:
        """Return the numbers of tasks that have failed by now on this rank; may be called by any thread."""
        return [number for number, task in list(self._tasks.items()) if task.done() and _error_of(task) is not None]

    def running(self) -> bool:
        """Return whether a task has not ended; may be called by any thread."""
        return any(not task.done() for task in list(self._tasks.values()))

    def end(self, numbers: Collection[int]) -> list[BaseException]:
        """Wait for tasks to end, forget them, and return their errors."""
        errors = []
        for number in sorted(self._tasks.keys() & set(numbers)):  # any other one succeeded here, or its call raised
            task = self._tasks[number]
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
        # Not cached: before Python 3.12 cached properties share one lock, and ranks that are threads would block each other.
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

    def decide(self, step: int, take_requests: TakeRequests, decide: Decide) -> Decision:
        """Return what is decided for a step; all ranks begin at the same time, which compares their arguments."""
        if self._decisions is None:
            with rendezvous(self.world, f"steps of {self._url}") as meeting:
                mine = msgspec.json.encode(self._arguments)
                session = meeting.agree("begin", lambda: mine, _new_session).decode()
            self._decisions = StepDecisions(self.world, session, take_requests, decide, self.clock)
        return self._decisions.next(step)

    def close(self) -> None:
        if self._decisions is not None:
            self._decisions.close()


def _new_session(arguments: list[bytes]) -> list[bytes]:
    for rank, each in enumerate(arguments):
        if each != arguments[0]:
            raise RanksDisagree(
                f"the Checkpointer of rank {rank} was made with {each.decode()}, that of rank 0 with"
                f" {arguments[0].decode()}",
                hint="make it with the same arguments on all ranks",
            )
    return [secrets.token_hex(8).encode()] * len(arguments)


def at_exit(method: Any) -> None:
    """Call a method at exit before threads are joined, if its object still exists and the process was not forked."""
    reference, process_id = WeakMethod(method), os.getpid()

    def call() -> None:
        if (found := reference()) is not None and os.getpid() == process_id:
            found()

    threading._register_atexit(call)  # type: ignore[attr-defined]  # there is no public way
