"""
Threads that share a list of work: no bare threads, every failure read, the first one stops the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardkeep.codecs.coded_store import BATCH
from shardkeep.engine.memory import Scattered, asking_for_memory
from shardkeep.errors import CheckpointError, SaveCancelled
from shardkeep.format.frames import FRAME_NBYTES
from shardkeep.options import Options, cores, local_ranks
from shardkeep.storage.base import part_nbytes_of, preferred_requests
from shardkeep.storage.buffers import MemoryBudget, aligned_buffer
from shardkeep.storage.cancel import current_scope

if TYPE_CHECKING:
    import torch

    from shardkeep.engine.pools import Buffer


T = TypeVar("T")

WINDOW_NBYTES = 8 << 20
"""One request to a disk: large enough for its full speed."""
MIN_WINDOW_NBYTES = 1 << 20
ACCELERATOR_WINDOW_NBYTES = 16 << 20
"""One copy to an accelerator: twice as large, as each also costs turns at the interpreter's lock."""
_ENOUGH_THREADS = 8
"""Where most of them work rather than wait: larger windows are better then than more of them."""
_LOOK_S = 0.5


def window_for(
    threads: int, budget_nbytes: int, window: int = WINDOW_NBYTES, *, coded: bool = False
) -> tuple[int, int]:
    """Return how many threads to use, and how large a window each may have: `divide` for what goes on as it comes."""
    return divide_budget(threads, budget_nbytes, window, coded=coded)[:2]


class WorkerBudget(NamedTuple):
    """How a budget of memory is spent."""

    threads: int
    window_nbytes: int
    """Of each thread."""
    room_nbytes: int
    """For what a store copies on the way; beyond it each open file has one part, which is counted already."""

    @property
    def room(self) -> MemoryBudget | None:
        """A new one; None where a store copies nothing that would have to be bounded."""
        return MemoryBudget(self.room_nbytes) if self.room_nbytes else None


