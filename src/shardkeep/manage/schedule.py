"""
When a save is due.

`StepSchedule` decides by the step number alone. Its answer is the same on all ranks, so ranks need not communicate.
`SaveRequests` collects what only one rank knows: elapsed time, signals, a request file in the root, a call of
`request_save`. Rank 0 turns these into a decision for all ranks (see `decisions`).
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from types import FrameType
from typing import Any

from shardkeep.errors import CheckpointError, StateError
from shardkeep.storage.base import Store, exists, is_name, is_sequential
from shardkeep.storage.cancel import spawn_daemon

log = logging.getLogger("shardkeep")

SAVE, STOP = "save", "stop"
REQUEST_KINDS = (SAVE, STOP)
_RESERVED_NAMES = re.compile(r"lease.*|latest|pin\..*")
"""Files of a root that must not serve as the request file, because the request file is deleted when it is found."""
_SAME_SIGNAL_S = 5.0
"""A signal sent to all ranks may reach some of them later. Within this time, rank 0 treats it as the same signal."""
_MAIN_THREAD_HINT = "make the Checkpointer in the main thread, or without signals"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clocks and intervals of a Checkpointer; tests replace them."""

    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)
    """The time of day, with its time zone."""
    sleep: Callable[[float], object] = time.sleep
    interval_s: float = 1.0
    """About how often ranks exchange decisions, and how often the request file is looked for."""
    lease_s: float = 300.0
    """How long a lease stays valid after its last renewal."""


CLOCK = Clock()


class StepSchedule:
    """Which steps are due by their number: each multiple of `every` that is reached or passed, and each step of `at`."""

    def __init__(self, every: int | None = None, at: Iterable[int] = ()) -> None:
        self._every = every
        self._at = sorted(at)
        self.last: int | None = None  # the step that is done: the last one, or one that was restored

    def reached(self, step: int) -> str:
        """Record a step, and return the reason why it is due, or an empty string."""
        last = step - 1 if self.last is None else self.last
        self.last = max(step, last)
        if self._every is not None and step > 0 and step // self._every > last // self._every:
            return "every step" if self._every == 1 else f"every {self._every} steps"
        if bisect_right(self._at, step) > bisect_right(self._at, last):
            return "at a given step"
        return ""


class SaveRequests:
    """The requests that reached this rank; on rank 0 also the time, and those that other ranks pass on."""

    def __init__(self, root: Store, file: str | None, clock: Clock, *, every_minutes: float | None = None) -> None:
        if file is not None and (not is_name(file) or _RESERVED_NAMES.fullmatch(file)):
            hint = "give the name of a file in the root that is not used for something else, or None"
            raise StateError(f"request_file={file!r}", hint=hint)
        self._received: deque[str] = deque()
        self._root = root
        self._file = file
        self._clock = clock.monotonic
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._saved_s = self._clock()
        self._interval_s = clock.interval_s
        self._looked_s = self._clock() - self._interval_s
        self._stuck = False  # whether the request file was honoured but could not be deleted
        self._look: Future[bool] | None = None  # a look for the file that runs in the background
        self._last_signal: tuple[bool, float] | None = None
        """Whether the last signal reached this rank itself, and when."""
        self.stop_again = False  # whether to honour the last signal again, because the save that it requested failed

    def request(self, kind: str) -> None:
        """Record a request. Any thread or signal handler may call this: it takes no lock, because a handler must not wait."""
        self._received.append(kind)

    def restart_timer(self) -> None:
        self._saved_s = self._clock()

    def take(self) -> list[str]:
        """Return the requests that reached this rank since the last call; ranks other than 0 pass them on to rank 0."""
        return sorted({self._received.popleft() for _ in range(len(self._received))})

    def why(self, requested: Collection[str]) -> tuple[str, bool]:
        """On rank 0: return the reason to save now, or an empty string, and whether a signal is the reason."""
        received = self.take()
        if self._signalled(requested, own=STOP in received):
            return "a signal came", True
        if SAVE in (*received, *requested):
            return "it was requested", False
        if self._file_found():
            return f"the file {self._file} was found", False
        due = self._clock() - self._saved_s >= self._every_s
        return ("every_minutes has passed", False) if due else ("", False)

    def _signalled(self, requested: Collection[str], *, own: bool) -> bool:
        again, self.stop_again = self.stop_again, False
        if again:
            self._last_signal = None
        own = own or again
        if not own and STOP not in requested:
            return False
        now = self._clock()
        last = self._last_signal
        if last is not None and now - last[1] < _SAME_SIGNAL_S and not (own and last[0]):
            # The same signal reached another rank later. Only a second signal to this very rank is known to be new.
            return False
        self._last_signal = own, now
        return True

    def _file_found(self) -> bool:
        """Look for the file. On a remote store this happens in the background, and the previous answer is returned."""
        if self._look is not None:
            if not self._look.done():
                return False
            look, self._look = self._look, None
            if look.result():
                return True
        if self._file is None or self._clock() - self._looked_s < self._interval_s:
            return False
        self._looked_s = self._clock()
        if not is_sequential(self._root):
            return self._take_file(self._file)
        # Training must not wait for a remote service that does not answer.
        self._look = spawn_daemon(partial(self._take_file, self._file), "shardkeep-requests")
        return False

    def _take_file(self, file: str) -> bool:
        try:
            if not exists(self._root, file):
                self._stuck = False
                return False
        except CheckpointError as error:
            log.warning("cannot look for %s in %s: %s", file, self._root.url, error)
            return False
        if self._stuck:
            return False
        try:
            self._root.delete(file)
        except CheckpointError as error:
            self._stuck = True
            log.warning("%s cannot be deleted, and is ignored until it is removed by hand: %s", file, error)
        return True


