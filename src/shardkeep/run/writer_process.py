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
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing import spawn
from typing import Any

import msgspec

import shardkeep
from shardkeep.errors import CheckpointError, Failure, WriterDied, error_class
from shardkeep.run.writer_child import IGNORED
from shardkeep.run.writer_pipe import SLICE_S, Patience, TooLong, Waiting, ready_within, receive, send
from shardkeep.run.writer_wire import GiveUp, Reply, Request

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
_PROGRAM = "import sys; sys.path[:] = {path}; from shardkeep.run.writer_child import main; main({pipes}, {aside}, {memory}, {me})"


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

    def ask(self, request: Request, patience: Patience, *, more_s: float = 0.0) -> Reply:
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
        waiting = Waiting(patience, more_s=more_s)
        ready = ready_within(pipe, self._watch, waiting)
        try:
            send(pipe, message, ready)
            reply = msgspec.msgpack.decode(receive(pipe, ready), type=Reply)
        except (EOFError, OSError) as error:
            raise self._how_it_died() from error
        except TooLong as error:
            raise self._ended(str(error)) from None
        except BaseException as error:
            # The answer may still come, and must not be taken for that to another request.
            self._ended(f"was ended, as a request to it broke off ({type(error).__name__})", _IF_DEAD)
            raise
        # Only now: a pipe that may hold half a message, or an answer nobody took, is not used again.
        self._free.put(pipe)
        self._answered = time.monotonic()
        if reply.failure is not None:
            raise _error_of(reply.failure) from FromWriter(reply.failure.trace)
        return reply

    def tell(self, said: GiveUp) -> None:
        """Say what has no answer. It neither waits nor raises: one that does not listen is found out by who asks it."""
        with contextlib.suppress(OSError):
            self._aside.send(msgspec.msgpack.encode(said), socket.MSG_NOSIGNAL)

    def _free_pipe(self, patience: Patience) -> socket.socket:
        """Wait for a pipe that nobody uses."""
        # Whoever has one may be at a long request.
        waiting, answered = Waiting(patience, more_s=self._longest_more_s), self._answered
        while self._died is None:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=SLICE_S)
            if answered != self._answered:
                answered = self._answered
                waiting.begin_again()
            try:
                waiting.look()
            except TooLong as error:
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
            died = self._died or self._note(_ending(self._reap(_GRACE_S)), _IF_DEAD)
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
