"""
Threads that share a list of tasks, the memory they use, and the windows they read and write files through.

Torch is imported only if there are tensors on an accelerator, so that files can be verified without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardkeep.codecs.coded_store import BATCH
from shardkeep.errors import CheckpointError, SaveCancelled
from shardkeep.format.boxes import Box, Ints
from shardkeep.format.frames import FRAME_NBYTES
from shardkeep.options import Options, cores, local_ranks
from shardkeep.storage.base import part_nbytes_of, preferred_requests
from shardkeep.storage.buffers import MemoryBudget, aligned_buffer, allocating
from shardkeep.storage.cancel import CancelScope

if TYPE_CHECKING:
    import torch

    from shardkeep.engine.pools import Arenas, Buffer, BufferPool, StagingMemory


T = TypeVar("T")

WINDOW_NBYTES = 8 << 20
"""One request to a disk: large enough for its full speed."""
MIN_WINDOW_NBYTES = 1 << 20
ACCELERATOR_WINDOW_NBYTES = 16 << 20
"""One copy to an accelerator: twice as large, because each also has to wait for the interpreter's lock."""
_ENOUGH_THREADS = 8
"""If threads work rather than wait, larger windows are better than more threads than this."""
_POLL_S = 0.5
_WORTH_PINNING_NBYTES = 256 << 20
"""Pinning memory takes as long as copying fifty times as much through it, but is done once in a process."""


class Scattered:
    """Memory that is not one run of host bytes."""

    nbytes: int
    accelerator: int | None = None
    """The index of the accelerator it is on; None for host memory."""
    address = 0
    """Where it begins on the accelerator."""

    def read(self, start: int, stop: int, into: memoryview, *, queued: bool = False) -> None:
        """Copy whole elements, bytes `start..stop` of the row-major form; `queued`: an accelerator only queues it."""
        raise NotImplementedError

    def write(self, box: Box, data: memoryview, shape: Ints, part: Box) -> None:
        """Fill `box` from `part` of row-major elements of this shape."""
        raise NotImplementedError

    def write_chunk(self, shape: Ints, source: Box, target: Box, data: memoryview, at: int) -> bool:  # noqa: ARG002
        """
        Fill box `target` with what `data` holds of box `source` of a row-major chunk of this shape.

        `data` begins `at` bytes after the start of the chunk, or before it. On an accelerator the copy is only queued, and needs
        `data` until `wait` returns. Returns False, and does nothing, if only `write` can do it.
        """
        return False

    def wait(self) -> None:
        """Wait for what this thread has queued on its accelerator, for any memory."""


class WorkerBudget(NamedTuple):
    threads: int
    window_nbytes: int
    """Of each thread."""
    room_nbytes: int
    """For what a store copies on the way, beyond the one part of each open file, which is counted already."""

    @property
    def room(self) -> MemoryBudget | None:
        """A new budget for these copies; None if the store makes none that have to be bounded."""
        return MemoryBudget(self.room_nbytes) if self.room_nbytes else None


