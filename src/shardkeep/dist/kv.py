"""
Messages between ranks in torch's key-value store: a rank puts a message under a key, and its reader deletes it.

Two properties of torch's stores shape this module. A TCPStore client does one thing at a time behind a lock, and logs two lines
for each `wait` that times out: a long wait would stall the training loop's own use of the store, and fill its log. So
waits poll with `check`, which is short and silent, ever more slowly as the wait grows. And a call never returns if the machine
that hosts the store vanishes. So every use of the store runs on a thread that is abandoned when its time is up.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

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
LATE_S = 10.0
"""After how long a wait is worth a word."""
CHECKS_PER_S = 2000
"""How many checks a second all ranks together make in a long wait."""

_WHOLE, _PIECES = b"w", b"p"


class StoreUnreachable(Exception):
    """The store did not answer, or its connection broke."""


class KVMailbox:
    """A rank's use of the store, inside `with_mailbox`."""

    def __init__(self, store: Store, ranks: int, stop: threading.Event) -> None:
        self._store = store
        self._slowest_s = max(0.1, ranks / CHECKS_PER_S)
        self._quickest_s = max(0.0005, ranks / CHECKS_PER_S / 10)
        self._stop = stop

    def count(self, key: str) -> int:
        """Add one to the counter `key` and return it."""
        return self._store.add(key, 1)

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

    def wait(self, keys: Sequence[str], within_s: float, late: Callable[[float], object] | None = None) -> bool:
        """Wait until all `keys` are there; False when the time is up. `late` is called a few times in a long wait."""
        began, late_s = time.monotonic(), LATE_S
        while not self._store.check(list(keys)):
            waited = time.monotonic() - began
            if waited >= within_s:
                return False
            if late is not None and waited >= late_s:
                late(waited)
                late_s *= 3  # seldom, because it may look at a key of each rank
            pause = min(self._slowest_s, max(self._quickest_s, waited / 4), within_s - waited)
            if self._stop.wait(pause):
                raise StoreUnreachable("the caller has left")
        return True

    def there(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def peek(self, key: str) -> bytes | None:
        """Read a message of one piece by one request, which does not wait; None if there is none."""
        # Not `get`, which asks twice, and waits for minutes, behind the lock, for a key that is not there.
        found: bytes = self._store.compare_set(key, "?", "?")
        return found[1:] if found[:1] == _WHOLE else None

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Read the messages at `keys`, all of which must exist."""
        bodies: list[bytes] = []
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            for key, head in zip(batch, self._get(batch), strict=True):
                pieces = [] if head[:1] == _WHOLE else [f"{key}/{piece}" for piece in range(int(head[1:]))]
                bodies.append(b"".join(self._get(pieces)) if pieces else head[1:])
        return bodies

    def take(self, keys: Sequence[str]) -> list[bytes]:
        """Read the messages at `keys`, all of which must exist, and delete them."""
        bodies = self.read(keys)
        for key, body in zip(keys, bodies, strict=True):
            self.drop(key, len(body))
        return bodies

    def drop(self, key: str, nbytes: int = 0) -> None:
        """Delete `key`, whose body has `nbytes`."""
        self._store.delete_key(key)
        if nbytes > PIECE_BYTES:
            for piece in range(-(-nbytes // PIECE_BYTES)):
                self._store.delete_key(f"{key}/{piece}")

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # the stub says str; bytes go through unchanged

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        if self._store.has_extended_api():  # type: ignore[attr-defined]  # missing from the stub
            return self._store.multi_get(list(keys))
        return [self._store.get(key) for key in keys]


def with_mailbox(store: Store, ranks: int, errand: Callable[[KVMailbox], T], *, within_s: float) -> T:
    """Run `errand` for at most `within_s` and `GRACE_S`; raise `StoreUnreachable` if the store does not answer."""
    stop = threading.Event()
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(errand(KVMailbox(store, ranks, stop)))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.set_exception(error)

    # A daemon, not an executor's thread: a thread stuck in a dead connection must not keep the process from ending.
    threading.Thread(target=run, daemon=True, name="shardkeep-ranks").start()
    try:
        error = outcome.exception(within_s + GRACE_S)
    except Exception as late:  # the future's own TimeoutError, whose class changed in Python 3.11
        raise StoreUnreachable(f"the store did not answer for {within_s + GRACE_S:g} s") from late
    finally:
        stop.set()  # also after Ctrl-C: the errand ends at its next check
    if isinstance(error, (RuntimeError, OSError)):  # what torch's stores raise; torch appends a C++ stack
        raise StoreUnreachable((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
    return outcome.result()
