"""
Asking an object store again where the library does not: an answer that broke off after it had begun.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from shardkeep.errors import StorageError
from shardkeep.store.object_client import Manners
from shardkeep.store.retrying import TRANSIENT

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


def wait_s(failed: int) -> float:
    """Say how long to wait after so many failures: longer each time, and not as long as others do."""
    spread = 0.5 + random.random()  # noqa: S311 - no secret
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (failed - 1) * spread))


def ask_again(manners: Manners, what: str, work: Callable[[], T], *, can: Callable[[], bool] = lambda: True) -> T:
    """
    Do what can be done twice, until it succeeds or is to be given up; `can` tells whether it still can be.

    What the library has tried again itself has had its time, and is not tried here once more.
    """
    until = time.monotonic() + manners.retry_s
    failed = 0
    while True:
        try:
            return work()
        except StorageError as error:
            failed += 1
            mine = error.errno in TRANSIENT and not error.details.get("retried")
            if not mine or not can() or failed > manners.retries or time.monotonic() > until:
                raise
            log.info("%s is tried again: %s", what, error)
            time.sleep(wait_s(failed))
