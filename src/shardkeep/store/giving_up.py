"""
Writers that are told at once when other work of theirs has failed, however many writers of other kinds lie between.

    hope = Hope()
    with hope.held():
        writer = store.create(name, nbytes)
    ...
    hope.give_up()  # from any thread: whoever waits in this writer raises, and `abandon` need not wait for long
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Hope:
    """That some blobs come to be, all of them. Lost once, and for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost = False
        self._told: list[weakref.WeakMethod[Callable[[], object]]] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let what is created on this thread in the meantime hear of it."""
        token = _HELD.set(self)
        try:
            yield
        finally:
            _HELD.reset(token)

    def tell(self, told: Callable[[], object]) -> None:
        """Call this method when all is lost, or now; its object is not kept alive for that."""
        with self._lock:
            self._told.append(weakref.WeakMethod(told))
            lost = self._lost
        if lost:
            told()

    def give_up(self) -> None:
        """Tell everybody. Waits for nothing; may be called again."""
        with self._lock:
            self._lost = True
            told = list(self._told)
        for each in told:
            if (method := each()) is not None:
                method()


_HELD: ContextVar[Hope | None] = ContextVar("shardkeep.store.giving_up", default=None)


def hope_held() -> Hope | None:
    """Return what a writer that is created now should listen to."""
    return _HELD.get()
