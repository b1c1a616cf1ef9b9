"""
The one process that writes for this one, and the memory they share: kept over saves, replaced when it has died.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardkeep.errors import SaveCancelled, WriterDied
from shardkeep.run.coding import FileCoding
from shardkeep.run.staging import Staging
from shardkeep.run.workers import Division, divide
from shardkeep.run.write import Sink, Window
from shardkeep.run.writer_memory import SharedMemory
from shardkeep.run.writer_pipe import Patience
from shardkeep.run.writer_place_of import place_of
from shardkeep.run.writer_places import LocalPlace
from shardkeep.run.writer_process import WriterProcess
from shardkeep.run.writer_sink import OutsideSink, Target, shared_runs
from shardkeep.run.writer_wire import GiveUp, Reply, Request
from shardkeep.stage.buffers import Arenas, BufferPool
from shardkeep.stage.pinned import WINDOW_NBYTES, StagingMemory, staging_memory
from shardkeep.store import uploads
from shardkeep.store.object_parts import part_nbytes_of
from shardkeep.store.protocol import Store, requests_of

log = logging.getLogger("shardkeep")

_SLOWEST = 16 << 20
"""Bytes of a file that a slow disk makes durable in a second, of which a request to do so may have many to wait for."""

_TAKEN_BACK_S = 15.0
"""What a store that is not of this machine may need to take back what was uploaded, when a save is cancelled."""

Wanted = Callable[[], bool]
"""Says whether a save has not been cancelled."""


@dataclass(frozen=True)
class Outside:
    """What one save needs to be written by another process."""

    memory: StagingMemory
    """To copy and to stage to, so that the other process sees it."""
    process: WriterProcess
    shared: SharedMemory
    target: Target
    patience: Patience
    wanted: Wanted

    def divided(self, threads: int, budget_nbytes: int, *, coded: bool) -> Division:
        """Say how many threads may ask the other process at a time, with which windows, and what it may copy of them."""
        store = self.target.store
        threads = min(requests_of(store, threads), self.process.pipes)
        part_nbytes = part_nbytes_of(store)
        if not part_nbytes:
            return Division(threads, WINDOW_NBYTES, 0)
        # Where a store has parts, a window has several of them, so that few threads bring many requests.
        return divide(threads, budget_nbytes, WINDOW_NBYTES, coded=coded, part_nbytes=part_nbytes)

    def ask(self, request: Request, *, nbytes: int = 0) -> Reply:
        """
        Have the other process do something, for which it may have to wait for so many bytes to be durable.

        Raises:
            WriterDied: it has ended, or does not answer.
            SaveCancelled: so was the save, and the process has ended, or does not answer.
            CheckpointError: what the request raised there.

        """
        try:
            return self.process.ask(request, self.patience, more_s=nbytes / _SLOWEST)
        except WriterDied as error:
            if self.wanted():
                raise
            raise SaveCancelled("the save was cancelled before its files were written") from error

    def tell(self, said: GiveUp) -> None:
        """Say something to the other process that has no answer; neither waits nor raises."""
        self.process.tell(said)

    def sink(self, staging: Staging, coding: FileCoding, room_nbytes: int) -> Sink:
        """Return where windows go, through which codecs, and with how much memory for what is copied on the way."""
        return OutsideSink(self, self.shared, self.target._replace(room_nbytes=room_nbytes), staging, coding)

    def filled_ahead(self, window: Window) -> bool:
        """Say whether a window must be filled before the other process sees its bytes."""
        return shared_runs(window, self.shared) is None


class WriterHold:
    """The process that writes for this one. May be used by several threads."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._shared: SharedMemory | None = None
        self._memory: StagingMemory | None = None
        self._process: WriterProcess | None = None
        self._saves: list[Wanted] = []
        self._ending = False
        atexit.register(self.end)

    @contextlib.contextmanager
    def writing(self, store: Store, pipes: int, *, wanted: Wanted, timeout_s: float) -> Iterator[Outside]:
        """
        Have a process that writes to a store, while inside; it is started if there is none.

        Args:
            store: where to.
            pipes: how many threads may ask it at a time, if it is started.
            wanted: says whether the save has not been cancelled.
            timeout_s: how long the process may take for one answer.

        Raises:
            CheckpointError: the store cannot be opened in another process.
            WriterDied: the process could not be started.

        """
        place = place_of(store)
        target = Target(store, place, set())
        with self._lock:
            process, memory, shared = self._ready(pipes)
            self._ending = False
            self._saves.append(wanted)
        patience = Patience(timeout_s, given_up=lambda: self._given_up(process))
        if not isinstance(place, LocalPlace):
            patience = replace(patience, cancelled_s=_TAKEN_BACK_S)
        with contextlib.ExitStack() as after:
            after.callback(self._let_go, wanted)
            after.callback(_take_back, target)
            yield Outside(memory, process, shared, target, patience, wanted)

    def _let_go(self, wanted: Wanted) -> None:
        with self._lock:
            self._saves.remove(wanted)
            if self._ending:
                self._end()

    def end(self) -> None:
        """End the process and free the memory, when the last save is over that needs them."""
        if self._owner != os.getpid():
            return  # a fork, at exit
        with self._lock:
            self._ending = True
            self._end()

    @property
    def pid(self) -> int | None:
        """The process's id, if there is one."""
        return None if self._process is None else self._process.pid

    def _given_up(self, process: WriterProcess) -> bool:
        """Drop a process that has been told to write only what was cancelled since; say whether it was."""
        with self._lock:
            if any(wanted() for wanted in self._saves):
                return False  # to end it would end that save too, which has a deadline of its own
            if self._process is process:
                self._process = None  # the next save starts another one
            return True

    def _ready(self, pipes: int) -> tuple[WriterProcess, StagingMemory, SharedMemory]:
        if self._shared is None or self._memory is None:
            self._shared = SharedMemory()
            self._memory = StagingMemory(
                ring=staging_memory().ring,
                windows=BufferPool(self._shared.buffer, WINDOW_NBYTES, 0),
                arenas=Arenas(self._shared.buffer),
            )
        if self._process is not None and not self._process.alive():
            log.warning("the process that writes checkpoints (pid %d) has died: a new one is started", self.pid)
            self._process = None
        if self._process is None:
            self._process = WriterProcess(self._shared.fd, pipes)
        return self._process, self._memory, self._shared

    def _end(self) -> None:
        if self._saves:
            return
        if self._process is not None:
            self._process.close()
        if self._memory is not None:
            self._memory.windows.close()
            self._memory.arenas.close()
        if self._shared is not None:
            self._shared.close()
        self._process = self._memory = self._shared = None


def _take_back(target: Target) -> None:
    """Take back the uploads of a process that is gone: nobody else knows yet that nobody will finish them."""
    if not target.lost:
        return
    try:
        uploads.sweep(target.store, lambda each: each.name in target.lost)
    except Exception as exc:  # noqa: BLE001 - the save has failed already, and that is what is to be told
        log.info("%s: what the dead process had uploaded is not taken back: %s", target.store.url, exc)


@functools.cache  # outlives the calls that use it; a forked process must not touch its parent's
def _hold_of(process_id: int) -> WriterHold:
    del process_id
    return WriterHold()


def writer_hold() -> WriterHold:
    """Return what this process has."""
    return _hold_of(os.getpid())
