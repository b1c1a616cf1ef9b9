"""
The training process's side of the process that writes: shared memory, requests, and the manager that keeps the process.

A request says where in shared memory the bytes of a window are: what the save copied in its call already lies there,
all else is staged into shared windows first. The process is kept for later saves, and replaced when it has died.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import shardkeep
from shardkeep.engine.codecs import FileCodecs
from shardkeep.engine.pools import WINDOW_NBYTES, Arenas, Buffer, BufferPool, StagingMemory, pinned_buffer
from shardkeep.engine.process import rpc, server
from shardkeep.engine.process.rpc import CANCELLED_S, SLOWEST_BYTES_PER_S, ChildKind, ChildProcess, WaitPolicy
from shardkeep.engine.staging import save_ended
from shardkeep.engine.workers import WorkerBudget, divide_budget
from shardkeep.engine.writer import FileJob, Take, Window
from shardkeep.errors import CheckpointError, SaveCancelled, UnknownCodec, WriterDied, error_class
from shardkeep.format.boxes import IntArray
from shardkeep.options import per_process
from shardkeep.storage.base import (
    BlobWriter,
    Store,
    StoreSpec,
    is_sequential,
    part_nbytes_of,
    preferred_requests,
    spec_of,
)
from shardkeep.storage.buffers import ALIGNMENT, address_of
from shardkeep.storage.cancel import current_scope

log = logging.getLogger("shardkeep")

_REMOTE_CLEANUP_S = 15.0
"""What a remote store may need to abort uploads, when a save is cancelled."""
_NOEXEC = 8
"""MFD_NOEXEC_SEAL, which Python has no name for: newer kernels warn about files without it, or refuse them."""
_KIND = ChildKind(
    name="the process that writes checkpoints",
    error=WriterDied,
    if_not_started='free memory, processes or file descriptors, or pass writer="thread"',
    if_dead=(
        "this save is lost, and the next one starts a new process; if memory ran out, the kernel's log says so;"
        ' writer="thread" needs no process'
    ),
    if_silent=(
        "this save is lost, and the next one starts a new process; storage that hangs looks the same, and storage that is"
        " only slow needs a larger Options.timeout_s"
    ),
)
_multiprocessing: Any = spawn
_subprocess: Any = subprocess
_PROGRAM = (
    "import sys; sys.path[:] = {path}; from shardkeep.engine.process.server import main;"
    " main({pipes}, {notices}, {memory}, {parent})"
)


class WriterTraceback(CheckpointError):
    """Where in the writer process an exception was raised, as text."""


class WriterProcess(ChildProcess):
    """The process that writes: a program of its own, without `__main__`. Requests may be sent before it is ready."""

    def __init__(self, memory: int, pipes: int) -> None:
        """Start the process, which writes from the memory file of this descriptor; raises WriterDied if that fails."""
        super().__init__(functools.partial(_spawn, memory), pipes=pipes, kind=_KIND)

    def ask(self, request: server.WriterRequest, policy: WaitPolicy, *, more_s: float = 0.0) -> server.WriterReply:
        message = msgspec.msgpack.encode(request)
        raw = self.call(lambda pipe, ready: rpc.send(pipe, message, ready), policy, more_s=more_s)
        reply = msgspec.msgpack.decode(raw, type=server.WriterReply)
        if (failure := reply.failure) is not None:
            kind = error_class(failure.kind)
            text = failure.message if kind.__name__ == failure.kind else f"{failure.kind}: {failure.message}"
            raise kind(text, hint=failure.hint, **failure.details) from WriterTraceback(failure.trace)
        return reply


def _spawn(memory: int, sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    executable = _multiprocessing.get_executable()
    if not executable:
        raise OSError("this program does not say where its Python is (sys.executable)")
    # The package may be found by a path that this program has set itself.
    path = [each or os.getcwd() for each in sys.path if isinstance(each, str)]
    path.append(os.path.dirname(os.path.dirname(os.path.abspath(shardkeep.__file__))))
    notices, *pipes = (each.fileno() for each in sockets)
    program = _PROGRAM.format(path=ascii(path), pipes=pipes, notices=notices, memory=memory, parent=os.getpid())
    flags: list[str] = _subprocess._args_from_interpreter_flags()  # as multiprocessing starts its processes
    before = signal.pthread_sigmask(signal.SIG_BLOCK, server.IGNORED_SIGNALS)  # until the process can ignore them
    try:
        return subprocess.Popen(  # noqa: S603 - ourselves
            [os.fsdecode(executable), *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[notices, *pipes, memory],
            start_new_session=True,  # so that a terminal's signals do not reach it
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Region(NamedTuple):
    address: int
    nbytes: int
    offset: int
    """In the memory file."""


SharedRuns = tuple[int, int, bytes, bytes]
"""Where in the memory file some bytes are: the last fields of `server.WriteRuns`."""


class SharedMemory:
    """Buffers that the writer process can map: regions of one memory file, so that one descriptor is enough. Thread-safe."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise CheckpointError(
                'writer="process" needs memory files (memfd_create), which this system does not have',
                hint='pass writer="thread"',
            )
        try:
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC | _NOEXEC)
        except OSError:  # an older kernel, without that flag
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self._end = 0
        self._regions: list[Region] = []
        self._freed: deque[Region] = deque()
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> Buffer:
        """Make a buffer, whose memory is freed with the last view of it."""
        rounded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            # Offsets in the file are not used again: the other process may still have the old ones mapped.
            offset = self._end
            os.ftruncate(self.fd, offset + rounded)
            self._end += rounded
        view = server.map_shared(self.fd, offset, rounded, owned=True)
        region = Region(address_of(view), rounded, offset)
        # Noted before the region is unmapped, because something else may lie at its address afterwards; and without the
        # lock, because the thread that frees the region may hold it.
        weakref.finalize(view.obj, self._freed.append, region).atexit = False
        with self._lock:
            insort(self._living(), region)
        return Buffer(view[:nbytes], torch.frombuffer(view, dtype=torch.uint8)[:nbytes])

    def locate(self, starts: IntArray, sizes: IntArray) -> SharedRuns | None:
        """Return where runs of bytes, given by their addresses, are, if all of them are in one region."""
        first, end = int(starts.min()), int((starts + sizes).max())
        with self._lock:
            regions = self._living()
            at = bisect_right(regions, first, key=lambda region: region.address) - 1
            region = regions[at] if at >= 0 else None
        if region is None or end > region.address + region.nbytes:
            return None
        inside = (starts - region.address).astype(np.int64)
        return region.offset, region.nbytes, inside.tobytes(), sizes.astype(np.int64).tobytes()

    def locate_window(self, window: Window) -> SharedRuns | None:
        job, rows, addresses = window.job, window.rows, window.addresses
        if not addresses.all():
            return None
        begins = job.start[rows.start : rows.stop]
        ends = np.append(job.start[rows.start + 1 : rows.stop + 1], job.data_nbytes)[: len(begins)]
        low = np.maximum(begins, window.start)
        sizes = np.minimum(ends, window.stop) - low
        some = sizes > 0
        return self.locate((addresses + low - begins)[some], sizes[some])

    def _living(self) -> list[Region]:
        while self._freed:
            self._regions.remove(self._freed.popleft())
        return self._regions