def parse_signals(signals: Iterable[int | str]) -> list[signal.Signals]:
    """Find signals by number or by name ("SIGTERM"); raise `StateError` for an unknown one."""
    found = []
    for each in [signals] if isinstance(signals, (int, str)) else signals:
        try:
            found.append(signal.Signals[each] if isinstance(each, str) else signal.Signals(each))
        except (KeyError, ValueError) as exc:
            raise StateError(f"signals: there is no signal {each!r}", hint='as in signals=("SIGTERM",)') from exc
    return found


class SignalHandlers:
    """
    Handlers that call `on_signal`, which may only set a flag, then the handler that was installed before, until `remove`.

    A handler that is still installed after `remove` (because another handler was put on top of it, or `remove` ran outside
    the main thread), or in a forked process, behaves like the previous handler, so that a signal is never lost.
    """

    def __init__(self, signals: Iterable[signal.Signals], on_signal: Callable[[], None]) -> None:
        """Install the handlers; raise `StateError` outside the main thread, or for a signal that cannot be handled."""
        self._on_signal = on_signal
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._removed = False
        wanted = list(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            raise StateError("Python handles signals only in the main thread", hint=_MAIN_THREAD_HINT)
        try:
            for each in wanted:
                self._before[each] = signal.signal(each, self._handle)
        except (OSError, ValueError) as exc:  # SIGKILL, or a thread of another interpreter
            self.remove()
            raise StateError(f"signals: {each.name} cannot be handled: {exc}", hint=_MAIN_THREAD_HINT) from exc

    def remove(self) -> None:
        """Reinstall the previous handlers, except where another one was installed since. Safe when called twice."""
        self._removed = True
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; until then `_handle` behaves like the previous handler
        for each, before in self._before.items():
            if signal.getsignal(each) == self._handle:
                # None: the previous handler was not installed by Python, and cannot be reinstalled.
                signal.signal(each, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        each = signal.Signals(number)
        before = self._before.get(each)
        active = not self._removed and os.getpid() == self._pid
        if active:
            self._on_signal()
        if callable(before):
            if not active or before is not signal.default_int_handler:
                before(number, frame)
        elif not active and before != signal.SIG_IGN:
            # Take the default action, as if there had never been a handler. It often ends the process.
            signal.signal(each, signal.SIG_DFL)
            signal.raise_signal(each)
