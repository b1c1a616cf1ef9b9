"""The background tasks of a Checkpointer that are pending: saves and replication rounds."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from shardkeep.engine.queue import SaveHandle

BackgroundTask = SaveHandle[Any] | Future[Any]
"""A save, or a replication round."""


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
