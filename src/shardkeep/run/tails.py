"""
Checksums that stand in a file behind the bytes they are of, while several threads write that file.

Each window of a file adds what it holds of every item to the item's checksum. A window that holds the tail of an item
begun in an earlier one needs that one's part: windows take turns for this, in the order of the file, which is the
order in which they are begun. Only checksums wait for each other; gathering, hashing and writing go on side by side.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shardkeep.format.columns import IntArray
from shardkeep.format.crc import combine
from shardkeep.run.workers import Consequence


@dataclass(frozen=True)
class Tail:
    """What stands behind an item, and wants its CRC-32."""

    data: bytearray
    crc_at: tuple[int, ...]


class Tails:
    """All items of one file that have a tail right behind them, in order."""

    def __init__(self, start: IntArray, stop: IntArray, tails: list[Tail]) -> None:
        self._start = start
        self._stop = stop
        self._tails = tails
        self._crc = [0] * len(tails)
        self._done = 0
        self._broken = False
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, start: int, stop: int) -> Iterator[Turn]:
        """Work on a window; if that fails, windows that wait for its turn fail too."""
        try:
            yield Turn(self, start, stop)
        except BaseException:
            with self._changed:
                self._broken = True
                self._changed.notify_all()
            raise

    def add(self, start: int, stop: int, window: memoryview) -> None:
        """Add what a window holds of each item, and put the checksums of those that end in it into their tails."""
        first = int(np.searchsorted(self._stop, start, "right"))
        last = int(np.searchsorted(self._start, stop, "left"))
        parts = []
        for item in range(first, last):
            low, high = max(start, int(self._start[item])), min(stop, int(self._stop[item]))
            parts.append((item, zlib.crc32(window[low - start : high - start]), high - low))
        with self._changed:
            self._changed.wait_for(lambda: self._done == start or self._broken)
            if self._broken:
                raise Consequence("another part of the same file failed")
            for item, crc, nbytes in parts:
                self._crc[item] = combine(self._crc[item], crc, nbytes)
                if self._stop[item] <= stop:
                    self._fill(item)
            self._done = stop
            self._changed.notify_all()

    def _fill(self, item: int) -> None:
        tail = self._tails[item]
        for at in tail.crc_at:
            tail.data[at : at + 4] = self._crc[item].to_bytes(4, "little")

    def copy(self, start: int, stop: int, window: memoryview) -> None:
        """Copy the tails into a window that was gathered before they were filled."""
        # The tail of the item before the first that begins here may reach into it.
        first = max(0, int(np.searchsorted(self._stop, start, "left")) - 1)
        for item in range(first, int(np.searchsorted(self._stop, stop, "left"))):
            begin, data = int(self._stop[item]), self._tails[item].data
            low, high = max(start, begin), min(stop, begin + len(data))
            if high > low:
                window[low - start : high - start] = data[low - begin : high - begin]


@dataclass(frozen=True)
class Turn:
    """A window's work on the tails of its file."""

    tails: Tails
    start: int
    stop: int

    def complete(self, window: memoryview) -> None:
        """Make a gathered window what goes to the disk."""
        self.tails.add(self.start, self.stop, window)
        self.tails.copy(self.start, self.stop, window)
