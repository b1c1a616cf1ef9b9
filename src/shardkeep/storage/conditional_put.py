"""
Putting a small blob so that of several writers one wins: by conditions that the service checks, or without them.

Without conditions a put looks whether the name is free, puts, and looks a moment later whose bytes are there. Threads of
one process are always told apart; writers elsewhere are if their puts come within that moment of each other, and one
that was held up for longer between looking and putting may replace what another was told is there to stay.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
import warnings
from typing import Any, Protocol

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError
from shardkeep.storage.base import Version, version_conflict
from shardkeep.storage.retry import TRANSIENT

log = logging.getLogger("shardkeep")

_TRIES = 4
_FIRST_WAIT_S = 0.2


class PutRequests(Protocol):
    """What swapping needs of a service."""

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put a blob whole, once; with a condition, which does not hold if it raises a `StorageError` with EEXIST."""

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole blob."""

    def version(self, name: str) -> Version | None:
        """Say which version is there."""

    def keeps_conditions(self, over: Version | None) -> bool:
        """Tell whether a condition is checked by the service."""


class ConditionalPuts:
    """Puts to one place."""

    def __init__(
        self,
        puts: PutRequests,
        url: str,
        *,
        settle_s: float,
        lock: threading.Lock,
        warned: set[str],
        retry_s: float = float("inf"),
    ) -> None:
        """`lock` and `warned` belong to all places of one service that this process sees; see also `Manners`."""
        self._puts = puts
        self._url = url
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._lock = lock
        self._warned = warned

    def put(self, name: str, data: Any, *, replace: bool = False, over: Version | None = None) -> None:
        """Put one: if there is none, or if it still is of that version, or in any case."""
        if replace and over is None:
            self._send(name, data)
        elif self._puts.keeps_conditions(over):
            self._send(name, data, create=over is None, over=over)
        else:
            self._look_and_send(name, data, over)

    def _send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put it, also where an answer is lost: then what is there is compared with what was sent."""
        unsure = False
        until = time.monotonic() + self._retry_s
        for failed in range(1, _TRIES + 1):
            try:
                return self._puts.send(name, data, create=create, over=over)
            except StorageError as error:
                # One that is to be replaced and is gone is a condition that does not hold; some say it this way.
                if error.errno == errno.EEXIST or (over is not None and isinstance(error, BlobNotFound)):
                    # A request that was made again may have been refused because of itself.
                    if (unsure or error.details.get("retried")) and self._is_there(name, data):
                        return None
                    raise self._refused(name, over) from None
                # What the library has tried again itself has had its time.
                over_time = error.details.get("retried") or time.monotonic() > until
                if error.errno not in TRANSIENT or failed == _TRIES or over_time:
                    raise
                unsure = True
                log.info("to put %s/%s is tried again: %s", self._url, name, error)
                time.sleep(_FIRST_WAIT_S * 2**failed * (0.5 + random.random()))  # noqa: S311 - no secret
        return None

    def _look_and_send(self, name: str, data: Any, over: Version | None) -> None:
        self._warn()
        with self._lock:
            if self._puts.version(name) != over:
                raise self._refused(name, over)
            self._send(name, data)
        time.sleep(self._settle_s)
        if not self._is_there(name, data):
            raise self._refused(name, over)

    def _warn(self) -> None:
        if "conditions" in self._warned:
            return
        self._warned.add("conditions")
        warnings.warn(
            f"{self._url.partition('://')[0]}: this service does not check the conditions of puts: jobs that commit to one"
            " place at the same time are told apart only by looking again a moment later; let one job at a time save to"
            " a place",
            stacklevel=5,
        )

    def _is_there(self, name: str, data: Any) -> bool:
        try:
            return self._puts.read(name, len(data)) == bytes(data)
        except (BlobNotFound, MalformedFile):
            return False

    def _refused(self, name: str, over: Version | None) -> StorageError:
        return name_taken(self._url, name) if over is None else version_conflict(f"{self._url}/{name}", name)


def name_taken(url: str, name: str) -> StorageError:
    """Make the error of a name that is in use."""
    return StorageError(f"{url}/{name}: there is one of that name (errno EEXIST)", name=name, errno=errno.EEXIST)
