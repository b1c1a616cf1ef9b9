"""
Threads that share a list of work: no bare threads, every failure read, the first one stops the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from shardkeep.errors import CheckpointError
from shardkeep.options import cores, local_ranks
from shardkeep.store.aligned import aligned_buffer

T = TypeVar("T")

WINDOW_NBYTES = 8 << 20
"""One request to a disk: large enough for its full speed."""
MIN_WINDOW_NBYTES = 1 << 20
ACCELERATOR_WINDOW_NBYTES = 16 << 20
"""One copy to an accelerator: twice as large, as each also costs turns at the interpreter's lock."""


def window_for(threads: int, budget_nbytes: int, window: int = WINDOW_NBYTES) -> tuple[int, int]:
    """
    Return how many threads to use, and how large a window each may have, up to `window`, within a budget.

    Each thread may hold two windows: its own buffer, and one the store reads or writes through.
    """
    while window > MIN_WINDOW_NBYTES and 2 * window * threads > budget_nbytes:
        window //= 2
    return max(1, min(threads, budget_nbytes // (2 * window))), window


class Consequence(CheckpointError):
    """Raised by work that cannot be done because other work failed, which has the cause."""


def run_workers(
    tasks: Iterable[T],
    work: Callable[[T, memoryview], bool],
    *,
    threads: int,
    buffer_nbytes: int,
    lend: Callable[[], memoryview] | None = None,
    stop: threading.Event | None = None,
    on_stop: Callable[[], object] | None = None,
) -> None:
    """
    Do every task on one of `threads` threads, each with its own reused page-aligned buffer.

    `lend` makes a buffer of that size, on the thread that gets a first task; by default it is ordinary memory.

    `work` tells whether it waited for a device: threads that do not are only in each other's way once there are more
    than cores, and leave. Returns when all are done. If one fails, no further task is begun, those under way end, and
    the exception of the first is raised. `stop` is then set, or when the caller is interrupted: long work should look at
    it. What cannot is told by `on_stop`, which must neither wait nor raise, and may be called more than once.
    """
    queue = iter(tasks)
    lock = threading.Lock()
    stop = stop or threading.Event()
    failed: list[BaseException] = []
    surplus = max(0, threads - max(1, cores() // local_ranks()))

    def next_task() -> Iterator[T]:
        while not stop.is_set():
            with lock:
                try:
                    task = next(queue)
                except StopIteration:
                    return
            yield task

    def leaves() -> bool:
        nonlocal surplus
        with lock:
            surplus -= 1
            return surplus >= 0

    def worker() -> None:
        buffer: memoryview | None = None
        try:
            for task in next_task():
                if buffer is None:
                    buffer = lend() if lend else aligned_buffer(buffer_nbytes)
                waited = work(task, buffer)
                if not waited and leaves():
                    return
        except BaseException as exc:  # noqa: BLE001 - raised by the caller's thread
            failed.append(exc)
            give_up()

    def give_up() -> None:
        stop.set()
        if on_stop is not None:
            on_stop()

    with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep") as pool:
        try:
            futures = [pool.submit(worker) for _ in range(threads)]
            wait(futures)
        except BaseException:
            give_up()  # an interrupt in the caller, or a thread too many, must not wait for the whole list
            raise
        finally:
            stop.set()
    for exc in sorted(failed, key=lambda exc: isinstance(exc, Consequence)):
        raise exc
