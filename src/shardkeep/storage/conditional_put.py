"""
Puts of which only one of several concurrent writers succeeds.

Services that check conditions do this themselves. For the others, `ConditionalPuts` looks whether the name is free, puts,
and reads back a moment later whose bytes are there. Threads of one process always exclude each other. Writers in other
processes are detected if their puts fall within that moment; a writer that stalls for longer between looking and putting
can overwrite a put that was already reported as successful.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import warnings
from typing import Any, Protocol

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError
from shardkeep.storage.base import Version, name_taken, version_conflict
from shardkeep.storage.retry import TRANSIENT, backoff_s

log = logging.getLogger("shardkeep")

_ATTEMPTS = 4
_FIRST_DELAY_S = 0.4


class PutRequests(Protocol):
    """The requests that `ConditionalPuts` makes."""

    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put a blob, once. Raises a `StorageError` with EEXIST if the condition does not hold."""

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole blob."""

    def version(self, name: str) -> Version | None:
        """Return the current version."""

    def checks_conditions(self, over: Version | None) -> bool:
        """Return whether the service checks this kind of condition."""


class ConditionalPuts:
    """Makes conditional puts to one place."""

    def __init__(
        self,
        requests: PutRequests,
        url: str,
        *,
        settle_s: float,
        lock: threading.Lock,
        warned: set[str],
        retry_s: float = float("inf"),
    ) -> None:
        """`lock` and `warned` are shared by all places of one service in this process."""
        self._requests = requests
        self._url = url
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._lock = lock
        self._warned = warned

    def put(self, name: str, data: Any, *, replace: bool = False, over: Version | None = None) -> None:
        """Put a blob: if there is none, or over a version, or unconditionally."""
        if replace and over is None:
            self._send(name, data)
        elif self._requests.checks_conditions(over):
            self._send(name, data, create=over is None, over=over)
        else:
            self._look_and_send(name, data, over)

    def _send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put the blob, retrying; where an answer was lost, compare what is stored with what was sent."""
        unsure = False
        until = time.monotonic() + self._retry_s
        for failed in range(1, _ATTEMPTS + 1):
            try:
                return self._requests.send(name, data, create=create, over=over)
            except StorageError as error:
                # Some services answer "not found" where a blob to replace is gone: the condition does not hold.
                if error.errno == errno.EEXIST or (over is not None and isinstance(error, BlobNotFound)):
                    # A retried request may have been refused because its first attempt succeeded.
                    if (unsure or error.details.get("retried")) and self._holds(name, data):
                        return None
                    raise self._refused(name, over) from None
                # What the client library already retried is not retried again.
                exhausted = error.details.get("retried") or time.monotonic() > until
                if error.errno not in TRANSIENT or failed == _ATTEMPTS or exhausted:
                    raise
                unsure = True
                log.info("retrying to put %s/%s: %s", self._url, name, error)
                time.sleep(backoff_s(failed, first_s=_FIRST_DELAY_S, longest_s=5.0))
        return None

    def _look_and_send(self, name: str, data: Any, over: Version | None) -> None:
        self._warn()
        with self._lock:
            if self._requests.version(name) != over:
                raise self._refused(name, over)
            self._send(name, data)
        time.sleep(self._settle_s)
        if not self._holds(name, data):
            raise self._refused(name, over)

    def _warn(self) -> None:
        if "conditions" in self._warned:
            return
        self._warned.add("conditions")
        warnings.warn(
            f"{self._url.partition('://')[0]}: this service does not check the conditions of puts, so shardkeep can only"
            " detect concurrent commits by reading back a moment later; let one job at a time save to a place",
            stacklevel=5,
        )

    def _holds(self, name: str, data: Any) -> bool:
        try:
            return self._requests.read(name, len(data)) == bytes(data)
        except (BlobNotFound, MalformedFile):
            return False

    def _refused(self, name: str, over: Version | None) -> StorageError:
        where = f"{self._url}/{name}"
        return name_taken(where, name) if over is None else version_conflict(where, name)
