"""Ranks as threads, for tests of many small worlds. They communicate as real ranks do, through a torch store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]  # absent from the stubs

from shardkeep.dist.world import World

T = TypeVar("T")


def run_thread_ranks(size: int, rank_main: Callable[[World], T], *, timeout_s: float = 30.0) -> list[T]:
    """Call `rank_main` with the `World` of each rank at the same time, and return the results by rank."""
    outcomes = thread_outcomes(size, rank_main, timeout_s=timeout_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]  # every exception was raised above


def thread_outcomes(size: int, rank_main: Callable[[World], T], *, timeout_s: float = 30.0) -> list[T | BaseException]:
    """Like `run_thread_ranks`, but return the exception of a rank in place of its result."""
    store = HashStore()

    def main(rank: int) -> T | BaseException:
        try:
            return rank_main(World(rank, size, store if size > 1 else None, timeout_s))
        except BaseException as exc:  # noqa: BLE001 - handed to the caller
            return exc

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))
