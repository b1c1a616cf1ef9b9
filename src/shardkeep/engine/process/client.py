"""
The one process that writes for this one, and the memory they share: kept over saves, replaced when it has died.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import spawn
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

import shardkeep
from shardkeep.engine.codecs import FileCodecs
from shardkeep.engine.pools import WINDOW_NBYTES, Arenas, Buffer, BufferPool, StagingMemory, staging_memory
from shardkeep.engine.process.server import (
    IGNORED,
    SLICE_S,
    AbandonFile,
    BucketStoreSpec,
    CancelSave,
    CreateFile,
    FileCodecSpec,
    FinishFile,
    FsspecStoreSpec,
    LocalStoreSpec,
    NoReply,
    ReplyDeadline,
    StoreSpec,
    WaitPolicy,
    WriteBytes,
    WriterReply,
    WriterRequest,
    WriteRuns,
    map_shared,
    ready_within,
    receive,
    send,
)
from shardkeep.engine.staging import Staging
from shardkeep.engine.workers import WorkerBudget, divide_budget
from shardkeep.engine.writer import FileJob, Sink, Window
from shardkeep.errors import CheckpointError, Failure, SaveCancelled, UnknownCodec, WriterDied, error_class
from shardkeep.format.boxes import IntArray
from shardkeep.storage import uploads
from shardkeep.storage.base import BlobWriter, Store, preferred_requests
from shardkeep.storage.buffers import ALIGNMENT, address_of, part_nbytes_of
from shardkeep.storage.cancel import current_scope
from shardkeep.storage.fsspec import FsspecRoot, FsspecStore
from shardkeep.storage.local import LocalRoot, LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.object_store import ObjectRoot, ObjectStore
from shardkeep.storage.retry import RetryingRoot, RetryingStore

# The training process's hold on a process that writes for it: started, asked, watched, ended.
#
# It is spawned with a program of its own: nothing of the training process is copied, and `__main__` is not imported.
# It
# can be asked from the start; what it is asked before it is ready waits in its pipes.

_GRACE_S = 5.0
"""Between the end of a process's pipes and its own."""
_IF_DEAD = (
    "this save is lost, and the next one starts a new process; if memory ran out, the kernel's log tells of it;"
    ' writer="thread" needs no process'
)
_IF_SILENT = (
    "this save is lost, and the next one starts a new process; storage that hangs looks the same, and one that is only"
    " slow needs a larger Options.timeout_s"
)
_multiprocessing: Any = spawn
_subprocess: Any = subprocess
_PROGRAM = "import sys; sys.path[:] = {path}; from shardkeep.engine.process.server import main; main({pipes}, {aside}, {memory}, {me})"


class WriterTraceback(CheckpointError):
    """Where in the process that writes an exception was raised, as text."""


