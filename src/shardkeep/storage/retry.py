"""
A store that tries again what failed in passing: a server that restarts, a network that was gone for a moment.

To make a blob durable is never tried again: after a failed fsync the kernel takes lost pages for written, and a second
one would say that all is well.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from shardkeep.errors import BlobNotFound, MalformedFile, SaveCancelled, StorageError
from shardkeep.storage.base import (
    BlobInfo,
    BlobReader,
    BlobWriter,
    Root,
    Store,
    Version,
    create_upto,
    delete_all,
    free_nbytes,
    is_sequential,
    preferred_requests,
)

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_NAMES = (
    "EAGAIN", "EINTR", "EBUSY", "ETIMEDOUT", "ESTALE", "EIO", "EREMOTEIO", "ENETDOWN", "ENETUNREACH", "ENETRESET",
    "ECONNABORTED", "ECONNRESET", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENOTCONN", "EPIPE",
)  # fmt: skip
TRANSIENT = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))
"""What may be gone in a moment. A full disk, a lack of rights and a name that is taken are not."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 15.0
_LONGEST_DEAF_S = 0.5
"""A wait is looked up from so often, to see whether it is still wanted."""

OnRetry = Callable[[int, StorageError, float], object]
"""Is called with the attempt that failed (from 1), its error, and how long the next one waits."""


class RetryPolicy:
    """How often, and after which waits, something is tried again."""

    def __init__(
        self,
        retries: int,
        *,
        told: OnRetry | None = None,
        sleep: Callable[[float], object] = time.sleep,
        wanted: Callable[[], bool] | None = None,
    ) -> None:
        """
        Say how often.

        Args:
            retries: how many times more than once.
            told: is told of each failure that is tried again.
            sleep: waits.
            wanted: is asked before each attempt whether there is to be one.

        """
        self._retries = retries
        self._told = told
        self._sleep = sleep
        self._wanted = wanted

    def attempt(self, what: str, work: Callable[[int], T]) -> T:
        """
        Do some work, which is told how many attempts failed before, until it succeeds or is to be given up.

        Raises:
            SaveCancelled: it is not wanted any more.

        """
        for failed in range(self._retries):
            self._insist(what)
            try:
                return work(failed)
            except StorageError as error:
                if error.errno not in TRANSIENT:
                    raise
                wait_s = self._wait_s(failed)
                log.warning("%s failed (attempt %d), tried again in %.1f s: %s", what, failed + 1, wait_s, error)
                if self._told is not None:
                    self._told(failed + 1, error, wait_s)
                self._pause(wait_s)
        self._insist(what)
        return work(self._retries)

    def _insist(self, what: str) -> None:
        if self._wanted is not None and not self._wanted():
            raise SaveCancelled(f"{what} is not tried: it is not wanted any more")

    def _pause(self, wait_s: float) -> None:
        if self._wanted is None:
            self._sleep(wait_s)
            return
        while wait_s > 0 and self._wanted():
            self._sleep(min(_LONGEST_DEAF_S, wait_s))
            wait_s -= _LONGEST_DEAF_S

    @staticmethod
    def _wait_s(failed: int) -> float:
        # Spread: what fails for one rank fails for all, and they should not come back in one moment.
        spread = 0.5 + random.random()  # noqa: S311 - no secret
        return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**failed * spread))


