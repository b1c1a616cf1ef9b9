"""
Work on threads that nobody has to wait for: a store that does not answer must keep neither a call nor the process.

They are daemons, not an executor's threads, which Python waits for at exit however long that takes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Protocol

from shardkeep.engine.queue import SaveHandle

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonWorker:
    """One thread, which does what it is given in turn. Used by one thread."""

    def __init__(self, name: str) -> None:
        """Begin nothing yet; `name` is the thread's."""
        self.closed = False
        self.left = False
        """Whether it was closed, and was still at work."""
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None)  # so that the thread ends with whoever forgot to close it

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have something done after all that came before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), daemon=True, name=self._name)
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((future, work, arguments))
        return future

    def close(self, within_s: float) -> bool:
        """End the thread after what it was given; False where it is not over in time, and goes on by itself."""
        self.closed = True
        if not self.left and self._thread is not None:
            self._tasks.put(None)
            self._thread.join(within_s)
            self.left = self._thread.is_alive()
        return not self.left


def run_within(work: Callable[[], object], within_s: float) -> bool:
    """Do something, and raise what it raises; False where it is not over in time, and goes on by itself."""
    tasks: SimpleQueue[_Task | None] = SimpleQueue()
    future: Future[Any] = Future()
    tasks.put((future, work, ()))
    tasks.put(None)
    threading.Thread(target=_serve, args=(tasks,), daemon=True, name="shardkeep-aside").start()
    if not wait([future], within_s).done:
        return False
    future.result()
    return True


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, work, arguments = task
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - whoever holds the future is told
            future.set_exception(error)
        del task, future, work, arguments  # what was done is not held until there is more to do


# Saves, or promotions, of a Checkpointer that have not ended, or whose failure was not told yet.


class BackgroundTask(Protocol):
    """Something that goes on in the background."""

    def done(self) -> bool:
        """Say whether it has ended, well or not."""

    def exception(self) -> BaseException | None:
        """Wait for its end, and return what went wrong, if anything did."""


class PendingTasks:
    """They have numbers, the same on all ranks. Used by one thread."""

    def __init__(self, *, raises: bool = False) -> None:
        """Take none yet; `raises`: whether failures are raised, so that one that never was is an error of the process."""
        self._raises = raises
        self._handles: dict[int, BackgroundTask] = {}
        self.count = 0
        """Of all saves that were begun."""

    def add(self, handle: BackgroundTask) -> None:
        """Take a save that was begun; its failure is told by its Checkpointer, and by nobody else."""
        if isinstance(handle, SaveHandle):
            handle.asked, handle.told_later = True, self._raises
        self._handles[self.count] = handle
        self.count += 1

    def skip(self) -> None:
        """Count a save that failed in its call here, as it may be under way on other ranks."""
        self.count += 1

    def failed(self) -> list[int]:
        """Number those that have failed by now, on this rank; forget those that ended well."""
        ended = [number for number, handle in self._handles.items() if handle.done()]
        failed = [number for number in ended if _error_of(self._handles[number]) is not None]
        for number in set(ended) - set(failed):
            del self._handles[number]
        return failed

    def before(self, number: int) -> list[int]:
        """Number those that were begun before one."""
        return [each for each in self._handles if each < number]

    def end(self, numbers: Collection[int]) -> list[BaseException]:
        """Wait for saves to end, forget them, and return what went wrong."""
        errors = []
        for number in sorted(numbers):
            handle = self._handles.get(number)
            if handle is None:  # it ended well here, or its call has raised
                continue
            error = _error_of(handle)
            del self._handles[number]
            if isinstance(handle, SaveHandle):
                handle.told_later = False
            if error is not None:
                errors.append(error)
        return errors


def _error_of(handle: BackgroundTask) -> BaseException | None:
    """Wait, and return what went wrong; that is told by whoever asks here, and not by having asked."""
    return handle.outcome() if isinstance(handle, SaveHandle) else handle.exception()
