"""
Work on threads that nobody has to wait for: a store that does not answer must keep neither a call nor the process.

They are daemons, not an executor's threads, which Python waits for at exit however long that takes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Lane:
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


def in_time(work: Callable[[], object], within_s: float) -> bool:
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
