"""
Messages between ranks in torch's key-value store: values under keys of their own, and logs that many ranks append to.

Two properties of torch's stores shape this module. A TCPStore client does one thing at a time behind a lock, and logs two lines
for each `wait` that times out: a long wait would stall the training loop's own use of the store, and fill its log. So
waits poll, which is short and silent, ever more slowly as the wait grows. And a call never returns if the machine
that hosts the store vanishes. So every use of the store runs on a thread that is abandoned when its time is up; else it is kept
for a while for the next use, because a call makes several.
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from shardkeep.options import per_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

PIECE_BYTES = 4 << 20
"""Longest value of one key: torch's TCPStore cuts the connection of a client that sends more than 8 MiB."""
BATCH = 16
"""Keys read by one request, so that the answer stays within 64 MiB."""
GRACE_S = 2.0
"""How long past its deadline a use of the store may take before its thread is abandoned."""
IDLE_S = 2.0
"""How long a thread waits for another errand."""
LATE_S = 10.0
"""After how long a wait is worth a word."""
CHECKS_PER_S = 8000
"""How many checks a second all ranks together make in a long wait."""
FIRST_CHECKS_PER_S = 56_000
"""The same when a wait begins: half of what a TCPStore can answer."""
BYTES_PER_S = 500e6
"""How fast a store takes the messages of all ranks."""

_WHOLE, _PIECES = b"w", b"p"
_ABSENT = b"?"


def longest_pause_s(ranks: int) -> float:
    """Return how long each of `ranks` pauses between two checks in a long wait."""
    return max(0.1, ranks / CHECKS_PER_S)


def quickest_pause_s(ranks: int) -> float:
    """Return how long each of `ranks` pauses before its first check."""
    return max(0.0005, ranks / FIRST_CHECKS_PER_S)


class StoreUnreachable(Exception):
    """The store did not answer, or its connection broke."""