class _ProcessFile:
    def __init__(self, session: WriterSession, job: FileJob, codecs: FileCodecs | None, room_nbytes: int) -> None:
        self._session = session
        self._nbytes = job.nbytes
        self._name = job.name
        self._codecs = codecs
        self._over = False
        if (scope := current_scope()) is not None:
            scope.on_cancel(self.give_up)
        coded = codecs.spec_of(job.name) if codecs else None
        spec = None if coded is None else server.FileCodecSpec(*coded)
        try:
            self.number = session.ask(server.CreateFile(session.spec, job.name, job.nbytes, spec, room_nbytes)).file
        except UnknownCodec as error:
            error.hint = (
                "the writer process does not run your program: register the codec by an entry point of a package, or"
                ' pass writer="thread"'
            )
            raise

    def give_up(self) -> None:
        """Let threads that wait for a reply about this file have it soon, because the save has failed."""
        if not self._over:
            self._session.process.notify(self._name.encode())

    def write_at(self, offset: int, data: memoryview) -> None:
        self._session.ask(server.WriteBytes(self.number, offset, bytes(data)))

    def finish(self, nbytes: int | None = None) -> None:
        reply = self._session.ask(
            server.FinishFile(self.number, nbytes), nbytes=self._nbytes if nbytes is None else nbytes
        )
        self._over = True
        if reply.seal is not None and self._codecs is not None:
            self._codecs.seals[self._name] = reply.seal

    def abandon(self) -> None:
        if not self._over:
            self._over = True
            with contextlib.suppress(CheckpointError):  # the process is gone: a later save deletes the files
                self._session.ask(server.AbandonFile(self.number))


