"""
Staging: windows of files are filled before they are written, so that the state is released without waiting for the disk.

Tensors on an accelerator are copied on a stream of their own into pinned buffers (the ring), which several threads empty into
ordinary windows (the pool); writers take the windows as they come. Windows are filled in the order in which they are written,
so that a budget smaller than the state makes staging wait for the disk, and never for itself.

Writers read what lies in host memory, and was not copied in the call, when they come to it; the state is needed until the last
of it has been read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from shardkeep.engine.pools import Buffer, BufferPool
from shardkeep.engine.writer import Window, gather
from shardkeep.errors import SaveCancelled
from shardkeep.options import cores
from shardkeep.storage.buffers import address_of, copy_memory

if TYPE_CHECKING:
    import torch

log = logging.getLogger("shardkeep")
T = TypeVar("T")

_MOST_EMPTIERS = 12
"""This many copies at a time keep up with the link to an accelerator."""
_EMPTIERS_PER_CORE = 0.75
"""With more, the thread that queues copies waits for a core, and the link for that thread."""
_FEW_EMPTIERS = 4
"""If training does not wait for staging: training needs the cores."""

_PATIENCE_S = 0.2
"""How often a wait for writers checks whether the save still goes on."""

Events = dict["torch.device", "torch.Event"]


class Staging:
    """The windows of one save that are filled before they are written."""

    def __init__(
        self,
        windows: Iterable[Window],
        *,
        ring: BufferPool,
        pool: BufferPool,
        after: Mapping[torch.device, torch.Event],
        wanted: Callable[[], bool],
        urgent: bool = True,
        ahead: Callable[[Window], bool] | None = None,
        live: Callable[[Window], bool] | None = None,
    ) -> None:
        """
        Fill nothing yet. `windows` are all windows of the save, in the order in which they are written.

        Copies from the accelerators come after the events in `after`. `urgent`: training waits for the copies. `ahead` returns
        whether a window is filled ahead; by default if not all of its bytes lie in order on the host. `live` returns whether another
        window takes bytes from the caller's memory.
        """
        self._ring = ring
        self._pool = pool
        self._after = after
        self._wanted = wanted
        self._urgent = urgent
        self._ending = False
        self._one_writer = threading.Lock()
        self._lock = threading.Lock()
        every = list(windows)
        self._queue = list(filter(ahead or _has_scattered, every))
        self._ahead: dict[tuple[str, int], Future[Buffer]] = {(w.job.name, w.start): Future() for w in self._queue}
        self._last_of = {(w.job.name, w.start): list(_ending_in(w)) for w in self._queue}
        self._noted_nbytes = 0
        lent = filter(live, every) if live else ()
        self._unread = {key: w.nbytes for w in lent if (key := (w.job.name, w.start)) not in self._ahead}
        self._all_read = threading.Event()
        self.nbytes = sum(w.nbytes for w in self._queue) + sum(self._unread.values())
        """How much is copied after the call."""
        self.count = len(self._queue)
        """How many windows are filled ahead."""
        self.ring_nbytes = 0
        """What the ring grows to, for the next save, when all copies are queued."""
        self.copied: Future[None] = Future()
        """Done when the state is not needed any more."""
        self.queued: Future[Events] = Future()
        """Done when all copies are queued: work that comes after these events may change the state."""

    @property
    def nbytes_copied(self) -> int:
        """How much of the state has been copied."""
        if self.copied.done() and self.copied.exception() is None:  # threads may not have counted it yet
            return self.nbytes
        return self._noted_nbytes

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Fill windows while inside; at the end, stop what still goes on."""
        if not self._unread:
            self._all_read.set()
        if not self._queue and not self._unread:
            self.copied.set_result(None)
            self.queued.set_result({})
            yield
            return
        emptiers = min(_MOST_EMPTIERS if self._urgent else _FEW_EMPTIERS, max(2, int(_EMPTIERS_PER_CORE * cores())))
        try:
            with ThreadPoolExecutor(1 + emptiers, thread_name_prefix="shardkeep-stage") as threads:
                filling = threads.submit(self._fill_all, threads)
                try:
                    yield
                finally:
                    self._ending = True
                    filling.result()
        finally:
            self._fail(_save_ended())
            for ahead in self._ahead.values():  # windows that no writer took
                if not ahead.exception():
                    self._pool.give(ahead.result())

    @contextlib.contextmanager
    def take(self, window: Window, own: memoryview) -> Iterator[memoryview]:
        """Give the bytes of a window: wait until it is filled, or gather them now into the writer's own buffer."""
        self.check_wanted()
        ahead = self._ahead.get((window.job.name, window.start))
        if ahead is None:
            gather(window, own[: window.nbytes])
            self._note_read(window)
            yield own[: window.nbytes]
            return
        buffer = ahead.result()  # before the lock of `_among_writers`: its holder may have what this would wait for
        with self._lock:
            del self._ahead[window.job.name, window.start]
        try:
            with self._among_writers():
                yield buffer.view[: window.nbytes]
        finally:
            self._pool.give(buffer)

    def _among_writers(self) -> contextlib.AbstractContextManager[Any]:
        """Let one writer work at a time while training waits for copies: both need the cores and the memory bandwidth."""
        enough = self.count * self._pool.buffer_nbytes <= self._pool.most_nbytes  # else staging waits for writers
        alone = self._urgent and enough and self._all_read.is_set() and not self.copied.done()
        return self._one_writer if alone else contextlib.nullcontext()

    def _note_read(self, window: Window) -> None:
        """Note that a writer has read its bytes."""
        with self._lock:
            self._noted_nbytes += self._unread.pop((window.job.name, window.start), 0)
            if not self._unread:
                self._all_read.set()

    def check_wanted(self) -> None:
        """Raise SaveCancelled if the save was cancelled."""
        if not self._wanted():
            raise _save_ended()

    # -- on the staging threads ---------------------------------------------------------------------------------

    def _fill_all(self, threads: ThreadPoolExecutor) -> None:
        """Queue all copies, in order. A failure is raised by the threads that wait for a window."""
        try:
            last: Events = {}
            with contextlib.ExitStack() as current:
                streams = _streams_after(self._after)
                for stream in streams.values():
                    current.enter_context(stream)
                for window in self._queue:
                    buffer, target = self._buffers(through_ring=bool(streams))
                    try:
                        gather(window, buffer.view[: window.nbytes], queued=True)
                    except BaseException:
                        for stream in streams.values():
                            stream.synchronize()  # copies that were queued before the failure
                        self._give_back(buffer, target)
                        raise
                    last = {device: stream.record_event() for device, stream in streams.items()}
                    threads.submit(self._empty, window, buffer, target, last)
            self._wait_for_readers()
            self._settle(self.queued, last)
            for event in last.values():
                event.synchronize()  # the copies are complete, even if the ring is not emptied yet
            self._settle(self.copied, None)
        except BaseException as error:  # noqa: BLE001 - raised by other threads
            self._fail(error)
            return
        if last:
            self._grow_ring()

    def _wait_for_readers(self) -> None:
        while not self._all_read.wait(_PATIENCE_S):
            if not self._goes_on():
                raise _save_ended()

    def _grow_ring(self) -> None:
        """Pin memory for the next save: it takes long, and this save does not wait for it."""
        self._ring.most_nbytes = max(self._ring.most_nbytes, self.ring_nbytes)
        try:
            self._ring.grow(self._goes_on)
        except Exception as error:  # noqa: BLE001 - this save does not need it
            log.warning("could not pin more memory for staging: %s", error)

    def _buffers(self, *, through_ring: bool) -> tuple[Buffer, Buffer]:
        """Return a buffer to copy to, and the one that keeps the bytes until they are written."""
        target = self._pool.take(self._goes_on)
        if target is None:
            raise _save_ended()
        buffer = self._ring.take(self._goes_on) if through_ring else target
        if buffer is None:
            self._pool.give(target)
            raise _save_ended()
        return buffer, target

    def _give_back(self, buffer: Buffer, target: Buffer) -> None:
        self._pool.give(target)
        if buffer is not target:
            self._ring.give(buffer)

    def _goes_on(self) -> bool:
        return not self._ending and self._wanted()

    def _empty(self, window: Window, buffer: Buffer, target: Buffer, events: Events) -> None:
        """Copy a window out of the ring, when it is complete, and hand it to the writers."""
        try:
            for event in events.values():
                event.synchronize()
            self._note_copied(window)
            if buffer is not target:
                copy_memory(address_of(target.view), address_of(buffer.view), window.nbytes)
        except BaseException as error:  # noqa: BLE001 - raised by the threads that wait for a window
            self._fail(error)
        if buffer is not target:
            self._ring.give(buffer)
        if not self._settle(self._ahead[window.job.name, window.start], target):
            self._pool.give(target)

    def _note_copied(self, window: Window) -> None:
        """Release the sources of a copied window: they may be copies on an accelerator, where memory is scarce."""
        for row in self._last_of.pop((window.job.name, window.start)):
            window.job.scattered.pop(row, None)
        with self._lock:
            self._noted_nbytes += window.nbytes

    def _settle(self, future: Future[T], result: T) -> bool:
        """Set the result of a future, unless something has failed."""
        with self._lock:
            if future.done():
                return False
            future.set_result(result)
            return True

    def _fail(self, error: BaseException) -> None:
        """Raise an error in all threads that wait."""
        self._ending = True
        with self._lock:
            waited_for: list[Future[Any]] = [*self._ahead.values(), self.copied, self.queued]
            for future in waited_for:
                if not future.done():
                    future.set_exception(error)


def _ending_in(window: Window) -> Iterator[int]:
    """Yield the sources whose last bytes are in a window."""
    starts = window.job.start
    for row in window.rows:
        end = int(starts[row + 1]) if row + 1 < len(starts) else window.job.data_nbytes
        if end <= window.stop:
            yield row


def _has_scattered(window: Window) -> bool:
    """Return whether some bytes of a window do not lie in order in host memory."""
    return any(row in window.job.scattered for row in window.rows)


def _save_ended() -> SaveCancelled:
    return SaveCancelled("the save ended before its state was copied")


def _streams_after(events: Mapping[torch.device, torch.Event]) -> dict[torch.device, torch.Stream]:
    """Make a stream for each accelerator, whose work comes after an event, and switch this thread away from device 0."""
    if not events:
        return {}
    import torch  # noqa: PLC0415 - loaded, as there are events

    torch.accelerator.set_device_index(next(iter(events)).index)
    streams = {device: torch.Stream(device) for device in events}
    for device, event in events.items():
        streams[device].wait_event(event)
    return streams
