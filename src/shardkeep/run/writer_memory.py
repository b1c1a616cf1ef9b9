"""
Memory that the process which writes sees too: regions of one file that has no name, so that no more than one file
descriptor has to reach it.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from typing import NamedTuple

import torch

from shardkeep.errors import CheckpointError
from shardkeep.run.writer_mapping import map_shared
from shardkeep.stage.buffers import Buffer
from shardkeep.store.aligned import ALIGNMENT, address_of

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