@dataclass(frozen=True)
class WriterSession:
    """What one save uses to be written by the writer process."""

    memory: StagingMemory
    """Shared memory, to copy and to stage to."""
    process: WriterProcess
    shared: SharedMemory
    store: Store
    spec: StoreSpec
    """As the writer process opens it."""
    policy: WaitPolicy
    wanted: Callable[[], bool]

    def budget(self, threads: int, budget_nbytes: int, *, coded: bool) -> WorkerBudget:
        """Return how many requests to make at a time, with which windows, and how much the other process may copy."""
        threads = min(preferred_requests(self.store, threads), self.process.pipes)
        part_nbytes = part_nbytes_of(self.store)
        if not part_nbytes:
            return WorkerBudget(threads, WINDOW_NBYTES, 0)
        # Where a store has parts, a window has several of them, so that few threads make many requests.
        return divide_budget(threads, budget_nbytes, WINDOW_NBYTES, coded=coded, part_nbytes=part_nbytes)

    def ask(self, request: server.WriterRequest, *, nbytes: int = 0) -> server.WriterReply:
        """Send a request, for which the process may have to make `nbytes` durable."""
        try:
            return self.process.ask(request, self.policy, more_s=nbytes / SLOWEST_BYTES_PER_S)
        except WriterDied as error:
            if self.wanted():
                raise
            raise SaveCancelled("the save was cancelled before its files were written") from error

    def create(self, codecs: FileCodecs | None, room_nbytes: int, job: FileJob) -> BlobWriter:
        """Begin a file; the store may copy `room_nbytes` on the way, 0: what it has for all files together."""
        try:
            return _ProcessFile(self, job, codecs, room_nbytes)
        except BaseException:
            # The file may exist or not, and is in no list that is cleaned up later.
            with contextlib.suppress(CheckpointError):
                self.store.delete(job.name)
            raise

    def put(self, take: Take, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        """Have a window hashed and written, and return the digests of its blocks. `take` gives what is not shared already."""
        if not self.wanted():
            raise save_ended()
        with contextlib.ExitStack() as taken:
            runs = self.shared.locate_window(window)
            if runs is None:
                data = taken.enter_context(take(window, own))
                runs = self.shared.locate(np.array([address_of(data)]), np.array([len(data)]))
            if runs is None or not isinstance(file, _ProcessFile):  # unreachable: windows are staged in shared memory
                raise CheckpointError("a window does not lie in shared memory")
            return self.ask(server.WriteRuns(file.number, window.offset, window.job.block_nbytes, *runs)).digests


class WriterManager:
    """Keeps the writer process and the shared memory between saves. Thread-safe."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._held: tuple[StagingMemory, SharedMemory] | None = None
        self._process: WriterProcess | None = None
        self._saves: list[Callable[[], bool]] = []
        self._ending = False
        atexit.register(self.end)

    @contextlib.contextmanager
    def session(
        self, store: Store, pipes: int, *, wanted: Callable[[], bool], timeout_s: float
    ) -> Iterator[WriterSession]:
        """Use the process for one save; it is started, to answer `pipes` requests at a time, if there is none."""
        spec = spec_of(store)
        with self._lock:
            memory, shared = self._shared_memory()
            if self._process is not None and not self._process.alive():
                log.warning("the process that writes checkpoints (pid %d) has died: a new one is started", self.pid)
                self._process = None
            process = self._process = self._process or WriterProcess(shared.fd, pipes)
            self._ending = False
            self._saves.append(wanted)
        cancelled_s = _REMOTE_CLEANUP_S if is_sequential(store) else CANCELLED_S
        policy = WaitPolicy(timeout_s, cancelled_s, abandoned=lambda: self._abandon(process))
        try:
            yield WriterSession(memory, process, shared, store, spec, policy, wanted)
        finally:
            with self._lock:
                self._saves.remove(wanted)
                if self._ending:
                    self._end()

    def memory(self) -> StagingMemory:
        """Return the memory shared with the process; if `end` comes before the session, it is staged once more."""
        with self._lock:
            return self._shared_memory()[0]

    def end(self) -> None:
        """End the process and free the memory, when the last save that uses them is over."""
        if self._owner != os.getpid():
            return  # a fork, at exit
        with self._lock:
            self._ending = True
            self._end()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _abandon(self, process: WriterProcess) -> bool:
        """Drop a process all of whose saves were cancelled; return whether that is so."""
        with self._lock:
            if any(wanted() for wanted in self._saves):
                return False  # ending it would fail that save too, which has a deadline of its own
            if self._process is process:
                self._process = None  # the next save starts another one
            return True

    def _shared_memory(self) -> tuple[StagingMemory, SharedMemory]:
        if self._held is None:
            shared = SharedMemory()
            # The ring is shared too, because the process writes from it what stays on a device until then.
            ring = BufferPool(functools.partial(pinned_buffer, make=shared.buffer), WINDOW_NBYTES, 0)
            windows, arenas = BufferPool(shared.buffer, WINDOW_NBYTES, 0), Arenas(shared.buffer)
            self._held = StagingMemory(ring=ring, windows=windows, arenas=arenas), shared
        return self._held

    def _end(self) -> None:
        if self._saves:
            return
        if self._process is not None:
            self._process.close()
        if self._held is not None:
            memory, shared = self._held
            memory.release()
            shared.close()
        self._process = self._held = None


writer_manager = per_process(WriterManager)
