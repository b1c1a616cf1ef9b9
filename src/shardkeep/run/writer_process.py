"""
The training process's hold on a process that writes for it: started, asked, watched, ended.

It is spawned with a program of its own: nothing of the training process is copied, and `__main__` is not imported. It
can be asked from the start; what it is asked before it is ready waits in its pipes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import msgspec

import shardkeep
from shardkeep.errors import CheckpointError, Failure, WriterDied, error_class
from shardkeep.run.writer_child import IGNORED
from shardkeep.run.writer_wire import Reply, Request

_GRACE_S = 5.0
"""Between the end of a process's pipes and its own."""
_multiprocessing: Any = spawn
_subprocess: Any = subprocess
_PROGRAM = (
    "import sys; sys.path[:] = {path}; from shardkeep.run.writer_child import main; main({pipes}, {memory}, {me})"
)


class FromWriter(CheckpointError):
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
        pairs: list[tuple[Connection, Connection]] = []
        try:
            pairs.extend(Pipe() for _ in range(pipes))
            self._process = _spawn([theirs.fileno() for _, theirs in pairs], memory)
        except OSError as error:
            raise WriterDied(
                f"the process that writes checkpoints could not be started: {error}",
                hint='free memory, processes or file descriptors, or pass writer="thread"',
            ) from error
        finally:
            for _, theirs in pairs:
                theirs.close()  # so that a pipe ends with the process
        self._pipes = [ours for ours, _ in pairs]
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for pipe in self._pipes:
            self._free.put(pipe)
        # A process that was forked from here meanwhile may hold a pipe open: watched by itself, where that is possible.
        self._watch: list[int] = []
        with contextlib.suppress(AttributeError, OSError):
            self._watch.append(os.pidfd_open(self.pid))
        self._unwatch = weakref.finalize(self, _close_all, self._watch.copy())

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def alive(self) -> bool:
        """Say whether the process is there."""
        with self._lock:
            return self._died is None and self._process.poll() is None

    def ask(self, request: Request) -> Reply:
        """
        Have a request carried out.

        Raises:
            WriterDied: the process ended; told as soon as it happens.
            CheckpointError: what the request raised there.

        """
        pipe = self._free.get()
        try:
            pipe.send_bytes(msgspec.msgpack.encode(request))
            wait([pipe, *self._watch])
            if not pipe.poll():
                raise EOFError
            reply = msgspec.msgpack.decode(pipe.recv_bytes(), type=Reply)
        except (EOFError, OSError) as error:
            raise self._how_it_died() from error
        finally:
            self._free.put(pipe)
        if reply.failure is not None:
            raise _error_of(reply.failure) from FromWriter(reply.failure.trace)
        return reply

    def close(self) -> None:
        """End the process. Nobody may be asking it anything: then it has nothing left to do."""
        for pipe in self._pipes:
            pipe.close()
        if self._owner == os.getpid():  # not a fork's
            with self._lock:
                self._reap(0)
        self._unwatch()

    def _how_it_died(self) -> WriterDied:
        """Make sure that it is gone, as it must not touch memory or files any more, and say why."""
        with self._lock:
            if self._died is None:
                code = self._reap(_GRACE_S)
                self._died = WriterDied(
                    f"the process that writes checkpoints (pid {self.pid}) {_ending(code)}",
                    hint="this save is lost, and the next one starts a new process; if memory ran out, the kernel's log"
                    ' tells of it; writer="thread" needs no process',
                )
            return WriterDied(self._died.message, hint=self._died.hint)

    def _reap(self, patience_s: float) -> int | None:
        """Wait for it to end, then kill it; return its exit code, or None if not even that ends it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE_S)
        return None


def _spawn(pipes: list[int], memory: int) -> subprocess.Popen[bytes]:
    executable = _multiprocessing.get_executable()
    if not executable:
        raise OSError("this program does not say where its Python is (sys.executable)")
    # The package may be found by a path that this program has set itself.
    path = [each or os.getcwd() for each in sys.path if isinstance(each, str)]
    path.append(os.path.dirname(os.path.dirname(os.path.abspath(shardkeep.__file__))))
    program = _PROGRAM.format(path=ascii(path), pipes=pipes, memory=memory, me=os.getpid())
    flags: list[str] = _subprocess._args_from_interpreter_flags()  # as multiprocessing starts its processes
    with _blocked():  # until it can ignore them
        return subprocess.Popen(  # noqa: S603 - ourselves
            [os.fsdecode(executable), *flags, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[*pipes, memory],
            start_new_session=True,  # out of a terminal's reach
        )


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_all(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


def _ending(code: int | None) -> str:
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
