"""
Events: what happens to checkpoints, as values that callbacks receive.

A callback is called with each event of this process, on the thread where it happens, and has to be quick. What it raises is
logged, once, and never reaches the save or load. Without listeners, no event is made.
Events are plain data: `msgspec.json.encode(event)` is a JSON object whose "event" says which one it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection

import msgspec

from shardkeep.display import format_seconds

log = logging.getLogger("shardkeep")


class Span(msgspec.Struct, frozen=True, gc=False):
    """One phase of a call on one rank."""

    name: str
    """
    Of a save: "queue" (waiting for earlier saves), "describe", "plan" (until every rank has its write plan), "stage", "write",
    "wait" (until the other ranks have written), "commit". Of a load: "open", "plan", "read", "place".
    """
    begin_s: float
    """Seconds since the call; for another rank, since rank 0's call, so it may be negative."""
    end_s: float
    nbytes: int = 0
    """Bytes that were moved; 0 if none are, or they are not counted."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class RankPhases(msgspec.Struct, frozen=True, gc=False):
    """What one rank did in a call."""

    rank: int
    spans: list[Span]
    late_s: float = 0.0
    """How much later than the first rank it made the call, so that others waited for it."""


class Slowest(msgspec.Struct, frozen=True):
    """The rank that the others waited for longest, and in which phase; "late": it made the call late."""

    rank: int
    phase: str
    seconds: float
    median_s: float
    """The median of all ranks for that phase."""

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.phase} {format_seconds(self.seconds)} (median {format_seconds(self.median_s)})"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """The fields of all events."""

    time_s: float = msgspec.field(default_factory=time.time)
    """When it happened: seconds since 1970, by this machine's clock."""
    rank: int
    """Of this process, among those that made the call."""
    where: str
    """The checkpoint."""
    step: int | None = None


class ErrorEvent(Event, frozen=True, kw_only=True):
    """The fields of events that report an error."""

    kind: str
    """The class of the error."""
    message: str


class CallFailed(ErrorEvent, frozen=True, kw_only=True):
    """The fields of events that report the error of a call."""

    called_s: float
    seconds: float
    phases: list[Span] = []


class CallSucceeded(Event, frozen=True, kw_only=True):
    """The fields of events that report the success of a call."""

    called_s: float
    """When the call was made, by `time.perf_counter()` of this process: a clock that never jumps."""
    seconds: float
    """From the call until the save was committed, or the state was filled."""
    phases: list[Span]
    """What this rank did."""
    save_id: str
    bytes_total: int
    """Of a save: tensor bytes of the whole checkpoint. Of a load: read by all ranks; on other ranks than 0, by this one."""
    gb_per_s: float
    """`bytes_total` over `seconds`."""
    ranks: list[RankPhases] = []
    """What all ranks did; only on rank 0."""
    slowest: Slowest | None = None
    """Only on rank 0, if there are several ranks."""


class SaveBegan(Event, frozen=True, kw_only=True):
    """A save was called. `SaveCommitted` or `SaveFailed` follows."""

    background: bool
    """Whether training goes on meanwhile."""


class SaveProgressed(Event, frozen=True, kw_only=True):
    """How far a save has come on this rank. Emitted a few times a second, and only to callbacks that name this class."""

    bytes_staged: int
    bytes_written: int
    bytes_total: int
    """What this rank writes."""


class SaveStaged(Event, frozen=True, kw_only=True):
    """All of the state may be changed again, on this rank. Only for saves in the background."""

    seconds: float
    """Since the call."""


class SaveWritten(Event, frozen=True, kw_only=True):
    """All files of this rank are written. Nothing is committed yet."""

    seconds: float
    """Since the call."""
    bytes_written: int


class SaveCommitted(CallSucceeded, frozen=True, kw_only=True):
    """The checkpoint is durable and complete."""

    tensors: int
    bytes_written: int
    """By this rank, headers included."""
    blocked_s: float
    """How long the call took."""
    staged_s: float
    """From the call until all of the state could be changed."""
    written_s: float
    """From the call until every rank had written its files."""


class SaveFailed(CallFailed, frozen=True, kw_only=True):
    """A save ended without a checkpoint. A checkpoint that was committed there before is unchanged."""

    cancelled: bool


class LoadBegan(Event, frozen=True, kw_only=True):
    """A load was called. `LoadFinished` or `LoadFailed` follows."""


class LoadFinished(CallSucceeded, frozen=True, kw_only=True):
    """The state is filled, on all ranks."""

    bytes_read: int
    """By this rank, headers included."""
    bytes_received: int
    """By this rank, from others."""


