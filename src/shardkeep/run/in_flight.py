"""
The asynchronous saves of this process that have not ended, and the failures that nobody has asked for.

Each save runs on a thread of its own. So many at a time are allowed as the caller says; the next one waits in its call.
A failure that nobody asks for is logged, and raised by the next save or by `finish`; at exit it is printed, and the process
ends with a code that is not 0. The next save is made all the same: other ranks may not know of the failure yet, or have
asked for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shardkeep.errors import CheckpointError, EarlierSaveFailed, SaveCancelled
from shardkeep.events import say
from shardkeep.protocol.failures import CheckpointException
from shardkeep.ranks.verdict import show_trace
from shardkeep.run.exit_code import exit_code, give_up_at_exit, tell_at_exit
from shardkeep.run.handles import SaveHandle

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_MOST_AT_ONCE = 64
_NICENESS = 5


class Flights:
    """Saves under way. `begin` and `make_room` are called by one thread at a time."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._threads = _threads()
        # Before the standard library shuts its executors: a save that is under way at exit still needs threads.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]  # there is no public way
        self._under_way: list[SaveHandle[Any]] = []
        self._failed: list[SaveHandle[Any]] = []

    def make_room(self, most: int) -> None:
        """Wait until fewer than so many saves are under way."""
        while len(under_way := self._still_under_way()) >= most:
            under_way[0].wait_for_end()

    def begin(self, handle: SaveHandle[T], box: list[Callable[[], T]]) -> None:
        """Carry a save out on a thread; what is to be done is taken out of its box when it begins."""
        exit_code().watch()
        self._threads.submit(self._carry_out, handle, box)
        # After that: a Ctrl-C in between must not leave one to be waited for that never ends.
        self._under_way.append(handle)

    def earlier_failure(
        self, than: SaveHandle[Any] | None = None, *, at_exit: bool = False
    ) -> EarlierSaveFailed | None:
        """Return the failure of a save that has ended and that nobody has asked for, once; not of one just begun."""
        ended = [self._failed.pop(0) for _ in range(len(self._failed))]  # one by one: saves add to them meanwhile
        failed = [each for each in ended if (each.told_later if at_exit else not each.asked) and each is not than]
        self._failed += [each for each in ended if each is than or (each.told_later and not at_exit)]
        if not failed:
            return None
        for each in failed:
            each.asked = True
        return earlier_error(
            failed[0].where,
            [each.exception() for each in failed],
            hint="ask each handle for its result before the next save; what this call saves is not affected",
        )

    def finish(self) -> None:
        """
        Wait for all saves, and end their threads.

        Raises:
            EarlierSaveFailed: one failed, and nobody has asked for it.

        """
        self.make_room(1)
        self._threads.shutdown()
        self._threads = _threads()
        exit_code().look_away()
        if (earlier := self.earlier_failure()) is not None:
            raise earlier

    def _still_under_way(self) -> list[SaveHandle[Any]]:
        self._under_way = [each for each in self._under_way if not each.done()]
        return self._under_way

    def _carry_out(self, handle: SaveHandle[T], box: list[Callable[[], T]]) -> None:
        stand_back()
        try:
            # Taken out of its box: nothing here may hold the state when the handle is done.
            held = [box.pop()]
        except IndexError:  # given up by a call that was interrupted
            return
        try:
            result = held.pop()()
        except BaseException as error:  # noqa: BLE001 - read by whoever asks, or raised by the next save
            cancelled = isinstance(error, SaveCancelled)  # on whichever rank: somebody wanted it so
            if cancelled:
                say(logging.INFO, "an asynchronous save, to %s, was cancelled", handle.where)
            else:
                show_trace(error)
                if not handle.asked:
                    say(logging.ERROR, "an asynchronous save, to %s, failed", handle.where, exc_info=error)
            let_go(error)
            if not cancelled:
                self._failed.append(handle)
            handle.end(error=error)
        else:
            handle.end(result)

    def _at_exit(self) -> None:
        if os.getpid() != self._process_id:  # a fork, which has none of the threads to wait for
            return
        try:
            try:
                self.make_room(1)
            except KeyboardInterrupt:
                self._give_up_at_exit()
            self.finish()
            if (earlier := self.earlier_failure(at_exit=True)) is not None:
                raise earlier
        except CheckpointError as error:
            tell_at_exit(error)
        except KeyboardInterrupt:
            if places := [each.where for each in self._still_under_way()]:  # the second one: nothing is waited for
                give_up_at_exit(places)
                raise
            self._at_exit()  # perhaps something is still to be told

    def _give_up_at_exit(self) -> None:
        """Cancel all saves, and wait for what that takes."""
        given_up = list(self._still_under_way())
        for each in given_up:
            each.cancel()
        self.make_room(1)
        # It may have been too late for some, which are committed, or have failed and are told of as others are.
        if lost := [each.where for each in given_up if isinstance(each.outcome(), SaveCancelled)]:
            give_up_at_exit(lost)


def let_go(error: BaseException | None, *, said: bool = False, seen: set[int] | None = None) -> None:
    """
    Drop what the frames that an exception passed through hold: the state is among it, and exceptions are kept.

    Those that a CheckpointException tells of go altogether: its text says where it was.
    """
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    inner = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    said = said or bool(inner)
    if said:
        error.__traceback__ = None
    for each in (error.__cause__, error.__context__, *inner):
        let_go(each, said=said, seen=seen)


def _threads() -> ThreadPoolExecutor:
    """Make no thread yet."""
    return ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="shardkeep-save")


def stand_back(niceness: int = _NICENESS) -> None:
    """Let training go first where cores are short; threads that this one starts do the same."""
    if sys.platform == "linux":  # where threads have priorities of their own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def earlier_error(where: str, errors: Sequence[BaseException | None], *, hint: str) -> EarlierSaveFailed:
    """Make the error of saves that failed, the first of them to `where`, and that nobody has asked for."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    what = str(errors[0]).strip() or type(errors[0]).__name__
    earlier = EarlierSaveFailed(f"an earlier asynchronous save, to {where}, failed{more}: {what}", hint=hint)
    earlier.__cause__ = errors[0]
    return earlier


@functools.cache  # saves outlive the calls that began them; a forked process has none of its parent's threads
def _flights_of(process_id: int) -> Flights:
    del process_id
    return Flights()


def flights() -> Flights:
    """Return the saves of this process."""
    return _flights_of(os.getpid())
