"""What a Checkpointer takes from the world around it, in one value, so that tests can give it another one."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from types import FrameType
from typing import Any

from shardkeep.errors import BlobNotFound, CheckpointError, StateError
from shardkeep.manage.background import DaemonWorker
from shardkeep.manage.lease import LEASE_S
from shardkeep.storage.base import Store, is_name, is_sequential

INTERVAL_S = 1.0
"""Between decisions, about."""


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Clocks and waits."""

    clock: Callable[[], float] = time.monotonic
    """Never jumps."""
    now: Callable[[], datetime] = _utc_now
    """The time of day, with its zone."""
    sleep: Callable[[float], object] = time.sleep
    interval_s: float = INTERVAL_S
    """About how often ranks talk about what only one of them knows, and how often the request file is looked for."""
    lease_s: float = LEASE_S


# When a save is due: by the step alone, or by what only one rank knows.
#
# `Steps` is a pure function of the steps that were passed, the same on all ranks, which therefore need not ask each
# other.
# `Timer` and `Flag` hold what comes from outside: the time, signals, requests.


class StepSchedule:
    """Which steps are due by their number."""

    def __init__(self, every: int | None = None, at: Iterable[int] = ()) -> None:
        """
        Say which.

        Args:
            every: each time that a multiple of it is reached or passed; 0 is none.
            at: each time that one of these is reached or passed.

        """
        if every is not None and every < 1:
            raise StateError(f"every_steps={every!r}", hint="give a number of steps, 1 or more, or None")
        self._every = every
        self._at = sorted(at)
        self._last: int | None = None

    def begin_after(self, step: int) -> None:
        """Count from a step that is done, as one that was restored."""
        self._last = step

    def reached(self, step: int) -> str:
        """Take note of a step, and return why it is due; nothing where it is not."""
        last = step - 1 if self._last is None else self._last
        self._last = max(step, last)
        if self._every is not None and step > 0 and step // self._every > last // self._every:
            return f"every {self._every} steps"
        if bisect_right(self._at, step) > bisect_right(self._at, last):
            return "at a given step"
        return ""


class Timer:
    """Due once so much time has passed since the last save; by a clock that never jumps."""

    def __init__(self, minutes: float | None, clock: Callable[[], float]) -> None:
        """Count from now."""
        if minutes is not None and not minutes > 0:
            raise StateError(f"every_minutes={minutes!r}", hint="give a time in minutes, more than 0, or None")
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._clock = clock
        self._since = clock()

    def due(self) -> bool:
        """Say whether it has passed."""
        return self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        """Count from now."""
        self._since = self._clock()


class Flag:
    """Something that was asked for, perhaps by a signal handler, which may come in the middle of anything: no lock."""

    def __init__(self) -> None:
        self._counter = itertools.count(1)
        self._asked = 0
        self._seen = 0

    def raise_(self) -> None:
        """Ask."""
        self._asked = next(self._counter)

    def take(self) -> bool:
        """Say whether it was asked for since the last time."""
        before, self._seen = self._seen, self._asked
        return before != self._seen


# What asks for a save but the number of a step: time, signals, a file in the root, a call.

log = logging.getLogger("shardkeep")

SAVE, STOP = "save", "stop"
REQUEST_KINDS = (SAVE, STOP)
_RESERVED_NAMES = re.compile(r"lease.*|latest|pin\..*")
"""Files of a root that are not to be deleted because they are there."""
_QUIET_S = 5.0
"""A signal that is sent to all ranks reaches some of them later: within this time it is one and the same."""


