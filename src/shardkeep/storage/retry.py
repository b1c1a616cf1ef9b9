"""
Retries what failed for a transient reason: a server that restarts, a network that was down for a moment.

Making a blob durable is never retried: after a failed fsync, a second one may report success although pages were lost.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from shardkeep.errors import SaveCancelled, StorageError
from shardkeep.storage import base
from shardkeep.storage.base import BlobReader, BlobWriter, Root, Store, Version, create_upto, holds, spec_of
from shardkeep.storage.wrapper import ReaderWrapper, StoreWrapper, WriterWrapper

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_NAMES = (
    "EAGAIN", "EINTR", "EBUSY", "ETIMEDOUT", "ESTALE", "EIO", "EREMOTEIO", "ENETDOWN", "ENETUNREACH", "ENETRESET",
    "ECONNABORTED", "ECONNRESET", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "EPIPE",
)  # fmt: skip
TRANSIENT = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))
"""Errors that may pass. A full disk, missing permissions and a name that is taken do not."""
_LONGEST_SLEEP_S = 0.5
"""Between two checks whether a retry is still wanted."""

OnRetry = Callable[[int, StorageError, float], object]
"""Called with the number of the attempt that failed (from 1), its error, and the delay before the next one."""


def backoff_s(failed: int, *, first_s: float = 0.2, longest_s: float = 5.0) -> float:
    """Return the delay after `failed` failures (from 1): exponential, with jitter."""
    # Jitter, because what fails for one rank fails for all, and they should not all come back at the same moment.
    jitter = 0.5 + random.random()  # noqa: S311 - no secret
    return float(min(longest_s, first_s * 2 ** (failed - 1) * jitter))


def call_with_retries(
    what: str,
    work: Callable[[], T],
    *,
    retries: int,
    within_s: float = float("inf"),
    can: Callable[[], bool] = lambda: True,
) -> T:
    """Call `work` until it succeeds, fails for good, or not `can()`. What a client library has retried is not retried again."""
    until = time.monotonic() + within_s
    failed = 0
    while True:
        try:
            return work()
        except StorageError as error:
            failed += 1
            again = error.errno in TRANSIENT and not error.details.get("retried") and can()
            if not again or failed > retries or time.monotonic() > until:
                raise
            log.info("retrying to %s: %s", what, error)
            time.sleep(backoff_s(failed))


@dataclass(frozen=True)
class RetryPolicy:
    retries: int
    on_retry: OnRetry | None = None
    sleep: Callable[[float], object] = time.sleep
    wanted: Callable[[], bool] | None = None
    """Asked before each attempt whether to make it."""

    def attempt(self, what: str, work: Callable[[int], T]) -> T:
        """Call `work` with the number of attempts that failed before, until it succeeds or the retries are used up."""
        failed = 0
        while True:
            if self.wanted is not None and not self.wanted():
                raise SaveCancelled(f"did not {what}: the save was cancelled")
            try:
                return work(failed)
            except StorageError as error:
                if error.errno not in TRANSIENT or failed == self.retries:
                    raise
                failed += 1
                delay_s = backoff_s(failed, first_s=0.5, longest_s=15.0)
                log.warning("could not %s (attempt %d), retrying in %.1f s: %s", what, failed, delay_s, error)
                if self.on_retry is not None:
                    self.on_retry(failed, error, delay_s)
                while delay_s > 0 and (self.wanted is None or self.wanted()):
                    step_s = delay_s if self.wanted is None else min(_LONGEST_SLEEP_S, delay_s)
                    self.sleep(step_s)
                    delay_s -= step_s


class RetryingStore(StoreWrapper):
    """Passes everything on to `inner`, and retries what fails for a transient reason. It is a root if `inner` is."""

    def __init__(self, inner: Store, policy: RetryPolicy, *, before_put: Callable[[], object] | None = None) -> None:
        """`before_put` is called before each `put`, which is not made if it raises."""
        super().__init__(inner)
        self._policy = policy
        self._before_put = before_put

    def wrap_reader(self, reader: BlobReader, name: str) -> BlobReader:
        return _RetryingReader(reader, self, name)

    def wrap_writer(self, writer: BlobWriter, name: str) -> BlobWriter:
        return _RetryingWriter(writer, self, name)

    def call(self, verb: str, name: str, work: Callable[[], T]) -> T:
        verb = "look up" if verb == "version" else verb
        return self._policy.attempt(f"{verb} {self.url}/{name}", lambda _: work())

    def create(self, name: str, nbytes: int) -> BlobWriter:
        return self._create(name, partial(self.inner.create, name, nbytes))

    def create_upto(self, name: str, nbytes: int) -> BlobWriter:
        return self._create(name, partial(create_upto, self.inner, name, nbytes))

    def _create(self, name: str, create: Callable[[], BlobWriter]) -> BlobWriter:
        def work(failed: int) -> BlobWriter:
            try:
                return create()
            except StorageError as error:
                if not failed or error.errno != errno.EEXIST:
                    raise
            # The failed attempt created it: names of new blobs are unique, so no other writer did.
            self.inner.delete(name)
            return create()

        return self.wrap_writer(self._policy.attempt(f"create {self.url}/{name}", work), name)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        def work(failed: int) -> None:
            if self._before_put is not None:
                self._before_put()
            try:
                self.inner_put(name, data, replace=replace, over=over)
            except StorageError as error:
                mine = self.inner.version(name) if failed and error.errno == errno.EEXIST else None
                if mine is None or not holds(self.inner.get, name, data):
                    raise
                # The failed attempt put it there, perhaps before it was durable.
                self.inner.put(name, data, over=mine)

        self._policy.attempt(f"put {self.url}/{name}", work)

    def spec(self) -> Any:
        """Describe the inner store: the writer process writes data files, and this process retries and commits."""
        return spec_of(self.inner)

    @property
    def _root(self) -> Root:
        return cast("Root", self.inner)

    def places(self) -> Iterator[str]:
        return iter(self.call("list the places of", "", lambda: list(self._root.places())))

    def all_names(self) -> base.Names:
        return self.call("list", "", lambda: base.names_of(self._root, self.list))

    def place(self, name: str) -> RetryingStore:
        return RetryingStore(self._root.place(name), self._policy)

    def remove(self, name: str) -> None:
        self.call("remove", name, lambda: self._root.remove(name))

    def drop_empty(self, name: str) -> None:
        self.call("remove", name, lambda: self._root.drop_empty(name))


class _RetryingWriter(WriterWrapper):
    def write_at(self, offset: int, data: memoryview) -> None:
        self.store.call("write", f"{self.name} at {offset}", lambda: self.inner.write_at(offset, data))


class _RetryingReader(ReaderWrapper):
    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        where = f"{self.name} at {offset}"
        self.store.call("read", where, lambda: self.inner.read_into(offset, into, cached=cached))
