"""
Puts of which only one of several concurrent writers succeeds.

Services that check conditions do this themselves. For the others, `ConditionalPuts` looks whether the name is free, puts,
and reads back a moment later whose bytes are there. Threads of one process always exclude each other. Writers in other
processes are detected if their puts fall within that moment; a writer that stalls for longer between looking and putting
can overwrite a put that was already reported as successful.
"""

from __future__ import annotations

import errno
import threading
import time
import warnings
from abc import ABC, abstractmethod
from typing import Any

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.base import Version, check_name, conflict, holds
from shardkeep.storage.retry import call_with_retries

_RETRIES = 3


class ConditionalPuts(ABC):
    url: str
    _settle_s: float
    _retry_s: float = float("inf")
    _lock: threading.Lock
    _warned: set[str]
    """These two are shared by all places of one service in this process."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @abstractmethod
    def send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put a blob, once. Raises a `StorageError` with EEXIST if the condition does not hold."""

    @abstractmethod
    def get(self, name: str, *, limit: int) -> bytes: ...

    @abstractmethod
    def version(self, name: str) -> Version | None: ...

    @abstractmethod
    def checks_conditions(self, over: Version | None) -> bool:
        """Return whether the service checks a condition: that there is no blob, or its version."""

    def put(self, name: str, data: Any, *, replace: bool = False, over: Version | None = None) -> None:
        check_name(name)
        if replace and over is None:
            self._send(name, data)
        elif self.checks_conditions(over):
            self._send(name, data, create=over is None, over=over)
        else:
            self._look_and_send(name, data, over)

    def _send(self, name: str, data: Any, *, create: bool = False, over: Version | None = None) -> None:
        """Put the blob; where an answer was lost, compare what is stored with what was sent."""
        unsure = False

        def send() -> None:
            nonlocal unsure
            try:
                self.send(name, data, create=create, over=over)
            except StorageError as error:
                # Some services answer "not found" where a blob to replace is gone: the condition does not hold.
                if error.errno == errno.EEXIST or (over is not None and isinstance(error, BlobNotFound)):
                    # A retried request may have been refused because its first attempt succeeded.
                    if (unsure or error.details.get("retried")) and holds(self.get, name, data):
                        return
                    raise conflict(f"{self.url}/{name}", name, over) from None
                unsure = True
                raise

        call_with_retries(f"put {self.url}/{name}", send, retries=_RETRIES, within_s=self._retry_s)

    def _look_and_send(self, name: str, data: Any, over: Version | None) -> None:
        if "conditions" not in self._warned:
            self._warned.add("conditions")
            warnings.warn(
                f"{self.url.partition('://')[0]}: this service does not check the conditions of puts, so shardkeep can only"
                " detect concurrent commits by reading back a moment later; let one job at a time save to a place",
                stacklevel=4,
            )
        with self._lock:
            if self.version(name) != over:
                raise conflict(f"{self.url}/{name}", name, over)
            self._send(name, data)
        time.sleep(self._settle_s)
        if not holds(self.get, name, data):
            raise conflict(f"{self.url}/{name}", name, over)
