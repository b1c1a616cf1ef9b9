"""
When a save is due: by the step alone, or by what only one rank knows.

`Steps` is a pure function of the steps that were passed, the same on all ranks, which therefore need not ask each other.
`Timer` and `Flag` hold what comes from outside: the time, signals, requests.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable

from shardkeep.errors import StateError


class Steps:
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
