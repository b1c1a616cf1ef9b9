"""
Host memory for direct I/O: page-aligned buffers, the address of a buffer, a copy that lets other threads run.

Sizes come in, memory goes out. Buffers are leased from a `ScratchPool` and reused, because touching fresh memory
costs five times as much as copying into memory that is already there. Nothing here knows about files.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from shardkeep.storage.base import innermost, is_sequential

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Offsets, lengths and addresses of direct I/O are multiples of this."""

_SMALL_COPY_BYTES = 64 << 10


def aligned_buffer(nbytes: int) -> memoryview:
    """Make a writable, zeroed, page-aligned buffer of exactly `nbytes`; it is freed with its last view."""
    rounded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return memoryview(mmap.mmap(-1, rounded))[:nbytes]
    # Private, not mmap's default of shared: shared anonymous memory never gets huge pages and faults twice as slowly.
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


def address_of(view: memoryview) -> int:
    """Tell where the first byte of a contiguous buffer lies in memory; 0 for an empty one."""
    if not view.nbytes:
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def flat(view: memoryview) -> memoryview:
    """See any contiguous buffer as bytes."""
    return view if view.ndim == 1 and view.format == "B" and view.contiguous else view.cast("B")


def copy(dst: memoryview, src: memoryview) -> None:
    """
    Copy all of `src` over all of `dst`; both are bytes of one length.

    A large copy runs without the interpreter's lock. A small one keeps it: releasing it costs more than the copy.
    """
    if src.nbytes <= _SMALL_COPY_BYTES:
        dst[:] = src
    else:
        np.copyto(np.frombuffer(dst, np.uint8), np.frombuffer(src, np.uint8))


class ScratchPool:
    """
    Aligned buffers of one size, as many as threads that use one at the same time, kept while anyone holds the pool.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._holders = 0
        self._free: list[memoryview] = []

    def hold(self) -> None:
        """Keep free buffers for reuse until `let_go`."""
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """Undo one `hold`; the last one frees the memory."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._free.clear()

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
        """Lend one buffer; its contents are whatever the last user left."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = aligned_buffer(self.buffer_bytes)
        try:
            yield buffer
        finally:
            with self._lock:
                if self._holders:
                    self._free.append(buffer)


# Parts of one size that make a blob: cut from what is written, put together from pieces, given away in order.
#
# No I/O, and no locks but that of the room which all uploads share: whoever uses it sees to both.


class MemoryBudget:
    """Memory for bytes that are copied on their way; those who share it count together, in bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """All of it."""
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, must: bool = False) -> Any:
        """Return memory, which counts as long as it lives; None where there is no room, unless there must be."""
        memory = np.empty(nbytes, np.uint8)
        with self._changed:
            if self._taken + nbytes > self.nbytes and not must:
                return None
            self._taken += nbytes
        weakref.finalize(memory, self._give_back, nbytes).atexit = False
        return memory

    def wait(self, seconds: float) -> None:
        """Wait until some is given back, or for so long: whoever waits looks again in any case."""
        with self._changed:
            self._changed.wait(seconds)

    def _give_back(self, nbytes: int) -> None:
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()


DEFAULT_PART_NBYTES = 8 << 20
"""What a store that takes bytes in order is taken to keep of an open blob, where it does not say."""


def part_nbytes_of(store: object) -> int:
    """Say how much a store keeps of each open blob until it can be sent: a part; 0 where bytes go on as they come."""
    if not is_sequential(store):
        return 0
    manners = getattr(getattr(innermost(store), "bucket", None), "manners", None)
    return int(getattr(manners, "part_bytes", DEFAULT_PART_NBYTES))


class PartBuffer:
    """A part that is put together from pieces."""

    def __init__(self, memory: Any) -> None:
        self.memory = memoryview(memory)
        self._filled: list[tuple[int, int]] = []

    def fill(self, start: int, stop: int) -> bool:
        """Note that a piece is there; tells whether all of it is."""
        merged: list[tuple[int, int]] = []
        for low, high in sorted([*self._filled, (start, stop)]):
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._filled = merged
        return self.first_gap() >= len(self.memory)

    def first_gap(self) -> int:
        """Say how much of it is there from its beginning on."""
        return self._filled[0][1] if self._filled and not self._filled[0][0] else 0


class Parts:
    """The parts of one blob."""

    def __init__(self, size: int, nbytes: int) -> None:
        self._size = size
        self._nbytes = nbytes
        self._building: dict[int, PartBuffer] = {}
        self._whole: dict[int, Any] = {}
        """That wait to be given away."""
        self.next = 0
        """The part that is given away next."""

    def cut(self, offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """Cut bytes where parts begin: the number of a part, where in it, and the bytes."""
        at = 0
        while at < len(view):
            number, start = divmod(offset + at, self._size)
            some = min(self._size - start, len(view) - at)
            yield number, start, view[at : at + some]
            at += some

    def nbytes_of(self, number: int) -> int:
        """Say how large a part is."""
        return min(self._size, self._nbytes - number * self._size)

    def is_gone(self, number: int) -> bool:
        """Tell whether a part is whole, or was given away."""
        return number < self.next or number in self._whole

    def building(self, number: int) -> PartBuffer | None:
        """Return a part that is put together; None where that has not begun."""
        return self._building.get(number)

    def build(self, number: int, memory: Any) -> PartBuffer:
        """Begin to put a part together."""
        self._building[number] = PartBuffer(memory)
        return self._building[number]

    def accept(self, number: int, part: Any) -> bool:
        """Take a part that is whole; False where there was one."""
        if self.is_gone(number):
            return False
        self._building.pop(number, None)
        self._whole[number] = part
        return True

    def missing(self) -> int:
        """Say which part is the first that is not there."""
        number = self.next
        while number in self._whole:
            number += 1
        return number

    def waits(self, number: int) -> bool:
        """Tell whether a part waits to be given away."""
        return number in self._whole

    def take(self) -> tuple[int, Any]:
        """Give the next part away."""
        number = self.next
        self.next += 1
        return number, self._whole.pop(number)

    def replace_by_copy(self, number: int, memory: Any) -> None:
        """Copy a part that waits, so that its own memory can be used for something else."""
        if number in self._whole:
            memory[:] = self._whole[number]
            self._whole[number] = memory

    def close(self, end: int) -> str | None:
        """End the blob there, which makes its last part whole; returns what is wrong, or None."""
        last, rest = divmod(end, self._size)
        if not self.next and not self._whole and end <= self._size:
            return self._gap_before(end, 0)
        if self.next > last or (self.next == last and not rest and self._whole):
            return "more than that was written, and sent"
        if self.missing() < last or (self.missing() == last and rest):
            problem = self._gap_before(end, self.missing())
            if problem is None and self.missing() == last:
                self._whole[last] = np.frombuffer(self._building.pop(last).memory[:rest], np.uint8)
            return problem
        for number in [number for number in self._whole if number > last]:
            del self._whole[number]
        if last in self._whole:
            self._whole[last] = self._whole[last][:rest]
        return None

    def _gap_before(self, end: int, number: int) -> str | None:
        """Say where nothing was written, if that is in this part, or none of it is there."""
        building = self._building.get(number)
        there = number * self._size + (building.first_gap() if building else 0)
        return None if there >= end else f"nothing was written at offset {there}"

    def whole(self, end: int) -> memoryview:
        """Return the bytes of a blob of one part."""
        return self._building[0].memory[:end] if end else memoryview(b"")
