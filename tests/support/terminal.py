"""Pseudo-terminals, and what programs write to them."""

import contextlib
import os
import pty
import threading
from collections.abc import Iterator


def start_reading(leader: int, pieces: list[bytes]) -> threading.Thread:
    """Read what a terminal gets, until its other side is closed."""

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that a terminal has no more writers
            while piece := os.read(leader, 1 << 16):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    return reader


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """Open a terminal; yield its descriptor, and a list that gets, at the end, the text that was written to it."""
    leader, follower = pty.openpty()
    pieces: list[bytes] = []
    written: list[str] = []
    reader = start_reading(leader, pieces)
    try:
        yield follower, written
    finally:
        os.close(follower)
        reader.join(60)
        os.close(leader)
        written.append(b"".join(pieces).decode())