def divide_budget(
    threads: int, budget_nbytes: int, window: int = WINDOW_NBYTES, *, coded: bool = False, part_nbytes: int = 0
) -> WorkerBudget:
    """Divide a budget: at least one thread with a small window. `part_nbytes`: what a store keeps of an open file."""

    def held(count: int, nbytes: int) -> int:
        """Return what `count` threads with windows of `nbytes` hold, without the room."""
        # Frames that go through two codecs take three copies, and scratch space.
        each = nbytes + (4 * min(nbytes, BATCH * FRAME_NBYTES) + FRAME_NBYTES if coded else 0)
        if not part_nbytes:
            return count * (each + nbytes)  # the store may read or write through a buffer of its own
        # Each thread may be assembling a part of another file, and one of these is in the room.
        return count * each + (count - 1) * part_nbytes

    # If parts are not windows, they are copied and sent from there; else they are sent from the windows themselves.
    copied = coded or part_nbytes > window

    def fitting(nbytes: int) -> int:
        """Return how many threads with windows of `nbytes` fit."""
        sizes = ((n, held(n, nbytes) + (n if copied else 1) * part_nbytes) for n in range(threads, 0, -1))
        return next((n for n, size in sizes if size <= budget_nbytes), 0)

    sizes = [window]
    while sizes[-1] > MIN_WINDOW_NBYTES:
        sizes.append(max(MIN_WINDOW_NBYTES, sizes[-1] // 2))
    enough = threads
    if part_nbytes:
        # A window that is a part is sent without a copy: a few of these are better than many small ones.
        enough = min(threads, _ENOUGH_THREADS) if copied else 1
    size = next((each for each in sizes if fitting(each) >= enough), None) or max(sizes, key=fitting)
    if not (count := fitting(size)):
        count, size = 1, MIN_WINDOW_NBYTES
    room = min(budget_nbytes - held(count, size), threads * part_nbytes)
    return WorkerBudget(count, size, max(part_nbytes, room))


def limits_for_reads(
    store: object, options: Options, window_nbytes: int = WINDOW_NBYTES, *, coded: bool = False
) -> tuple[int, int]:
    threads = preferred_requests(store, options.io_threads)
    return divide_budget(threads, options.host_budget_bytes, window_nbytes, coded=coded)[:2]


def budget_for_store(
    store: object, threads: int, budget_nbytes: int, *, coded: bool, window: int = WINDOW_NBYTES
) -> WorkerBudget:
    """Divide a budget for writing to a store, by the number and the size of requests that the store prefers."""
    return divide_budget(
        preferred_requests(store, threads), budget_nbytes, window, coded=coded, part_nbytes=part_nbytes_of(store)
    )


class FollowUpError(CheckpointError):
    """Raised by a task that cannot be done because another task failed, whose error is the cause."""


def run_workers(
    tasks: Iterable[T],
    work: Callable[[T, memoryview], bool],
    *,
    threads: int,
    buffer_nbytes: int,
    lend: Callable[[], memoryview] | None = None,
    on_stop: Callable[[], object] | None = None,
    scope: CancelScope | None = None,
    alone: bool = False,
) -> None:
    """
    Do every task on one of `threads` threads, each with its own reused page-aligned buffer; `alone`: on the caller's.

    If a task fails, no other is started, those in progress end, and the first exception is raised. A `scope` is then
    cancelled too, and if it is no longer wanted, SaveCancelled is raised. `work` returns whether it waited for a
    device: threads that do not wait only get in each other's way if there are more than cores, so these leave. `lend`
    makes a buffer, on the thread that uses it. `on_stop` is called on a failure or an interrupt; it must neither wait
    nor raise, and may be called again.
    """
    queue = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()
    failed: list[BaseException] = []
    changed, at_work = threading.Condition(), 0
    surplus = max(0, threads - max(1, cores() // local_ranks()))

    def next_task() -> T | None:
        with lock:
            return None if stop.is_set() else next(queue, None)

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
            while (task := next_task()) is not None:
                if buffer is None:
                    buffer = lend() if lend else aligned_buffer(buffer_nbytes)
                waited = work(task, buffer)
                if not waited and leaves():
                    return
        except BaseException as exc:  # noqa: BLE001 - raised by the caller's thread
            failed.append(exc)
            cancel()
        finally:
            with changed:
                at_work -= 1
                changed.notify_all()

    def cancel() -> None:
        stop.set()
        if scope is not None:
            scope.cancel()
        if on_stop is not None:
            on_stop()

    if alone:
        worker()
    wanted = None if scope is None else scope.wanted
    with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep") as pool:
        try:
            futures = [pool.submit(worker) for _ in range(0 if alone else threads)]
            while wait(futures, _POLL_S if wanted else None).not_done:
                if wanted and not wanted() and not stop.is_set():
                    failed.insert(0, SaveCancelled("it was cancelled while its files were written"))
                    cancel()
        except BaseException:
            cancel()  # after an interrupt, or if a thread cannot be started: do not wait for the whole list
            # The pool does not know of a thread whose start was interrupted, so its end is waited for here.
            with changed:
                changed.wait_for(lambda: not at_work)
            raise
        finally:
            stop.set()
    for exc in sorted(failed, key=lambda exc: isinstance(exc, FollowUpError)):
        raise exc


Lend = Callable[[], memoryview]
"""Returns the window of the calling thread."""


@contextmanager
def windows_for(
    memory: Iterable[Scattered],
    nbytes: int,
    threads: int,
    *,
    after: Mapping[torch.device, torch.Event] | None = None,
    staging: StagingMemory | None = None,
) -> Iterator[Lend]:
    """
    Return the function that gives each of at most `threads` threads one window of `nbytes`, to use while inside.

    The thread that uses the window must call it: if `memory` is on an accelerator, it switches the thread to that
    device, and to a stream of its own after these events, by default after all the caller has queued. On a shared
    stream, a thread that waits for its own copies would wait for those of all threads. With `staging`, all windows come from
    there, because another process reads them.
    """
    on_accelerators = [each for each in memory if each.accelerator is not None]
    if not on_accelerators and not staging:
        yield partial(_window, nbytes)
        return
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    from shardkeep.engine.pools import staging_memory  # noqa: PLC0415 - it imports torch

    kind = torch.accelerator.current_accelerator(True)
    indices = dict.fromkeys(each.accelerator for each in on_accelerators if each.accelerator is not None)
    devices = [torch.device(kind.type, index) for index in indices] if kind else []
    if after is None:  # after what this thread has queued so far
        after = {device: torch.accelerator.current_stream(device).record_event() for device in devices}
    events = list(after.items()) if indices else []
    ring, streams = (staging or staging_memory()).ring, staging_memory().streams
    per_buffer = ring.buffer_nbytes // nbytes
    pins = per_buffer > 0 and sum(each.nbytes for each in on_accelerators) >= _WORTH_PINNING_NBYTES
    if pins:
        wanted = -(-threads // per_buffer) * ring.buffer_nbytes
        ring.most_nbytes = max(ring.most_nbytes, min(wanted, Options().pinned_bytes))
    del memory, on_accelerators  # the user may let go of them
    taken: list[tuple[BufferPool | Arenas, Buffer]] = []
    free: list[memoryview] = []
    lock = threading.Lock()
    numbers = count()

    def lend() -> memoryview:
        if indices:
            torch.accelerator.set_device_index(next(iter(indices)))
        with lock:
            number = next(numbers)
            for device, event in reversed(events):
                key = device, number
                stream = streams.get(key) or streams.setdefault(key, torch.Stream(device))
                stream.wait_event(event)
                torch.accelerator.set_stream(stream)  # and its device, in the end the first
            # Never waits: the save that uses the ring now may be waiting for this very thread.
            if pins and not free and (buffer := ring.take(lambda: False)):
                taken.append((ring, buffer))
                free.extend(buffer.view[at * nbytes : (at + 1) * nbytes] for at in range(per_buffer))
            if staging and not free:
                taken.append((staging.arenas, buffer := staging.arenas.take(nbytes, nbytes)))
                free.append(buffer.view[:nbytes])
            return free.pop() if free else _window(nbytes)

    try:
        yield lend
    finally:
        for pool, buffer in taken:
            pool.give(buffer)


def _window(nbytes: int) -> memoryview:
    with allocating(f"a window of {nbytes >> 10} KiB", "allow less with Options(host_budget_bytes=...)"):
        return aligned_buffer(nbytes)