class LoadFailed(CallFailed, frozen=True, kw_only=True):
    """A load ended without filling the state."""


class Retried(ErrorEvent, frozen=True, kw_only=True):
    """An operation failed, and is retried."""

    attempt: int
    """Which attempt failed, from 1."""
    wait_s: float
    """Until the next attempt."""


class Pruned(Event, frozen=True, kw_only=True):
    """Retention removed a checkpoint."""

    nbytes: int = 0
    reason: str = ""


class PruneFailed(ErrorEvent, frozen=True, kw_only=True):
    """A checkpoint, or what is left of one, could not be removed. The next save tries it again."""


class PromotionBegan(Event, frozen=True, kw_only=True):
    """A checkpoint is copied to the far root (`where`). `PromotionFinished` or `PromotionFailed` follows."""

    source: str
    """Where it is copied from."""
    bytes_total: int
    """Of all its files."""


class PromotionFinished(Event, frozen=True, kw_only=True):
    """A checkpoint is committed in the far root, too."""

    called_s: float
    """When this rank began to wait for rank 0's choice, by `time.perf_counter()` of this process."""
    source: str
    bytes_total: int
    bytes_copied: int
    """By all ranks together; the rest was already there, from an interrupted promotion, and is intact."""
    files_total: int
    files_copied: int
    seconds: float
    """Since it was chosen."""
    ranks: list[RankPhases] = []
    """Phases "choose", "copy", "wait" (until the other ranks have copied) and "commit"; only on rank 0."""


class PromotionFailed(ErrorEvent, frozen=True, kw_only=True):
    """A checkpoint could not be promoted now. It is unchanged in the root it was saved to."""

    source: str
    cancelled: bool
    seconds: float
    """Since it was chosen; if none was, since this rank began to wait for the choice."""


class StepSkipped(Event, frozen=True, kw_only=True):
    """A checkpoint cannot be restored, and the one before it is tried."""

    reason: str


Callback = Callable[[Event], object]


def log_safely(level: int, message: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log a line. A log handler that raises must not fail the save or load."""
    with contextlib.suppress(Exception):
        log.log(level, message, *args, exc_info=exc_info)


class Listening(contextlib.AbstractContextManager["Listening"]):
    """A callback that receives events until `stop`, or the end of a `with` block."""

    def __init__(self, callback: Callback, kinds: tuple[type[Event], ...] | None) -> None:
        self._callback = callback
        self._kinds = kinds
        self._failed = False
        _all_listening().append(self)

    def stop(self) -> None:
        """Stop calling it. May be called twice."""
        with contextlib.suppress(ValueError):
            _all_listening().remove(self)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wants(self, kind: type[Event]) -> bool:
        """Return whether it receives such events."""
        return kind is not SaveProgressed if self._kinds is None else issubclass(kind, self._kinds)

    def hear(self, event: Event) -> None:
        """Call the callback; only a KeyboardInterrupt is raised from it."""
        try:
            self._callback(event)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a failing callback must not fail a save
            if not self._failed:
                self._failed = True
                log_safely(
                    logging.WARNING,
                    "%r failed at %s; later failures of it are not logged",
                    self._callback,
                    type(event).__name__,
                    exc_info=error,
                )


def on_event(callback: Callback, *, kinds: Collection[type[Event]] | None = None) -> Listening:
    """
    Call a function with each event of this process from now on.

    It is called on the thread where the event happens, which may be a background thread, and perhaps on several at a time. It has
    to be quick, and must not wait for the save that emits the event, which waits for the callback. What it raises is logged,
    once, and has no other effect.

    Args:
        callback: Called with the event.
        kinds: Only events of these classes; by default all but `SaveProgressed`.

    Returns:
        A handle: `stop()` ends it, as does leaving it as a context manager.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where, heard = tempfile.mkdtemp() + "/step-1", []
        >>> with sk.on_event(heard.append):
        ...     report = sk.save({"w": torch.ones(4)}, where)
        >>> [type(event).__name__ for event in heard]
        ['SaveBegan', 'SaveWritten', 'SaveCommitted']

    """
    return Listening(callback, None if kinds is None else tuple(kinds))


def emit(kind: type[Event], make: Callable[[], Event]) -> None:
    """Make an event and pass it to the callbacks that receive its kind; without any, no event is made."""
    if listening := [each for each in _all_listening().copy() if each.wants(kind)]:
        event = make()
        for each in listening:
            each.hear(event)


_listening: dict[int, list[Listening]] = {}


def _all_listening() -> list[Listening]:
    """Return those of this process: callbacks of a parent may use threads and files that a fork does not have."""
    return _listening.setdefault(os.getpid(), [])