class WriterProcess:
    """A process that writes. May be asked by several threads, as many at a time as it has pipes."""

    def __init__(self, memory: int, pipes: int) -> None:
        """
        Start the process.

        Args:
            memory: descriptor of the file whose memory it writes from.
            pipes: how many.

        Raises:
            WriterDied: it could not be started.

        """
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._died: WriterDied | None = None
        self._answered = time.monotonic()
        self._longest_more_s = 0.0
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            # For what has no answer, and arrives whole or not at all.
            pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            pairs.extend(socket.socketpair() for _ in range(pipes))
            for ours, theirs in pairs:
                ours.setblocking(False)
                theirs.setblocking(True)  # whatever this program has made the default
            self._process = _spawn(*(theirs.fileno() for _, theirs in pairs), memory=memory)
        except OSError as error:
            for ours, _ in pairs:
                ours.close()
            raise WriterDied(
                f"the process that writes checkpoints could not be started: {error}",
                hint='free memory, processes or file descriptors, or pass writer="thread"',
            ) from error
        finally:
            for _, theirs in pairs:
                theirs.close()  # so that a pipe ends with the process
        self._aside, *self._pipes = (ours for ours, _ in pairs)
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for pipe in self._pipes:
            self._free.put(pipe)
        # A process that was forked from here meanwhile may hold a pipe open: watched by itself, where that is possible.
        self._watch: list[int] = []
        with contextlib.suppress(AttributeError, OSError):
            self._watch.append(os.pidfd_open(self.pid))
        self._let_go = weakref.finalize(self, _close_all, [self._aside, *self._pipes], self._watch.copy())

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def pipes(self) -> int:
        """How many threads it answers at a time."""
        return len(self._pipes)

    def alive(self) -> bool:
        """Say whether the process is there."""
        with self._lock:
            return self._died is None and self._process.poll() is None

    def ask(self, request: WriterRequest, patience: WaitPolicy, *, more_s: float = 0.0) -> WriterReply:
        """
        Have a request carried out.

        Args:
            request: what.
            patience: for how long.
            more_s: how much longer than that this request may take.

        Raises:
            WriterDied: the process ended, told as soon as it happens; or did not answer, and was ended.
            CheckpointError: what the request raised there.

        """
        message = msgspec.msgpack.encode(request)
        pipe = self._free_pipe(patience)
        self._longest_more_s = max(self._longest_more_s, more_s)
        waiting = ReplyDeadline(patience, more_s=more_s)
        ready = ready_within(pipe, self._watch, waiting)
        try:
            send(pipe, message, ready)
            reply = msgspec.msgpack.decode(receive(pipe, ready), type=WriterReply)
        except (EOFError, OSError) as error:
            raise self._how_it_died() from error
        except NoReply as error:
            raise self._ended(str(error)) from None
        except BaseException as error:
            # The answer may still come, and must not be taken for that to another request.
            self._ended(f"was ended, as a request to it broke off ({type(error).__name__})", _IF_DEAD)
            raise
        # Only now: a pipe that may hold half a message, or an answer nobody took, is not used again.
        self._free.put(pipe)
        self._answered = time.monotonic()
        if reply.failure is not None:
            raise _error_of(reply.failure) from WriterTraceback(reply.failure.trace)
        return reply

    def tell(self, said: CancelSave) -> None:
        """Say what has no answer. It neither waits nor raises: one that does not listen is found out by who asks it."""
        with contextlib.suppress(OSError):
            self._aside.send(msgspec.msgpack.encode(said), socket.MSG_NOSIGNAL)

    def _free_pipe(self, patience: WaitPolicy) -> socket.socket:
        """Wait for a pipe that nobody uses."""
        # Whoever has one may be at a long request.
        waiting, answered = ReplyDeadline(patience, more_s=self._longest_more_s), self._answered
        while self._died is None:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=SLICE_S)
            if answered != self._answered:
                answered = self._answered
                waiting.begin_again()
            try:
                waiting.look()
            except NoReply as error:
                raise self._ended(str(error)) from None
        raise self._how_it_died()

    def close(self) -> None:
        """End the process. Nobody may be asking it anything: then it has nothing left to do."""
        self._let_go()
        if self._owner == os.getpid():  # not a fork's
            with self._lock:
                self._reap(0)

    def _how_it_died(self) -> WriterDied:
        """Make sure that it is gone, as it must not touch memory or files any more, and say why."""
        with self._lock:
            died = self._died or self._note(_describe_exit(self._reap(_GRACE_S)), _IF_DEAD)
            return WriterDied(died.message, hint=died.hint)

    def _ended(self, why: str, hint: str = _IF_SILENT) -> WriterDied:
        """End it, if it has not ended yet."""
        with self._lock:
            died = self._died
            if died is None:
                died = self._note(why, hint)  # first: whatever happens here, nobody uses it again
                if self._reap(0) is None:
                    died = self._note(f"{why}, but cannot be killed", hint)
            return WriterDied(died.message, hint=died.hint)

    def _note(self, how: str, hint: str) -> WriterDied:
        self._died = WriterDied(f"the process that writes checkpoints (pid {self.pid}) {how}", hint=hint)
        return self._died

    def _reap(self, patience_s: float) -> int | None:
        """Wait for it to end, then kill it; return its exit code, or None if not even that ends it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE_S)
        return None


def _spawn(aside: int, *pipes: int, memory: int) -> subprocess.Popen[bytes]:
    executable = _multiprocessing.get_executable()
    if not executable:
        raise OSError("this program does not say where its Python is (sys.executable)")
    # The package may be found by a path that this program has set itself.
    path = [each or os.getcwd() for each in sys.path if isinstance(each, str)]
    path.append(os.path.dirname(os.path.dirname(os.path.abspath(shardkeep.__file__))))
    program = _PROGRAM.format(path=ascii(path), pipes=[*pipes], aside=aside, memory=memory, me=os.getpid())
    flags: list[str] = _subprocess._args_from_interpreter_flags()  # as multiprocessing starts its processes
    with _blocked():  # until it can ignore them
        return subprocess.Popen(  # noqa: S603 - ourselves
            [os.fsdecode(executable), *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[aside, *pipes, memory],
            start_new_session=True,  # out of a terminal's reach
        )


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_all(pipes: list[socket.socket], descriptors: list[int]) -> None:
    for pipe in pipes:
        pipe.close()
    for each in descriptors:
        os.close(each)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "does not answer, and cannot be killed"
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _error_of(failure: Failure) -> CheckpointError:
    kind = error_class(failure.kind)
    text = failure.message if kind.__name__ == failure.kind else f"{failure.kind}: {failure.message}"
    return kind(text, hint=failure.hint, **failure.details)


# Memory that the process which writes sees too: regions of one file that has no name, so that no more than one file
# descriptor has to reach it.

_NOEXEC = 8
"""MFD_NOEXEC_SEAL, which Python has no name for: newer kernels warn of files without it, or refuse them."""


class Region(NamedTuple):
    """A part of the shared memory."""

    address: int
    """In this process."""
    nbytes: int
    offset: int
    """In the file."""


class SharedMemory:
    """Buffers that another process can map. May be used by several threads."""

    def __init__(self) -> None:
        """
        Make a file of no size.

        Raises:
            CheckpointError: this system has no such files.

        """
        if not hasattr(os, "memfd_create"):
            raise CheckpointError(
                'writer="process" needs memory files, which this system has not', hint='pass writer="thread"'
            )
        try:
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC | _NOEXEC)
        except OSError:  # a kernel older than that
            self.fd = os.memfd_create("shardkeep", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._end = 0
        self._regions: list[Region] = []
        self._gone: deque[Region] = deque()
        self._lock = threading.Lock()

    def buffer(self, nbytes: int) -> Buffer:
        """Make a buffer, whose memory is given back with the last view of it."""
        rounded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            # Places in the file are not used again: the other process may still have the old ones mapped.
            offset = self._end
            os.ftruncate(self.fd, offset + rounded)
            self._end += rounded
        view = map_shared(self.fd, offset, rounded, owned=True)
        region = Region(address_of(view), rounded, offset)
        # Told of before it is unmapped: by then something else may lie at its address. Told without the lock, which the
        # thread that frees it may hold.
        weakref.finalize(view.obj, self._gone.append, region).atexit = False
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
        while self._gone:
            self._regions.remove(self._gone.popleft())
        return self._regions

    def close(self) -> None:
        """Let go of the file; buffers stay as they are."""
        self._close()


# From a store of this process to the words from which the process that writes opens it.
#
# Only what has its own words can be opened there: a store of somebody's own may do anything in its verbs, memory
# cannot be
# shared by a URL, and an option that is an object means nothing to another process.

_THREAD = 'pass writer="thread"'


def store_spec(store: Store) -> StoreSpec:
    """
    Say how another process opens a store.

    Raises:
        CheckpointError: it cannot.

    """
    # What is tried again, or checked, before a commit is so here: that process writes data files and commits nothing.
    if type(store) in (RetryingStore, RetryingRoot) and isinstance(store, RetryingStore):
        store = store.inner
    # By their very classes: one that was derived may do other things, which a plain one there would not do.
    kind = type(store)
    if isinstance(store, LocalStore) and kind in (LocalStore, LocalRoot):
        return LocalStoreSpec(os.fsencode(store._path), store._direct, store._durable)
    if isinstance(store, ObjectStore) and kind in (ObjectStore, ObjectRoot):
        return _bucket_spec(store)
    if isinstance(store, FsspecStore) and kind in (FsspecStore, FsspecRoot):
        return _fsspec_spec(store)
    if isinstance(store, MemoryStore):
        raise _in_memory(store.url, kind.__name__)
    raise CheckpointError(
        f'{store.url}: writer="process" cannot open a {kind.__name__} in another process',
        hint=f"save to a path or a URL, or {_THREAD}",
    )


def _bucket_spec(store: ObjectStore) -> BucketStoreSpec:
    bucket = store.bucket
    given = dict(bucket.given)
    if "client_options" in given:  # kept as pairs
        given["client_options"] = client = dict(given["client_options"])
        if "default_headers" in client:
            client["default_headers"] = dict(client["default_headers"])
    return BucketStoreSpec(
        bucket.service,
        bucket.name,
        store.prefix,
        store.url,
        _sendable_options(store.url, given),
        dict(bucket.environment),
    )


def _fsspec_spec(store: FsspecStore) -> FsspecStoreSpec:
    fs = store._fs
    kind = type(fs)
    names = [kind.protocol] if isinstance(kind.protocol, str) else [*kind.protocol]
    if "memory" in (*names, fs.storage_options.get("target_protocol")):
        raise _in_memory(store.url, kind.__name__)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        raise CheckpointError(
            f'{store.url}: writer="process" does not find the class {kind.__qualname__} in another process',
            hint=f"that process does not run your program: put the class at the top of a module, or {_THREAD}",
        )
    args = _sendable_options(store.url, {str(number): value for number, value in enumerate(fs.storage_args)})
    options = _sendable_options(store.url, fs.storage_options)
    return FsspecStoreSpec(
        kind.__module__, kind.__name__, [*args.values()], options, store._path, store.url, store._settle_s
    )


def _in_memory(url: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f'{url}: writer="process" cannot open a {kind} in another process, which has no part in this one\'s memory',
        hint=f"save to a path or a URL of files or objects, or {_THREAD}",
    )


def _sendable_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are sent. Their values are not shown: there may be keys among them."""
    told = {}
    for name, value in options.items():
        try:
            told[name] = _sendable_value(value)
        except TypeError as exc:
            raise CheckpointError(
                f'{url}: writer="process" cannot hand the option {name!r} to another process: {exc}',
                hint=f"give text and numbers, a profile, or variables of the environment instead, or {_THREAD}",
            ) from None
    return told