class KVMailbox:
    """A rank's use of the store, inside `with_mailbox`."""

    def __init__(self, store: Store, ranks: int, stop: threading.Event) -> None:
        """`ranks`: how many ranks wait at the same time as this one."""
        self._store = store
        self._extended: bool = store.has_extended_api()  # type: ignore[attr-defined]  # missing from the stub
        self._slowest_s = longest_pause_s(ranks)
        self._quickest_s = quickest_pause_s(ranks)
        # Rank 0 waits alone and all others wait for it, so it looks more often.
        self._fraction = 4 if ranks > 1 else 10
        self._ranks, self._stop = ranks, stop

    def count(self, key: str) -> int:
        """Add one to the counter `key` and return it."""
        return self._store.add(key, 1)

    def answer_s(self, nbytes: int) -> float:
        """Return how long an answer takes at least, if each rank sends a message of `nbytes`."""
        return self._quickest_s + self._ranks * nbytes / BYTES_PER_S

    def counted(self, key: str) -> int:
        return int(self._peek(key) or 0)

    def put(self, key: str, body: bytes) -> None:
        """Put `body` at `key`. A reader that sees the key finds all of it."""
        if len(body) <= PIECE_BYTES:
            self._set(key, _WHOLE + body)
            return
        starts = range(0, len(body), PIECE_BYTES)
        for piece, start in enumerate(starts):
            self._set(f"{key}/{piece}", body[start : start + PIECE_BYTES])
        # The key itself comes last, so that a reader that sees it finds every piece.
        self._set(key, _PIECES + str(len(starts)).encode())

    def append(self, log: str, body: bytes) -> None:
        """Append `body`, which is short, to a log. Readers find the bodies in their order."""
        if self._extended:
            self._store.append(log, len(body).to_bytes(4, "little") + body)  # type: ignore[attr-defined]  # as above
        else:
            self.put(f"{log}/{self.count(log)}", body)

    def entries(self, logs: Sequence[str]) -> list[bytes]:
        """Return the bodies in some logs, at most `BATCH`; of several logs nothing while one of them is empty."""
        if not self._extended:
            numbers = [(log, number) for log in logs for number in range(1, self.counted(log) + 1)]
            return [body for log, number in numbers if (body := self.peek(f"{log}/{number}")) is not None]
        bodies = list[bytes]()
        several = len(logs) > 1
        if several and not self._store.check(list(logs)):
            return bodies
        for whole in self._get(logs) if several else [self._peek(logs[0]) or b""]:
            at = 0
            while at < len(whole):
                end = at + 4 + int.from_bytes(whole[at : at + 4], "little")
                bodies.append(whole[at + 4 : end])
                at = end
        return bodies

    def drop_log(self, log: str) -> None:
        for number in () if self._extended else range(1, self.counted(log) + 1):
            self._store.delete_key(f"{log}/{number}")
        self._store.delete_key(log)

    def poll(
        self,
        look: Callable[[], T | None],
        within_s: float,
        late: Callable[[float], object] | None = None,
        *,
        pause_s: float = 0.0,
        longest_pause_s: float = math.inf,
    ) -> T | None:
        """Call `look`, first after `pause_s`, until it finds something; None when time is up. A long wait calls `late`."""
        began, late_s, waited = time.monotonic(), LATE_S, 0.0
        slowest_s = min(self._slowest_s, longest_pause_s)
        while waited < within_s:
            if self._stop.wait(min(pause_s, slowest_s, within_s - waited)):
                raise StoreUnreachable("the caller has left")
            if (found := look()) is not None:
                return found
            waited = time.monotonic() - began
            if late is not None and waited >= late_s:
                late(waited)
                late_s *= 3  # seldom, because it may look at a key of each rank
            pause_s = max(self._quickest_s, waited / self._fraction)
        return None

    def there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def peek(self, key: str) -> bytes | None:
        head = self._peek(key)
        return None if head is None else self._body(key, head)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        bodies: list[bytes] = []
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            bodies += [self._body(key, head) for key, head in zip(batch, self._get(batch), strict=True)]
        return bodies

    def drop(self, key: str, nbytes: int = 0) -> None:
        """Delete `key`, whose body has `nbytes`."""
        self._store.delete_key(key)
        if nbytes > PIECE_BYTES:
            for piece in range(-(-nbytes // PIECE_BYTES)):
                self._store.delete_key(f"{key}/{piece}")

    def discard(self, key: str) -> None:
        """Delete a message whose length is not known, if there is one."""
        head = self._peek(key) or b""
        self.drop(key, int(head[1:]) * PIECE_BYTES if head[:1] == _PIECES else 0)

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # the stub says str; bytes go through unchanged

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(list(keys)) if self._extended else [self._store.get(key) for key in keys]

    def _peek(self, key: str) -> bytes | None:
        # `get` would wait for a key that is absent. This changes nothing, because no value is `_ABSENT`, and returns the value
        # or, if there is none, `_ABSENT`: one request, where `check` and `get` are two.
        value = self._store.compare_set(key, _ABSENT, _ABSENT)  # type: ignore[arg-type]  # bytes, as in `_set`
        return None if value == _ABSENT else value

    def _body(self, key: str, head: bytes) -> bytes:
        if head[:1] == _WHOLE:
            return head[1:]
        return b"".join(self._get([f"{key}/{piece}" for piece in range(int(head[1:]))]))


def with_mailbox(store: Store, ranks: int, errand: Callable[[KVMailbox], T], *, within_s: float) -> T:
    """Run `errand` for at most `within_s` and `GRACE_S`; raise `StoreUnreachable` if the store does not answer."""
    stop = threading.Event()
    outcome = run_aside(lambda: errand(KVMailbox(store, ranks, stop)))
    try:
        error = outcome.exception(within_s + GRACE_S)
    except Exception as late:  # the future's own TimeoutError, whose class changed in Python 3.11
        raise StoreUnreachable(f"the store did not answer for {within_s + GRACE_S:g} s") from late
    finally:
        stop.set()  # also after Ctrl-C: the errand ends at its next check
    if isinstance(error, (RuntimeError, OSError)):  # what torch's stores raise; torch appends a C++ stack
        raise StoreUnreachable((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    return outcome.result()


_Errands = SimpleQueue[tuple["Future[Any]", "Callable[[], object]"]]
_idle_threads = per_process(list[_Errands])


def run_aside(work: Callable[[], T]) -> Future[T]:
    """Run `work` on a thread of this process that is idle, or on a new one."""
    future, idle = Future[T](), _idle_threads()
    try:
        errands = idle.pop()
    except IndexError:
        errands = SimpleQueue()
        # A daemon, not an executor's thread: a thread stuck in a dead connection must not keep the process from ending.
        threading.Thread(target=_serve, args=(errands, idle), daemon=True, name="shardkeep-ranks").start()
    errands.put((future, work))
    return future


def _serve(errands: _Errands, idle: list[_Errands]) -> None:
    while True:
        try:
            future, work = errands.get(timeout=IDLE_S)
        except Empty:
            with suppress(ValueError):  # it is about to be used
                idle.remove(errands)
                return
            continue
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            future.set_exception(error)
        del future, work  # with all that they hold
        idle.append(errands)
