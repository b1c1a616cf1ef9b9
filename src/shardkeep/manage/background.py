"""Background work of a Checkpointer: a worker thread that may be left behind, and numbered tasks that are pending."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from shardkeep.engine.queue import SaveHandle

BackgroundTask = SaveHandle[Any] | Future[Any]
"""A save, or a replication round."""
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonWorker:
    """
    One daemon thread that runs tasks in order. Used by one thread.

    Python waits at exit for the threads of an executor, however long that takes. It does not wait for daemon threads,
    so a store that does not answer cannot block the end of the process.
    """

    def __init__(self, name: str) -> None:
        self.closed = False
        self.abandoned = False
        """Whether it was closed while a task was still running."""
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._tasks.put, None)  # ends the thread of a worker that was never closed

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run `work` after everything that was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), daemon=True, name=self._name)
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((future, work, arguments))
        return future

    def close(self, within_s: float) -> bool:
        """End the thread after its tasks; return False if they take longer than `within_s`, and leave it running."""
        self.closed = True
        if not self.abandoned and self._thread is not None:
            self._tasks.put(None)
            self._thread.join(within_s)
            self.abandoned = self._thread.is_alive()
        return not self.abandoned


def _serve(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, work, arguments = task
        try:
            future.set_result(work(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised by the future
            future.set_exception(error)
        del task, future, work, arguments  # do not keep them alive until the next task arrives


class PendingTasks:
    """
    Background tasks that have not ended, or whose error was not reported yet. Used by one thread.

    Tasks are numbered in the order of the calls, so that a number means the same task on all ranks.
    """

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

    def before(self, number: int) -> list[int]:
        """Return the numbers of tasks that were begun before one."""
        return [each for each in self._tasks if each < number]

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

    def end_all(self) -> list[BaseException]:
        """Wait for all tasks to end, forget them, and return their errors."""
        return self.end(list(self._tasks))


def _error_of(task: BackgroundTask) -> BaseException | None:
    """Wait, and return the error without marking it as retrieved by the user."""
    return task.outcome() if isinstance(task, SaveHandle) else task.exception()
