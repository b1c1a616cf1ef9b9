"""
Signals that ask for a save: a handler that sets a flag, and calls the handler that was there before.

A handler that is still there after `remove` (others put theirs on top of it, or it was called outside the main thread),
or in a process that was forked, acts as what was there before: a signal is never swallowed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from shardkeep.errors import StateError

_HINT = "make the Checkpointer in the main thread, or without signals"


def numbers_of(signals: Iterable[int | str]) -> list[signal.Signals]:
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


class Handlers:
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
            raise StateError("signals can be handled only where Python handles them: in the main thread", hint=_HINT)
        try:
            for each in wanted:
                self._before[each] = signal.signal(each, self._handle)
        except (OSError, ValueError) as exc:  # SIGKILL, or a thread of another interpreter
            self.remove()
            raise StateError(f"signals: {each.name} cannot be handled: {exc}", hint=_HINT) from exc

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