class RetryingStore:
    """Pass everything on to `inner`, and try it again where it fails in passing."""

    def __init__(self, inner: Store, patience: RetryPolicy, *, before_put: Callable[[], object] | None = None) -> None:
        """Wrap a store; `before_put` is called before each `put`, which does not happen if it raises."""
        self.inner = inner
        self.url = inner.url
        self._patience = patience
        self._before_put = before_put

    def __repr__(self) -> str:
        return f"RetryingStore({self.inner!r})"

    def create(self, name: str, nbytes: int) -> BlobWriter:
        return self._create(name, lambda: self.inner.create(name, nbytes))

    def create_upto(self, name: str, nbytes: int) -> BlobWriter:
        return self._create(name, lambda: create_upto(self.inner, name, nbytes))

    def _create(self, name: str, create: Callable[[], BlobWriter]) -> BlobWriter:
        def work(failed: int) -> BlobWriter:
            try:
                return create()
            except StorageError as error:
                if not failed or error.errno != errno.EEXIST:
                    raise
            # Made by the attempt that failed: nobody else makes a blob of that name at the same time.
            self.inner.delete(name)
            return create()

        writer = self._patience.attempt(f"to create {self.url}/{name}", work)
        return _RetryingWriter(writer, f"{self.url}/{name}", self._patience)

    def open(self, name: str) -> BlobReader:
        reader = self._again("open", name, lambda: self.inner.open(name))
        return _RetryingReader(reader, f"{self.url}/{name}", self._patience)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: Version | None = None) -> None:
        # Stores of a user's own may know no versions, and are asked for none where none is meant.
        how: dict[str, Any] = {"replace": replace} if over is None else {"replace": replace, "over": over}

        def work(failed: int) -> None:
            if self._before_put is not None:
                self._before_put()
            try:
                self.inner.put(name, data, **how)
            except StorageError as error:
                mine = self._mine(name, data) if failed and error.errno == errno.EEXIST else None
                if mine is None:
                    raise
            else:
                return
            # Put there by the attempt that failed, perhaps before it was durable.
            self.inner.put(name, data, over=mine)

        self._patience.attempt(f"to put {self.url}/{name}", work)

    def _mine(self, name: str, data: bytes) -> Version | None:
        """Return the version of a blob that has these bytes; None where it has others or is gone."""
        version = self.inner.version(name)
        try:
            return version if self.inner.get(name, limit=len(data)) == data else None
        except (BlobNotFound, MalformedFile):
            return None

    def get(self, name: str, *, limit: int) -> bytes:
        return self._again("get", name, lambda: self.inner.get(name, limit=limit))

    def version(self, name: str) -> Version | None:
        return self._again("look at", name, lambda: self.inner.version(name))

    def list(self) -> Iterator[BlobInfo]:
        return iter(self._again("list", "", lambda: list(self.inner.list())))

    def delete(self, name: str) -> None:
        self._again("delete", name, lambda: self.inner.delete(name))

    def delete_all(self, names: Sequence[str]) -> None:
        """Remove many blobs, in few requests where the inner store can."""
        self._again("delete", "", lambda: delete_all(self.inner, names))

    def free_nbytes(self) -> int | None:
        """Say what the inner store says."""
        return free_nbytes(self.inner)

    @property
    def sequential(self) -> bool:
        """Say what the inner store says."""
        return is_sequential(self.inner)

    @property
    def requests(self) -> int:
        """Say what the inner store says; 0 where it does not mind."""
        return preferred_requests(self.inner, 0)

    def _again(self, verb: str, name: str, work: Callable[[], T]) -> T:
        return self._patience.attempt(f"to {verb} {self.url}/{name}", lambda _: work())


class _RetryingWriter:
    def __init__(self, inner: BlobWriter, where: str, patience: RetryPolicy) -> None:
        self._inner = inner
        self._where = where
        self._patience = patience

    def write_at(self, offset: int, data: memoryview) -> None:
        self._patience.attempt(f"to write {self._where} at {offset}", lambda _: self._inner.write_at(offset, data))

    def finish(self, nbytes: int | None = None) -> None:
        self._inner.finish(nbytes)

    def abandon(self) -> None:
        self._inner.abandon()


class _RetryingReader:
    def __init__(self, inner: BlobReader, where: str, patience: RetryPolicy) -> None:
        self._inner = inner
        self._where = where
        self._patience = patience

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        return self._inner.cached(offset, nbytes)

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        self._patience.attempt(
            f"to read {self._where} at {offset}", lambda _: self._inner.read_into(offset, into, cached=cached)
        )

    def close(self) -> None:
        self._inner.close()


# A root that tries again what failed in passing, on itself and on all places below it.


class RetryingRoot(RetryingStore):
    """Pass everything on to `inner`, and try it again where it fails in passing."""

    def __init__(self, inner: Root, patience: RetryPolicy) -> None:
        """Wrap a root."""
        super().__init__(inner, patience)
        self._root = inner

    def __repr__(self) -> str:
        return f"RetryingRoot({self._root!r})"

    def places(self) -> Iterator[str]:
        return iter(self._again("list the places of", "", lambda: list(self._root.places())))

    def place(self, name: str) -> RetryingStore:
        return RetryingStore(self._root.place(name), self._patience)

    def remove(self, name: str) -> None:
        self._again("remove", name, lambda: self._root.remove(name))

    def drop_empty(self, name: str) -> None:
        self._again("remove", name, lambda: self._root.drop_empty(name))
