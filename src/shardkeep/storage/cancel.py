"""
On what terms some blobs are written: all of them or none, in how much memory, and as long as somebody wants them.

    hope = Hope(room=Room(64 << 20))
    with hope.held():
        writer = store.create(name, nbytes)
    ...
    hope.give_up()  # from any thread: whoever waits in this writer raises, and `abandon` need not wait for long

What is held reaches a store however many stores of other kinds lie between, of users too: their verbs are the same.
"""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from shardkeep.errors import StorageError
from shardkeep.storage.buffers import MemoryBudget

T = TypeVar("T")

CANCELLED = "was given up, as something else failed"
CANCEL_DEADLINE_S = 10.0
"""For what was given up to be taken back, before it is left to whoever sweeps."""
_LOOK_S = 0.5


class CancelScope:
    """
    That some blobs come to be, all of them. Lost once, and for all.

    To be held only where no other blobs are ever called so: one that is given up may still appear, and is deleted then.
    """

    def __init__(self, *, room: MemoryBudget | None = None, wanted: Callable[[], bool] = lambda: True) -> None:
        """
        Begin to hope. If another hope is held, this one is lost with it, and has its memory.

        Args:
            room: for what stores copy on the way; None: what they have for all blobs together.
            wanted: says whether the blobs are still to be; must neither wait nor raise.

        """
        self.wanted = wanted
        """Whether anybody still wants these blobs: whoever waits for them looks now and then."""
        outer = current_scope()
        self.room: MemoryBudget | None = outer.room if room is None and outer is not None else room
        """Memory for what is copied on the way, if there is a bound."""
        self._lock = threading.Lock()
        self._lost = False
        self._told: list[weakref.WeakMethod[Callable[[], object]]] = []
        if outer is not None:
            outer.tell(self.give_up)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let what is created on this thread in the meantime hear of it."""
        token = _HELD.set(self)
        try:
            yield
        finally:
            _HELD.reset(token)

    @property
    def is_lost(self) -> bool:
        """Whether it was given up."""
        return self._lost

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


_HELD: ContextVar[CancelScope | None] = ContextVar("shardkeep.storage.cancel", default=None)


def current_scope() -> CancelScope | None:
    """Return what a writer that is created now should listen to."""
    return _HELD.get()


def spawn_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Do some work on a thread of that name, which can be left behind, also by a process that ends."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - raised to whoever asks for the answer
            answer.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


def run_with_deadline(work: Callable[[], object], name: str, within_s: float = CANCEL_DEADLINE_S) -> bool:
    """
    Run `work` on a daemon thread of that name, and wait for it; return False if it does not end in time, and goes on.

    An error of `work` is raised here.
    """
    try:
        answer = spawn_daemon(work, name)
    except RuntimeError:  # there is no thread to be had: that may be why it is taken back
        work()
        return True
    if not wait([answer], within_s).done:
        return False
    answer.result()
    return True


def run_cancellable(work: Callable[[], T], where: str, hope: CancelScope | None) -> T:
    """
    Ask a store for something, which changes nothing there, and wait for the answer no longer than there is hope.

    Args:
        work: asks.
        where: what is asked for, for messages.
        hope: None: the answer is waited for in any case.

    Raises:
        StorageError: it was given up; or whatever `work` raises.

    """
    if hope is None:
        return work()
    answer = spawn_daemon(work, f"ask for {where}")
    while not answer.done() and not hope.is_lost:
        wait([answer], _LOOK_S)
    if not answer.done():
        raise StorageError(f"{where}: {CANCELLED}", errno=errno.ECANCELED)
    return answer.result()
