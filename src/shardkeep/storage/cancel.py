"""
Cancelling a group of uploads as one unit, and the memory they may use.

A scope is an argument, except of `create`: there it is a context variable, so that it reaches the store behind any number of
wrappers, including those that users write. Nothing else reads that.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from shardkeep.errors import StorageError
from shardkeep.storage.buffers import MemoryBudget

T = TypeVar("T")

CANCELLED = "was cancelled because another part of the save failed"
CANCEL_DEADLINE_S = 10.0
"""How long cancelled work may take to clean up. What it leaves after that is an orphan, which a later save removes."""
_POLL_S = 0.5


class CancelScope:
    """Cancels a group of uploads, for good. A cancelled blob may still appear later, so its name must not be used again."""

    def __init__(
        self,
        *,
        parent: CancelScope | None = None,
        budget: MemoryBudget | None = None,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """
        Make a scope. Cancelling the parent cancels this one.

        `budget` is memory for the bytes that stores buffer; None: the parent's, or else the store's own. `wanted` says
        whether the blobs are still wanted, and must neither block nor raise; None: always.
        """
        self.wanted = wanted
        self.budget: MemoryBudget | None = parent.budget if budget is None and parent is not None else budget
        self._lock = threading.Lock()
        self.cancelled = False
        self._callbacks: list[weakref.WeakMethod[Callable[[], object]]] = []
        if parent is not None:
            parent.on_cancel(self.cancel)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the scope of the writers that this thread creates inside."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Call a bound method when the scope is cancelled, or now if it was; does not keep its object alive."""
        with self._lock:
            self._callbacks.append(weakref.WeakMethod(callback))
            cancelled = self.cancelled
        if cancelled:
            callback()

    def cancel(self) -> None:
        """Cancel everything in the scope. Does not wait; can be called again."""
        with self._lock:
            self.cancelled = True
            callbacks = list(self._callbacks)
        for each in callbacks:
            if (callback := each()) is not None:
                callback()


_ACTIVE: ContextVar[CancelScope | None] = ContextVar("shardkeep.storage.cancel", default=None)


def create_in(scope: CancelScope | None, create: Callable[[], T]) -> T:
    with scope.active() if scope else nullcontext():
        return create()


def current_scope() -> CancelScope | None:
    return _ACTIVE.get()


def spawn_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def run_with_deadline(work: Callable[[], object], name: str, within_s: float | None = None) -> bool:
    """Run clean-up work on a thread; returns whether it ended in time, and raises its error if it did."""
    future = spawn_daemon(work, name)
    if not wait([future], CANCEL_DEADLINE_S if within_s is None else within_s).done:
        return False
    future.result()
    return True


def run_cancellable(work: Callable[[], T], where: str, scope: CancelScope | None) -> T:
    """Run a request that changes nothing in the store; stop waiting for it, and raise, when the scope is cancelled."""
    if scope is None:
        return work()
    future = spawn_daemon(work, f"request {where}")
    while not future.done() and not scope.cancelled:
        wait([future], _POLL_S)
    if not future.done():
        raise StorageError(f"{where}: {CANCELLED}", errno=errno.ECANCELED)
    return future.result()
