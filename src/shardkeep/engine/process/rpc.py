"""
A child process that answers requests (`sk.async_save(writer="process")`, `dcp.async_save`), each with a deadline.

A process that is stopped, or whose disk hangs, neither answers nor reads what it is sent. So every wait ends: when the
process dies, when its deadline has passed, or when the save it works for was cancelled.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardkeep.errors import CheckpointError

SLICE_S = 0.1
"""Between two checks of a wait. What it waits for wakes it at once."""
CANCELLED_S = 1.0
"""What a healthy process usually needs for a request; a process that no save needs is cheap to replace."""
MESSAGE_NBYTES = 4096
"""The longest message of `notify`."""
_GRACE_S = 5.0
"""Between the end of a process's pipes and its own."""
SLOWEST_BYTES_PER_S = 16 << 20
"""What a slow disk makes durable in a second; a request to finish files may have to wait for many bytes."""
_SIZE = struct.Struct("!Q")

Ready = Callable[[int], None]
"""Waits until a socket can be read (POLLIN) or written (POLLOUT)."""
no_wait: Ready = lambda _event: None  # noqa: E731 - for sockets that block themselves


@dataclass(frozen=True)
class WaitPolicy:
    """How long a save waits for a reply."""

    timeout_s: float
    cancelled_s: float = CANCELLED_S
    """How long at least, before the process is ended because the save was cancelled."""
    abandoned: Callable[[], bool] = lambda: False
    """Returns whether no save needs the process. After True it is ended, and no save may begin to use it."""


class NoReply(Exception):
    """There was no reply in time. The text says what became of the process."""


class ReplyDeadline:
    def __init__(self, policy: WaitPolicy, *, more_s: float = 0.0) -> None:
        self._policy = policy
        self._most_s = policy.timeout_s + more_s
        self._waited_s = 0.0
        self._checked = time.monotonic()

    def check(self) -> None:
        """Count one slice of time without a reply; raises NoReply if the time is up."""
        now = time.monotonic()
        # A scheduler may stop a whole job and resume it hours later: that time does not count.
        self._waited_s += min(now - self._checked, 2 * SLICE_S)
        self._checked = now
        if self._waited_s >= self._most_s:
            raise NoReply(f"did not answer within {self._most_s:.3g} s, and was ended")
        if self._waited_s >= self._policy.cancelled_s and self._policy.abandoned():
            raise NoReply("was ended, as it did not answer when its save was cancelled")


