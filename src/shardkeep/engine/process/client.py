"""
The training process's side of the process that writes: shared memory, requests, and the manager that keeps the process.

The writer process hashes and writes windows of files. A request says where in shared memory the bytes of a window are: what
the save copied in its call already lies there; everything else (from accelerators, or not contiguous) is staged into shared
windows first. The process is kept for later saves, and replaced when it has died.
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
from dataclasses import dataclass, replace
from multiprocessing import spawn
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

import shardkeep
from shardkeep.engine.codecs import FileCodecs
from shardkeep.engine.pools import WINDOW_NBYTES, Arenas, Buffer, BufferPool, StagingMemory, staging_memory
from shardkeep.engine.process import rpc
from shardkeep.engine.process.rpc import SLOWEST_BYTES_PER_S, ChildKind, ChildProcess, Ready, WaitPolicy
from shardkeep.engine.process.server import (
    IGNORED_SIGNALS,
    AbandonFile,
    CancelSave,
    CreateFile,
    FileCodecSpec,
    FinishFile,
    WriteBytes,
    WriterReply,
    WriterRequest,
    WriteRuns,
    map_shared,
)
from shardkeep.engine.staging import Staging
from shardkeep.engine.workers import WorkerBudget, divide_budget
from shardkeep.engine.writer import FileJob, Sink, Window
from shardkeep.errors import CheckpointError, Failure, SaveCancelled, UnknownCodec, WriterDied, error_class
from shardkeep.format.boxes import IntArray
from shardkeep.storage.base import BlobWriter, Store, is_sequential, part_nbytes_of, preferred_requests, spec_of
from shardkeep.storage.buffers import ALIGNMENT, address_of
from shardkeep.storage.cancel import current_scope
from shardkeep.storage.resolve import StoreSpec

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
    """
    The process that writes.

    It runs a program of its own: nothing of the training process is copied, and `__main__` is not imported. Requests may be
    sent at once; they wait in the pipes until it is ready.
    """

    def __init__(self, memory: int, pipes: int) -> None:
        """Start the process, which writes from the memory file of this descriptor; raises WriterDied if that fails."""
        super().__init__(functools.partial(_spawn, memory), pipes=pipes, kind=_KIND)

    def ask(self, request: WriterRequest, policy: WaitPolicy, *, more_s: float = 0.0) -> WriterReply:
        """
        Send a request, and return the reply.

        Raises:
            WriterDied: the process died, or did not answer and was ended.
            CheckpointError: what the request raised there.

        """
        message = msgspec.msgpack.encode(request)

        def send(pipe: socket.socket, ready: Ready) -> None:
            rpc.send(pipe, message, ready)

        reply = msgspec.msgpack.decode(self.call(send, policy, more_s=more_s), type=WriterReply)
        if reply.failure is not None:
            raise _error_of(reply.failure) from WriterTraceback(reply.failure.trace)
        return reply

    def cancel(self, name: str) -> None:
        """Cancel the save that a file belongs to; neither waits nor raises."""
        self.notify(msgspec.msgpack.encode(CancelSave(name)))


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
    with _signals_blocked():  # until the process can ignore them
        return subprocess.Popen(  # noqa: S603 - ourselves
            [os.fsdecode(executable), *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[notices, *pipes, memory],
            start_new_session=True,  # so that a terminal's signals do not reach it
        )


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _error_of(failure: Failure) -> CheckpointError:
    kind = error_class(failure.kind)
    text = failure.message if kind.__name__ == failure.kind else f"{failure.kind}: {failure.message}"
    return kind(text, hint=failure.hint, **failure.details)


class Region(NamedTuple):
    """A part of the shared memory."""

    address: int
    """In this process."""
    nbytes: int
    offset: int
    """In the memory file."""


class SharedMemory:
    """Buffers that the writer process can map: regions of one memory file, so that one descriptor is enough. Thread-safe."""

    def __init__(self) -> None:
        """
        Make an empty memory file.

        Raises:
            CheckpointError: this system has no memory files.

        """
        if not hasattr(os, "memfd_create"):
            raise CheckpointError(
                'writer="process" needs memory files (memfd_create), which this system does not have',
                hint='pass writer="thread"',
            )
        try:
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC | _NOEXEC)
        except OSError:  # an older kernel, without that flag
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.fd)
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
        view = map_shared(self.fd, offset, rounded, owned=True)
        region = Region(address_of(view), rounded, offset)
        # Noted before the region is unmapped, because something else may lie at its address afterwards; and without the
        # lock, because the thread that frees the region may hold it.
        weakref.finalize(view.obj, self._freed.append, region).atexit = False
        with self._lock:
            insort(self._living(), region)
        return Buffer(view[:nbytes], torch.frombuffer(view, dtype=torch.uint8)[:nbytes])

    def region_of(self, start: int, stop: int) -> Region | None:
        """Return the region that holds these addresses."""
        with self._lock:
            regions = self._living()
            at = bisect_right(regions, start, key=lambda region: region.address) - 1
            found = regions[at] if at >= 0 else None
        return found if found and stop <= found.address + found.nbytes else None

    def _living(self) -> list[Region]:
        while self._freed:
            self._regions.remove(self._freed.popleft())
        return self._regions

    def close(self) -> None:
        """Close the memory file; buffers stay valid."""
        self._close()


class WriteTarget(NamedTuple):
    """Where files go."""

    store: Store
    """As this process has it."""
    spec: StoreSpec
    """As the writer process opens it."""
    room_nbytes: int = 0
    """Memory for what the store copies on the way; 0: what the store has for all files together."""


class SharedRuns(NamedTuple):
    """Where in shared memory some bytes are."""

    region: Region
    starts: IntArray
    """Addresses in this process."""
    sizes: IntArray


class ProcessSink:
    """A sink whose windows the writer process hashes and writes."""

    def __init__(
        self,
        client: WriterSession,
        memory: SharedMemory,
        target: WriteTarget,
        staging: Staging,
        codecs: FileCodecs | None,
    ) -> None:
        self._codecs = codecs
        self._client = client
        self._memory = memory
        self._target = target
        self._staging = staging

    def begin(self, job: FileJob) -> BlobWriter:
        """Begin a file."""
        try:
            return _ProcessFile(self._client, self._target, job, self._codecs)
        except BaseException:
            # The file may exist or not, and is in no list that is cleaned up later.
            with contextlib.suppress(CheckpointError):
                self._target.store.delete(job.name)
            raise

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        """Have a window written, and return the digests of its blocks."""
        self._staging.check_wanted()
        runs = shared_runs(window, self._memory)
        if runs is not None:
            return self._write(window, file, runs)
        with self._staging.take(window, own) as data:
            start = address_of(data)
            region = self._memory.region_of(start, start + len(data))
            if region is None:  # unreachable: windows are staged in shared memory
                raise CheckpointError("a window does not lie in shared memory")
            return self._write(window, file, SharedRuns(region, np.array([start]), np.array([len(data)])))

    def _write(self, window: Window, file: BlobWriter, runs: SharedRuns) -> bytes:
        if not isinstance(file, _ProcessFile):  # unreachable: `begin` made it
            raise TypeError(type(file))
        request = WriteRuns(
            file.number,
            window.offset,
            window.job.block_nbytes,
            runs.region.offset,
            runs.region.nbytes,
            (runs.starts - runs.region.address).astype(np.int64).tobytes(),
            runs.sizes.astype(np.int64).tobytes(),
        )
        return self._client.ask(request).digests


class _ProcessFile:
    """A file that the writer process writes."""

    def __init__(self, client: WriterSession, target: WriteTarget, job: FileJob, codecs: FileCodecs | None) -> None:
        self._client = client
        self._nbytes = job.nbytes
        self._name = job.name
        self._codecs = codecs
        self._over = False
        if (scope := current_scope()) is not None:
            scope.on_cancel(self.give_up)
        codec_spec = codecs.spec_of(job.name) if codecs else None
        try:
            coded = None if codec_spec is None else FileCodecSpec(*codec_spec)
            self.number = client.ask(CreateFile(target.spec, job.name, job.nbytes, coded, target.room_nbytes)).file
        except UnknownCodec as error:
            error.hint = (
                "the writer process does not run your program: register the codec by an entry point of a package, or"
                ' pass writer="thread"'
            )
            raise

    def give_up(self) -> None:
        """Let threads that wait for a reply about this file have it soon, because the save has failed."""
        if not self._over:
            self._client.process.cancel(self._name)

    def write_at(self, offset: int, data: memoryview) -> None:
        self._client.ask(WriteBytes(self.number, offset, bytes(data)))

    def finish(self, nbytes: int | None = None) -> None:
        reply = self._client.ask(FinishFile(self.number, nbytes), nbytes=self._nbytes if nbytes is None else nbytes)
        self._over = True
        if reply.seal is not None and self._codecs is not None:
            self._codecs.seals[self._name] = reply.seal

    def abandon(self) -> None:
        if not self._over:
            self._over = True
            with contextlib.suppress(CheckpointError):  # the process is gone: a later save deletes the files
                self._client.ask(AbandonFile(self.number))


def shared_runs(window: Window, memory: SharedMemory) -> SharedRuns | None:
    """Return where the bytes of a window are, if all of them are in one region of shared memory."""
    job, rows = window.job, window.rows
    if not job.address[rows.start : rows.stop].all():
        return None
    begins = job.start[rows.start : rows.stop]
    ends = np.append(job.start[rows.start + 1 : rows.stop + 1], job.data_nbytes)[: len(begins)]
    low = np.maximum(begins, window.start)
    sizes = np.minimum(ends, window.stop) - low
    starts = job.address[rows.start : rows.stop] + low - begins
    some = sizes > 0
    starts, sizes = starts[some], sizes[some]
    region = memory.region_of(int(starts.min()), int((starts + sizes).max()))
    return None if region is None else SharedRuns(region, starts, sizes)


Wanted = Callable[[], bool]
"""Returns whether a save has not been cancelled."""


@dataclass(frozen=True)
class WriterSession:
    """What one save uses to be written by the writer process."""

    memory: StagingMemory
    """Shared memory, to copy and to stage to."""
    process: WriterProcess
    shared: SharedMemory
    target: WriteTarget
    policy: WaitPolicy
    wanted: Wanted

    def budget(self, threads: int, budget_nbytes: int, *, coded: bool) -> WorkerBudget:
        """Return how many requests to make at a time, with which windows, and how much the other process may copy."""
        store = self.target.store
        threads = min(preferred_requests(store, threads), self.process.pipes)
        part_nbytes = part_nbytes_of(store)
        if not part_nbytes:
            return WorkerBudget(threads, WINDOW_NBYTES, 0)
        # Where a store has parts, a window has several of them, so that few threads make many requests.
        return divide_budget(threads, budget_nbytes, WINDOW_NBYTES, coded=coded, part_nbytes=part_nbytes)

    def ask(self, request: WriterRequest, *, nbytes: int = 0) -> WriterReply:
        """
        Send a request, for which the process may have to make `nbytes` durable.

        Raises:
            WriterDied: the process died, or does not answer.
            SaveCancelled: the save was cancelled, and the process died, or does not answer.
            CheckpointError: what the request raised there.

        """
        try:
            return self.process.ask(request, self.policy, more_s=nbytes / SLOWEST_BYTES_PER_S)
        except WriterDied as error:
            if self.wanted():
                raise
            raise SaveCancelled("the save was cancelled before its files were written") from error

    def sink(self, staging: Staging, codecs: FileCodecs | None, room_nbytes: int) -> Sink:
        """Return where windows go, with which codecs, and with how much memory for what is copied on the way."""
        return ProcessSink(self, self.shared, self.target._replace(room_nbytes=room_nbytes), staging, codecs)

    def filled_ahead(self, window: Window) -> bool:
        """Return whether a window must be staged, because the other process does not see its bytes."""
        return shared_runs(window, self.shared) is None


class WriterManager:
    """Keeps the writer process and the shared memory between saves. Thread-safe."""

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
    def session(self, store: Store, pipes: int, *, wanted: Wanted, timeout_s: float) -> Iterator[WriterSession]:
        """
        Use the process for one save; it is started, to answer `pipes` requests at a time, if there is none.

        Raises CheckpointError if another process cannot open the store, and WriterDied if the process cannot be started.
        """
        target = WriteTarget(store, spec_of(store))
        with self._lock:
            process, memory, shared = self._ready(pipes)
            self._ending = False
            self._saves.append(wanted)
        policy = WaitPolicy(timeout_s, abandoned=lambda: self._abandon(process))
        if is_sequential(store):
            policy = replace(policy, cancelled_s=_REMOTE_CLEANUP_S)
        with contextlib.ExitStack() as after:
            after.callback(self._release, wanted)
            yield WriterSession(memory, process, shared, target, policy, wanted)

    def memory(self) -> StagingMemory:
        """
        Return the memory that is shared with the process, to copy to before there is a session.

        If `end` comes before the session, what was copied here is staged once more.
        """
        with self._lock:
            return self._shared_memory()[0]

    def _release(self, wanted: Wanted) -> None:
        with self._lock:
            self._saves.remove(wanted)
            if self._ending:
                self._end()

    def end(self) -> None:
        """End the process and free the memory, when the last save that uses them is over."""
        if self._owner != os.getpid():
            return  # a fork, at exit
        with self._lock:
            self._ending = True
            self._end()

    @property
    def pid(self) -> int | None:
        """The process's id, if there is one."""
        return None if self._process is None else self._process.pid

    def _abandon(self, process: WriterProcess) -> bool:
        """Drop a process all of whose saves were cancelled; return whether that is so."""
        with self._lock:
            if any(wanted() for wanted in self._saves):
                return False  # ending it would fail that save too, which has a deadline of its own
            if self._process is process:
                self._process = None  # the next save starts another one
            return True

    def _ready(self, pipes: int) -> tuple[WriterProcess, StagingMemory, SharedMemory]:
        memory, shared = self._shared_memory()
        if self._process is not None and not self._process.alive():
            log.warning("the process that writes checkpoints (pid %d) has died: a new one is started", self.pid)
            self._process = None
        if self._process is None:
            self._process = WriterProcess(shared.fd, pipes)
        return self._process, memory, shared

    def _shared_memory(self) -> tuple[StagingMemory, SharedMemory]:
        if self._shared is None or self._memory is None:
            self._shared = SharedMemory()
            self._memory = StagingMemory(
                ring=staging_memory().ring,
                windows=BufferPool(self._shared.buffer, WINDOW_NBYTES, 0),
                arenas=Arenas(self._shared.buffer),
            )
        return self._memory, self._shared

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


@functools.cache  # outlives the calls that use it; a forked process must not touch its parent's
def _manager_of(process_id: int) -> WriterManager:
    del process_id
    return WriterManager()


def writer_manager() -> WriterManager:
    """Return the manager of this process."""
    return _manager_of(os.getpid())