def _sendable_value(value: Any) -> Any:
    if value is None or type(value) in (str, bytes, bool, int, float):
        return value
    if isinstance(value, timedelta):  # only the client of object stores has these, which takes them as text, too
        return f"{value // timedelta(microseconds=1)}us"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _sendable_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sendable_value(each) for each in value]
    raise TypeError(f"it is a {type(value).__name__}")


# Windows that another process hashes and writes: what is sent to it is where in shared memory their bytes are.
#
# What a save copied in its call lies in shared memory already, and stays there; all else (what comes from
# accelerators,
# or does not lie in order) is filled into shared windows ahead.


class WriterClient(Protocol):
    """The other process."""

    def ask(self, request: WriterRequest, *, nbytes: int = 0) -> WriterReply:
        """Have it do something, for which it may have to wait for so many bytes to be durable."""

    def tell(self, said: CancelSave) -> None:
        """Say what has no answer; neither waits nor raises."""


class WriteTarget(NamedTuple):
    """Where files go."""

    store: Store
    """As this process has it."""
    place: StoreSpec
    """As the other one opens it."""
    lost: set[str]
    """Files that it did not finish and can take back no more, as it is gone: what is left of them is to be looked for."""
    room_nbytes: int = 0
    """For what the store copies there on the way; 0: what it has for all files together."""


