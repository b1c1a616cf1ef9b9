"""
The memory that this process keeps for staging: one ring of pinned buffers, windows of ordinary memory, and arenas.

Pinned memory is what all saves and loads of a process share, made once and released by `release`.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field

from shardkeep.stage.buffers import Arenas, BufferPool, ordinary_buffer, pinned_buffer

WINDOW_NBYTES = 32 << 20
"""Large enough that what Python does for each is little beside the copy."""


@dataclass(frozen=True)
class StagingMemory:
    """What one process stages through. How much of it may be used is set by whoever uses it next."""

    ring: BufferPool = field(default_factory=lambda: BufferPool(pinned_buffer, WINDOW_NBYTES, 0))
    """Pinned: where accelerators copy to."""
    windows: BufferPool = field(
        default_factory=lambda: BufferPool(ordinary_buffer, WINDOW_NBYTES, 0, oldest_first=True)
    )
    """Ordinary: where the ring is emptied to, and files are written from."""
    arenas: Arenas = field(default_factory=Arenas)
    """Ordinary: copies of tensors that lie in host memory."""

    def release(self) -> None:
        """Free all that is not in use."""
        self.ring.close()
        self.windows.close()
        self.arenas.close()


@functools.cache  # outlives the calls that use it; a forked process must not touch its parent's
def _memory_of(process_id: int) -> StagingMemory:
    del process_id
    return StagingMemory()


def staging_memory() -> StagingMemory:
    """Return the memory of this process."""
    return _memory_of(os.getpid())
