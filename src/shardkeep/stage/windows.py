"""
The windows that files are read and written through: ordinary memory, or pinned where much is copied to accelerators.

Torch is imported only where there are tensors on an accelerator, so that files can be verified without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from shardkeep.options import Options
from shardkeep.stage.memory import Scattered
from shardkeep.store.aligned import aligned_buffer

if TYPE_CHECKING:
    from shardkeep.stage.buffers import Buffer

Lend = Callable[[], memoryview]
"""Gives a thread its window."""

_WORTH_PINNING_NBYTES = 256 << 20
"""To pin memory takes as long as to copy fifty times as much through it, but is done once a process."""


@contextmanager
def windows_for(memory: Iterable[Scattered], nbytes: int, threads: int) -> Iterator[Lend]:
    """
    Make the function that gives each of at most `threads` threads one window of `nbytes`, to use while inside.

    It is to be called by the thread that will use the window: where `memory` is on an accelerator, that thread then
    works on this one, rather than on the first there is.
    """
    on_accelerators = [each for each in memory if each.accelerator is not None]
    if not on_accelerators:
        yield partial(aligned_buffer, nbytes)
        return
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    from shardkeep.stage.pinned import staging_memory  # noqa: PLC0415 - it imports torch

    index = on_accelerators[0].accelerator
    ring = staging_memory().ring
    per_buffer = ring.buffer_nbytes // nbytes
    pins = per_buffer > 0 and sum(place.nbytes for place in on_accelerators) >= _WORTH_PINNING_NBYTES
    if pins:
        wanted = -(-threads // per_buffer) * ring.buffer_nbytes
        ring.most_nbytes = max(ring.most_nbytes, min(wanted, Options().pinned_bytes))
    taken: list[Buffer] = []
    free: list[memoryview] = []
    lock = threading.Lock()

    def lend() -> memoryview:
        if index is not None:
            torch.accelerator.set_device_index(index)
        with lock:
            # Never waits: whoever uses the ring now may be waiting for this very thread.
            if pins and not free and (buffer := ring.take(lambda: False)):
                taken.append(buffer)
                free.extend(buffer.view[at * nbytes : (at + 1) * nbytes] for at in range(per_buffer))
            return free.pop() if free else aligned_buffer(nbytes)

    try:
        yield lend
    finally:
        for buffer in taken:
            ring.give(buffer)