class SaveRequests:
    """What was asked for on this rank; on rank 0 also what the others pass on."""

    def __init__(
        self, root: Store, file: str | None, timer: Timer, *, clock: Callable[[], float], interval_s: float
    ) -> None:
        """
        Begin to listen.

        Args:
            root: where the file would be.
            file: what the blob is called that asks for a save.
            timer: when the time has come.
            clock: never jumps.
            interval_s: how often to look for the file.

        """
        if file is not None and (not is_name(file) or _RESERVED_NAMES.fullmatch(file)):
            hint = "give the name of a file in the root that is not used for something else, or None"
            raise StateError(f"request_file={file!r}", hint=hint)
        self.save = Flag()
        self.stop = Flag()
        self.timer = timer
        self._root = root
        self._file = file
        self._clock = clock
        self._interval_s = interval_s
        self._looked_s = clock() - interval_s
        self._stuck = False
        # Training must not wait for a service that does not answer; a disk is asked at once.
        self._lane = DaemonWorker("shardkeep-requests") if is_sequential(root) else None
        self._look: Future[bool] | None = None
        # The last one that was served: whether it came to this rank, and when.
        self._signal: tuple[bool, float] | None = None
        self._stop_later = False

    def stop_later(self) -> None:
        """Serve a signal again, as the save that it asked for has failed."""
        self._stop_later = True

    def take(self) -> list[str]:
        """Return what was asked for on this rank, to be passed on to rank 0."""
        return [kind for kind, flag in ((SAVE, self.save), (STOP, self.stop)) if flag.take()]

    def why(self, asked: Collection[str]) -> tuple[str, bool]:
        """On rank 0: say why to save now (nothing: do not), and whether a signal asked for it."""
        if self._signalled(asked):
            return "a signal came", True
        if self.save.take() or SAVE in asked:
            return "it was asked for", False
        if self._file_found():
            return f"{self._file} was there", False
        return ("the time has come", False) if self.timer.due() else ("", False)

    def _signalled(self, asked: Collection[str]) -> bool:
        again, self._stop_later = self._stop_later, False
        if again:
            self._signal = None
        own = self.stop.take() or again
        if not own and STOP not in asked:
            return False
        now = self._clock()
        if self._signal is not None and now - self._signal[1] < _QUIET_S and not (own and self._signal[0]):
            return False  # the same, which reached another rank later; only this rank can tell a second one of its own
        self._signal = own, now
        return True

    def _file_found(self) -> bool:
        """Look for the file, in the background where that may take long: then this is what was seen the last time."""
        if self._look is not None:
            if not self._look.done():
                return False
            look, self._look = self._look, None
            if look.result():
                return True
        if self._file is None or self._clock() - self._looked_s < self._interval_s:
            return False
        self._looked_s = self._clock()
        if self._lane is None:
            return self._taken(self._file)
        self._look = self._lane.submit(self._taken, self._file)
        return False

    def _taken(self, file: str) -> bool:
        """Look for the file, and take it away."""
        try:
            self._root.open(file).close()
        except BlobNotFound:
            self._stuck = False
            return False
        except CheckpointError as error:
            log.warning("cannot look for %s in %s: %s", file, self._root.url, error)
            return False
        if self._stuck:  # it was served, and cannot be deleted
            return False
        try:
            self._root.delete(file)
        except CheckpointError as error:
            self._stuck = True
            log.warning("%s asks for no more saves until somebody deletes it: %s", file, error)
        return True


# Signals that ask for a save: a handler that sets a flag, and calls the handler that was there before.
#
# A handler that is still there after `remove` (others put theirs on top of it, or it was called outside the main
# thread),
# or in a process that was forked, acts as what was there before: a signal is never swallowed.

_MAIN_THREAD_HINT = "make the Checkpointer in the main thread, or without signals"


def parse_signals(signals: Iterable[int | str]) -> list[signal.Signals]:
    """
    Find signals by number or by name ("SIGTERM").

    Raises:
        StateError: there is no such signal.

    """
    found = []
    for each in [signals] if isinstance(signals, (int, str)) else signals:
        try:
            found.append(signal.Signals[each] if isinstance(each, str) else signal.Signals(each))
        except (KeyError, ValueError) as exc:
            raise StateError(f"signals: there is no signal {each!r}", hint='as in signals=("SIGTERM",)') from exc
    return found


class SignalHandlers:
    """Handlers that stay until `remove`."""

    def __init__(self, signals: Iterable[signal.Signals], told: Callable[[], None]) -> None:
        """
        Set the handlers.

        Args:
            signals: which.
            told: is called when one comes, in the main thread, in the middle of anything: it may only set a flag.

        Raises:
            StateError: this is not the main thread, or a signal cannot be handled.

        """
        self._told = told
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._removed = False
        wanted = list(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            raise StateError(
                "signals can be handled only where Python handles them: in the main thread", hint=_MAIN_THREAD_HINT
            )
        try:
            for each in wanted:
                self._before[each] = signal.signal(each, self._handle)
        except (OSError, ValueError) as exc:  # SIGKILL, or a thread of another interpreter
            self.remove()
            raise StateError(f"signals: {each.name} cannot be handled: {exc}", hint=_MAIN_THREAD_HINT) from exc

    def remove(self) -> None:
        """Put back what was there before, where nobody else has put something there since. Safe when called twice."""
        self._removed = True
        if threading.current_thread() is not threading.main_thread():
            return  # nobody else may; a signal that comes puts it back
        for each in self._before:
            self._put_back(each)

    def _put_back(self, each: signal.Signals) -> None:
        if signal.getsignal(each) == self._handle:
            # None: it was set by something that is not Python, and cannot be put back.
            before = self._before[each]
            signal.signal(each, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        each = signal.Signals(number)
        before = self._before.get(each)
        if not self._removed and os.getpid() == self._pid:
            self._told()
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)
        elif callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            # As if there had never been a handler: the system's own action, which often ends the process.
            signal.signal(each, signal.SIG_DFL)
            signal.raise_signal(each)