def ready_within(pipe: socket.socket, watched: Sequence[int], deadline: ReplyDeadline) -> Ready:
    """Return a function that waits until a pipe can be used; it raises NoReply, and EOFError if one of `watched` ends."""

    def ready(event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        for each in watched:
            poll.register(each, select.POLLIN)
        while not (found := poll.poll(SLICE_S * 1000)):
            deadline.check()
        if all(descriptor in watched for descriptor, _ in found):
            raise EOFError("the process has ended")

    return ready


def send(pipe: socket.socket, data: bytes | memoryview, ready: Ready = no_wait) -> None:
    for part in (_SIZE.pack(len(data)), data) if len(data) > MESSAGE_NBYTES else (_SIZE.pack(len(data)) + data,):
        left = memoryview(part)
        while left:
            ready(select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                left = left[pipe.send(left, socket.MSG_NOSIGNAL) :]  # a closed pipe raises, instead of SIGPIPE


def receive(pipe: socket.socket, ready: Ready = no_wait) -> bytes:
    """Receive a message; raises EOFError if the other end was closed."""
    (nbytes,) = _SIZE.unpack(_receive_exactly(pipe, _SIZE.size, ready))
    return bytes(_receive_exactly(pipe, nbytes, ready))


def _receive_exactly(pipe: socket.socket, nbytes: int, ready: Ready) -> bytearray:
    data = bytearray(nbytes)
    left = memoryview(data)
    while left:
        ready(select.POLLIN)
        try:
            got = pipe.recv_into(left)
        except BlockingIOError:
            continue
        if not got:
            raise EOFError("the pipe was closed")
        left = left[got:]
    return data


class MultiprocessingProcess:
    """A `multiprocessing` process, with the methods of `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        self.kill = process.kill

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code


Process = subprocess.Popen[bytes] | MultiprocessingProcess


@dataclass(frozen=True)
class ChildKind:
    """What messages say about a kind of child process."""

    name: str
    """Such as "the process that writes checkpoints"."""
    error: type[CheckpointError]
    """Raised when it cannot be started, dies, or does not answer."""
    if_not_started: str
    """Hints."""
    if_dead: str
    if_silent: str


class ChildProcess:
    """A child process. May be asked by several threads, as many at a time as it has pipes."""

    def __init__(
        self,
        spawn: Callable[[Sequence[socket.socket]], Process],
        *,
        pipes: int,
        kind: ChildKind,
        started_errors: Any = OSError,
    ) -> None:
        """`spawn` starts the process with its ends of the sockets: first that of `notify`, then the pipes."""
        self._owner = os.getpid()
        self._kind = kind
        self._lock = threading.Lock()
        self._died: tuple[str, str] | None = None
        """How it died, and a hint."""
        self._answered = time.monotonic()
        self._longest_more_s = 0.0
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            # A message without a reply arrives whole or not at all.
            pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            pairs.extend(socket.socketpair() for _ in range(pipes))
            for ours, theirs in pairs:
                ours.setblocking(False)
                theirs.setblocking(True)  # whatever this program has made the default
            self._process = spawn([theirs for _, theirs in pairs])
        except started_errors as error:
            for ours, _ in pairs:
                ours.close()
            raise kind.error(f"{kind.name} could not be started: {error}", hint=kind.if_not_started) from error
        finally:
            for _, theirs in pairs:
                theirs.close()  # so that a pipe ends with the process
        self._notices, *self._pipes = (ours for ours, _ in pairs)
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for pipe in self._pipes:
            self._free.put(pipe)
        # A process that was forked from here meanwhile may hold a pipe open, so the child itself is watched where possible.
        self._watched: list[int] = []
        with contextlib.suppress(AttributeError, OSError):
            self._watched.append(os.pidfd_open(self.pid))
        self._close_pipes = weakref.finalize(self, _close_all, [self._notices, *self._pipes], self._watched.copy())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pipes(self) -> int:
        return len(self._pipes)

    def alive(self) -> bool:
        with self._lock:
            return self._died is None and self._process.poll() is None

    def call(
        self, send_request: Callable[[socket.socket, Ready], None], policy: WaitPolicy, *, more_s: float = 0.0
    ) -> bytes:
        """Send a request, and return the reply, which may take `more_s` longer; an error of its kind if the process died."""
        pipe = self._free_pipe(policy)
        self._longest_more_s = max(self._longest_more_s, more_s)
        ready = ready_within(pipe, self._watched, ReplyDeadline(policy, more_s=more_s))
        try:
            send_request(pipe, ready)
            reply = receive(pipe, ready)
        except (EOFError, OSError) as error:
            raise self._how_it_died() from error
        except NoReply as error:
            raise self._end(str(error), self._kind.if_silent) from None
        except BaseException as error:
            # The reply may still come, and must not be taken for the reply to another request.
            self._end(f"was ended, as a request to it broke off ({type(error).__name__})", self._kind.if_dead)
            raise
        # Only now: a pipe that may hold half a message, or a reply that was not read, is not used again.
        self._free.put(pipe)
        self._answered = time.monotonic()
        return reply

    def notify(self, message: bytes) -> None:
        """Send a message that has no reply. It neither waits nor raises: the next `call` finds out about a dead process."""
        with contextlib.suppress(OSError):
            self._notices.send(message, socket.MSG_NOSIGNAL)

    def _free_pipe(self, policy: WaitPolicy) -> socket.socket:
        answered = -1.0
        while self._died is None:
            if answered != self._answered:  # by another thread; the thread that uses a pipe may be at a long request
                deadline, answered = ReplyDeadline(policy, more_s=self._longest_more_s), self._answered
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=SLICE_S)
            try:
                deadline.check()
            except NoReply as error:
                raise self._end(str(error), self._kind.if_silent) from None
        raise self._how_it_died()

    def close(self) -> None:
        """End the process. No request may be in progress."""
        self._close_pipes()
        if self._owner == os.getpid():  # not in a fork
            with self._lock:
                self._reap(0)
                self._died = self._died or ("was ended", self._kind.if_dead)

    def _how_it_died(self) -> CheckpointError:
        """Make sure that the process is gone, as it must not touch memory or files any more, and return the error to raise."""
        with self._lock:
            self._died = self._died or (describe_exit(self._reap(_GRACE_S)), self._kind.if_dead)
            return self._error(*self._died)

    def _end(self, why: str, hint: str) -> CheckpointError:
        with self._lock:
            if self._died is None:
                self._died = why, hint  # first: whatever happens here, the process is not used again
                if self._reap(0) is None:
                    self._died = f"{why}, but cannot be killed", hint
            return self._error(*self._died)

    def _error(self, how: str, hint: str) -> CheckpointError:
        """Return a new error, because several threads may raise one each."""
        return self._kind.error(f"{self._kind.name} (pid {self.pid}) {how}", hint=hint)

    def _reap(self, wait_s: float) -> int | None:
        """Wait for the process to end, then kill it; return its exit code, or None if not even that ends it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE_S)
        return None


def _close_all(pipes: list[socket.socket], descriptors: list[int]) -> None:
    for pipe in pipes:
        pipe.close()
    for each in descriptors:
        os.close(each)


def describe_exit(code: int | None) -> str:
    if code is None:
        return "does not answer, and cannot be killed"
    if code >= 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
