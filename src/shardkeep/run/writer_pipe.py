"""
Messages between a training process and the process that writes for it, and how long one waits for the other.

A process that is stopped, or whose disk hangs, neither answers nor takes what it is sent: whoever waits wakes up now and
then, to see whether it is still worth it.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLICE_S = 0.1
"""Between two looks of somebody who waits. What it waits for wakes it at once."""
_CANCELLED_S = 1.0
"""What a healthy process needs for a request, as a rule; one that nobody needs is cheap to replace."""
MESSAGE_NBYTES = 4096
"""The most of a message that has no answer."""
_SIZE = struct.Struct("!Q")

Ready = Callable[[int], None]
"""Waits until a socket can be read (POLLIN) or written (POLLOUT)."""


@dataclass(frozen=True)
class Patience:
    """How long a save waits for an answer."""

    timeout_s: float
    cancelled_s: float = _CANCELLED_S
    """How long at least, where the process would be ended because the save was cancelled."""
    given_up: Callable[[], bool] = lambda: False
    """
    Says whether nobody needs the process any more. It is asked until it says so; the process is then ended, so that
    from then on nobody may begin to need it.
    """


class TooLong(Exception):
    """Nobody answered, and there is no sense in waiting on. Its text says what the one who waited did."""


class Waiting:
    """One thread that waits for an answer."""

    def __init__(self, patience: Patience, *, more_s: float = 0.0) -> None:
        self._patience = patience
        self._most_s = patience.timeout_s + more_s
        self._waited_s = 0.0
        self._looked = time.monotonic()

    def begin_again(self) -> None:
        """Forget for how long it has waited: there was an answer, to somebody."""
        self._waited_s = 0.0

    def look(self) -> None:
        """
        Say that there was nothing for a slice of time.

        Raises:
            TooLong: that is enough.

        """
        now = time.monotonic()
        # A job may be stopped as a whole, and go on hours later: that nobody answered meanwhile means nothing.
        self._waited_s += min(now - self._looked, 2 * SLICE_S)
        self._looked = now
        if self._waited_s >= self._most_s:
            raise TooLong(f"did not answer within {self._most_s:.3g} s, and was ended")
        if self._waited_s >= self._patience.cancelled_s and self._patience.given_up():
            raise TooLong("was ended, as it did not answer when its save was cancelled")


def ready_within(pipe: socket.socket, gone: Sequence[int], waiting: Waiting) -> Ready:
    """
    Return what waits until a pipe can be used.

    It raises EOFError when one of the descriptors in `gone` says that the other process has ended, and TooLong.
    """

    def ready(event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        for each in gone:
            poll.register(each, select.POLLIN)
        while not (found := poll.poll(SLICE_S * 1000)):
            waiting.look()
        if all(descriptor in gone for descriptor, _ in found):
            raise EOFError("the process has ended")

    return ready


def at_once(event: int) -> None:
    """Wait for nothing: for sockets that block."""
    del event


def send(pipe: socket.socket, data: bytes, ready: Ready = at_once) -> None:
    """Send a message."""
    left = memoryview(_SIZE.pack(len(data)) + data)
    while left:
        ready(select.POLLOUT)
        try:
            left = left[pipe.send(left, socket.MSG_NOSIGNAL) :]  # of a closed pipe an error tells
        except BlockingIOError:
            continue


def receive(pipe: socket.socket, ready: Ready = at_once) -> bytes:
    """
    Receive a message.

    Raises:
        EOFError: the other end was closed.

    """
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
