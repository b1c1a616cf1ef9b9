"""What a Checkpointer takes from the world around it, in one value, so that tests can give it another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone

from shardkeep.manage.agreement import INTERVAL_S
from shardkeep.manage.lease import LEASE_S


def _now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True, kw_only=True)
class Seams:
    """Clocks and waits."""

    clock: Callable[[], float] = time.monotonic
    """Never jumps."""
    now: Callable[[], datetime] = _now
    """The time of day, with its zone."""
    sleep: Callable[[float], object] = time.sleep
    interval_s: float = INTERVAL_S
    """About how often ranks talk about what only one of them knows, and how often the request file is looked for."""
    lease_s: float = LEASE_S