class SharedRuns(NamedTuple):
    """Where in shared memory some bytes are."""

    region: Region
    starts: IntArray
    """In this process's memory."""
    sizes: IntArray


class ProcessSink:
    """A sink: another process hashes and writes."""

    def __init__(
        self, outside: WriterClient, memory: SharedMemory, target: WriteTarget, staging: Staging, coding: FileCodecs
    ) -> None:
        self._coding = coding
        self._outside = outside
        self._memory = memory
        self._target = target
        self._staging = staging

    def begin(self, job: FileJob) -> BlobWriter:
        """Begin a file."""
        try:
            return _ProcessFile(self._outside, self._target, job, self._coding)
        except BaseException:
            # Nobody knows how far it came, and nobody else knows of the file.
            with contextlib.suppress(CheckpointError):
                self._target.store.delete(job.name)
            raise

    def put(self, window: Window, file: BlobWriter, own: memoryview) -> bytes:
        """Have a window written, and return the digests of its blocks."""
        self._staging.insist()
        runs = shared_runs(window, self._memory)
        if runs is not None:
            return self._write(window, file, runs)
        with self._staging.take(window, own) as data:
            start = address_of(data)
            region = self._memory.region_of(start, start + len(data))
            if region is None:  # unreachable: windows are filled in shared memory
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
        return self._outside.ask(request).digests


