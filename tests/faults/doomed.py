"""What runs in the processes that are killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from tests.faults.calls import CHANGING, strike_at
from tests.faults.scene import save_all


def save_and_die_at(pipe: Connection, place: str, ranks: int, k: int, n: int) -> None:
    """Save state `k`, and be killed in the place of the n-th call that changes anything."""

    def die(name: str, _: Any) -> None:
        pipe.send(name)
        os.kill(os.getpid(), signal.SIGKILL)

    with strike_at(n, die, CHANGING):
        save_all(ranks, place, k)
