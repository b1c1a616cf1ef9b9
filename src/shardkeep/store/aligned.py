"""
Host memory for direct I/O: page-aligned buffers, the address of a buffer, a copy that lets other threads run.

Sizes come in, memory goes out. Buffers are leased from a `ScratchPool` and reused, because touching fresh memory
costs five times as much as copying into memory that is already there. Nothing here knows about files.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

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