def divide_budget(
    threads: int,
    budget_nbytes: int,
    window: int = WINDOW_NBYTES,
    *,
    coded: bool = False,
    part_nbytes: int = 0,
) -> WorkerBudget:
    """
    Divide a budget: fewer threads, and smaller windows, where it is small; one thread and a small window at the least.

    Args:
        threads: how many there may be.
        budget_nbytes: memory for all of them together.
        window: the largest one.
        coded: bytes go through codecs.
        part_nbytes: what a store keeps of each open file until it can be sent; 0: bytes go on as they come.

    """

    def held(count: int, nbytes: int) -> int:
        """Say what so many threads with such windows hold, but for the room."""
        each = nbytes + (_codec_nbytes(nbytes) if coded else 0)
        if not part_nbytes:
            return count * (each + nbytes)  # the store may read or write through one of its own
        # Each may be putting a part of another file together, and one of these is in the room.
        return count * each + (count - 1) * part_nbytes

    # What is cut otherwise than by windows is copied, and sent from there; all else is sent from windows themselves.
    copied = coded or part_nbytes > window

    def fitting(nbytes: int) -> int:
        """Say how many threads fit with such windows."""
        counts = range(threads, 0, -1)
        rooms = ((count if copied else 1) * part_nbytes for count in counts)
        return next((n for n, room in zip(counts, rooms, strict=True) if held(n, nbytes) + room <= budget_nbytes), 0)

    sizes = [window]
    while sizes[-1] > MIN_WINDOW_NBYTES:
        sizes.append(max(MIN_WINDOW_NBYTES, sizes[-1] // 2))
    enough = threads
    if part_nbytes:
        # A window that is a part is sent without being copied: better few of these than many small ones.
        enough = min(threads, _ENOUGH_THREADS) if copied else 1
    size = next((each for each in sizes if fitting(each) >= enough), None) or max(sizes, key=fitting)
    if not (count := fitting(size)):
        count, size = 1, MIN_WINDOW_NBYTES
    room = min(budget_nbytes - held(count, size), threads * part_nbytes)
    return WorkerBudget(count, size, max(part_nbytes, room))


def budget_for_store(store: object, threads: int, budget_nbytes: int, *, coded: bool) -> WorkerBudget:
    """Divide a budget among those who write files to a store: it says how many requests it likes, and of which size."""
    return divide_budget(
        preferred_requests(store, threads), budget_nbytes, coded=coded, part_nbytes=part_nbytes_of(store)
    )


def _codec_nbytes(window: int) -> int:
    """Say what a thread holds beyond a window while its frames go through two codecs: them thrice, and as much to work in."""
    return 4 * min(window, BATCH * FRAME_NBYTES) + FRAME_NBYTES


class FollowUpError(CheckpointError):
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

    Threads work on the terms that the caller holds (`store.giving_up`): these are given up with the first failure, and
    when nobody wants the blobs any more, which is a `SaveCancelled`.
    """
    scope = current_scope()
    queue = iter(tasks)
    lock = threading.Lock()
    stop = stop or threading.Event()
    failed: list[BaseException] = []
    changed, at_work = threading.Condition(), 0
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
        nonlocal at_work
        buffer: memoryview | None = None
        with changed:
            at_work += 1
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
        finally:
            with changed:
                at_work -= 1
                changed.notify_all()

    def give_up() -> None:
        stop.set()
        if scope is not None:
            scope.cancel()
        if on_stop is not None:
            on_stop()

    with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep") as pool:
        try:
            futures = [pool.submit(copy_context().run, worker) for _ in range(threads)]
            while wait(futures, None if scope is None else _LOOK_S).not_done:
                if scope is not None and not scope.wanted() and not stop.is_set():
                    failed.insert(0, SaveCancelled("it was cancelled while its files were written"))
                    give_up()
        except BaseException:
            give_up()  # an interrupt in the caller, or a thread too many, must not wait for the whole list
            # Not left to the pool: it does not know of a thread in whose start it was interrupted.
            with changed:
                changed.wait_for(lambda: not at_work)
            raise
        finally:
            stop.set()
    for exc in sorted(failed, key=lambda exc: isinstance(exc, FollowUpError)):
        raise exc


# The windows that files are read and written through: ordinary memory, or pinned where much is copied to
# accelerators.
#
# Torch is imported only where there are tensors on an accelerator, so that files can be verified without it.

Lend = Callable[[], memoryview]
"""Gives a thread its window."""
Events = dict["torch.device", "torch.Event"]

_WORTH_PINNING_NBYTES = 256 << 20
"""To pin memory takes as long as to copy fifty times as much through it, but is done once a process."""


@contextmanager
def windows_for(memory: Iterable[Scattered], nbytes: int, threads: int) -> Iterator[Lend]:
    """
    Make the function that gives each of at most `threads` threads one window of `nbytes`, to use while inside.

    It is to be called by the thread that will use the window: where `memory` is on an accelerator, that thread then
    works on this one, rather than on the first there is, and on a stream of its own, after all that the caller has queued.
    On one stream, whoever waits for its own copies waits for everybody's.
    """
    on_accelerators = [each for each in memory if each.accelerator is not None]
    if not on_accelerators:
        yield partial(_window, nbytes)
        return
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    from shardkeep.engine.pools import staging_memory  # noqa: PLC0415 - it imports torch

    indices = list(dict.fromkeys(each.accelerator for each in on_accelerators if each.accelerator is not None))
    after = _events_now(indices)
    ring = staging_memory().ring
    per_buffer = ring.buffer_nbytes // nbytes
    pins = per_buffer > 0 and sum(place.nbytes for place in on_accelerators) >= _WORTH_PINNING_NBYTES
    if pins:
        wanted = -(-threads // per_buffer) * ring.buffer_nbytes
        ring.most_nbytes = max(ring.most_nbytes, min(wanted, Options().pinned_bytes))
    taken: list[Buffer] = []
    free: list[memoryview] = []
    lock = threading.Lock()
    numbers = count()

    def lend() -> memoryview:
        torch.accelerator.set_device_index(indices[0])
        with lock:
            _use_own_stream(next(numbers), after)
            # Never waits: whoever uses the ring now may be waiting for this very thread.
            if pins and not free and (buffer := ring.take(lambda: False)):
                taken.append(buffer)
                free.extend(buffer.view[at * nbytes : (at + 1) * nbytes] for at in range(per_buffer))
            return free.pop() if free else _window(nbytes)

    try:
        yield lend
    finally:
        for buffer in taken:
            ring.give(buffer)


def _window(nbytes: int) -> memoryview:
    with asking_for_memory(f"a window of {nbytes >> 10} KiB", "allow less with Options(host_budget_bytes=...)"):
        return aligned_buffer(nbytes)


def _events_now(indices: Iterable[int]) -> Events:
    """Mark what this thread has queued so far on accelerators."""
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    kind = torch.accelerator.current_accelerator(True)
    devices = [torch.device(kind.type, index) for index in indices] if kind else []
    return {device: torch.accelerator.current_stream(device).record_event() for device in devices}


def _use_own_stream(number: int, after: Events) -> None:
    """Have this thread, the one of that number, work on streams that come after these events; on the first device."""
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    for device, event in reversed(after.items()):
        stream = _stream(os.getpid(), device, number)
        stream.wait_event(event)
        torch.accelerator.set_stream(stream)  # and its device


@cache  # always the same few: torch keeps memory for each stream apart
def _stream(process_id: int, device: torch.device, number: int) -> torch.Stream:
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    del process_id, number
    return torch.Stream(device)