class _ProcessFile:
    """A file that another process writes."""

    def __init__(self, outside: WriterClient, target: WriteTarget, job: FileJob, coding: FileCodecs) -> None:
        self._outside = outside
        self._lost = target.lost
        self._nbytes = job.nbytes
        self._name = job.name
        self._coding = coding
        self._over = False
        if (hope := current_scope()) is not None:
            hope.tell(self.give_up)
        told = coding.told(job.name)
        try:
            coded = None if told is None else FileCodecSpec(*told)
            self.number = outside.ask(CreateFile(target.place, job.name, job.nbytes, coded, target.room_nbytes)).file
        except UnknownCodec as error:
            error.hint = (
                "the process that writes does not run your program: bring the codec by an entry point of a package, or"
                ' pass writer="thread"'
            )
            raise

    def give_up(self) -> None:
        """Let whoever waits for an answer about this file have it soon: something else has failed."""
        if not self._over:
            self._outside.tell(CancelSave(self._name))

    def write_at(self, offset: int, data: memoryview) -> None:
        self._outside.ask(WriteBytes(self.number, offset, bytes(data)))

    def finish(self, nbytes: int | None = None) -> None:
        reply = self._outside.ask(FinishFile(self.number, nbytes), nbytes=self._nbytes if nbytes is None else nbytes)
        self._over = True
        if reply.seal is not None:
            self._coding.seals[self._name] = reply.seal

    def abandon(self) -> None:
        if not self._over:
            self._over = True
            try:
                self._outside.ask(AbandonFile(self.number))
            except CheckpointError:  # of a process that is gone, the files are deleted by others
                self._lost.add(self._name)


def shared_runs(window: Window, memory: SharedMemory) -> SharedRuns | None:
    """Say where the bytes of a window are, if all of them are in one region of shared memory."""
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


log = logging.getLogger("shardkeep")

_SLOWEST = 16 << 20
"""Bytes of a file that a slow disk makes durable in a second, of which a request to do so may have many to wait for."""

_TAKEN_BACK_S = 15.0
"""What a store that is not of this machine may need to take back what was uploaded, when a save is cancelled."""

Wanted = Callable[[], bool]
"""Says whether a save has not been cancelled."""


@dataclass(frozen=True)
class WriterSession:
    """What one save needs to be written by another process."""

    memory: StagingMemory
    """To copy and to stage to, so that the other process sees it."""
    process: WriterProcess
    shared: SharedMemory
    target: WriteTarget
    patience: WaitPolicy
    wanted: Wanted

    def divided(self, threads: int, budget_nbytes: int, *, coded: bool) -> WorkerBudget:
        """Say how many threads may ask the other process at a time, with which windows, and what it may copy of them."""
        store = self.target.store
        threads = min(preferred_requests(store, threads), self.process.pipes)
        part_nbytes = part_nbytes_of(store)
        if not part_nbytes:
            return WorkerBudget(threads, WINDOW_NBYTES, 0)
        # Where a store has parts, a window has several of them, so that few threads bring many requests.
        return divide_budget(threads, budget_nbytes, WINDOW_NBYTES, coded=coded, part_nbytes=part_nbytes)

    def ask(self, request: WriterRequest, *, nbytes: int = 0) -> WriterReply:
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

    def tell(self, said: CancelSave) -> None:
        """Say something to the other process that has no answer; neither waits nor raises."""
        self.process.tell(said)

    def sink(self, staging: Staging, coding: FileCodecs, room_nbytes: int) -> Sink:
        """Return where windows go, through which codecs, and with how much memory for what is copied on the way."""
        return ProcessSink(self, self.shared, self.target._replace(room_nbytes=room_nbytes), staging, coding)

    def filled_ahead(self, window: Window) -> bool:
        """Say whether a window must be filled before the other process sees its bytes."""
        return shared_runs(window, self.shared) is None


class WriterManager:
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
    def writing(self, store: Store, pipes: int, *, wanted: Wanted, timeout_s: float) -> Iterator[WriterSession]:
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
        place = store_spec(store)
        target = WriteTarget(store, place, set())
        with self._lock:
            process, memory, shared = self._ready(pipes)
            self._ending = False
            self._saves.append(wanted)
        patience = WaitPolicy(timeout_s, given_up=lambda: self._given_up(process))
        if not isinstance(place, LocalStoreSpec):
            patience = replace(patience, cancelled_s=_TAKEN_BACK_S)
        with contextlib.ExitStack() as after:
            after.callback(self._let_go, wanted)
            after.callback(_abort_uploads, target)
            yield WriterSession(memory, process, shared, target, patience, wanted)

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


def _abort_uploads(target: WriteTarget) -> None:
    """Take back the uploads of a process that is gone: nobody else knows yet that nobody will finish them."""
    if not target.lost:
        return
    try:
        uploads.sweep(target.store, lambda each: each.name in target.lost)
    except Exception as exc:  # noqa: BLE001 - the save has failed already, and that is what is to be told
        log.info("%s: what the dead process had uploaded is not taken back: %s", target.store.url, exc)


@functools.cache  # outlives the calls that use it; a forked process must not touch its parent's
def _manager_of(process_id: int) -> WriterManager:
    del process_id
    return WriterManager()


def writer_manager() -> WriterManager:
    """Return what this process has."""
    return _manager_of(os.getpid())
