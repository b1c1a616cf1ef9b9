"""
The windows that files are read and written through: ordinary memory, or pinned where much is copied to accelerators.

Torch is imported only where there are tensors on an accelerator, so that files can be verified without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING

from shardkeep.options import Options
from shardkeep.stage.memory import Scattered, asking_for_memory
from shardkeep.store.aligned import aligned_buffer

if TYPE_CHECKING:
    import torch

    from shardkeep.stage.buffers import Buffer

Lend = Callable[[], memoryview]
"""Gives a thread its window."""
Events = dict["torch.device", "torch.Event"]

_WORTH_PINNING_NBYTES = 256 << 20
"""To pin memory takes as long as to copy fifty times as much through it, but is done once a process."""


@contextmanager
def windows_for(memory: Iterable[Scattered], nbytes: int, threads: int) -> Iterator[Lend]:
    """
    Make the function that gives each of at most `threads` threads one window of `nbytes`, to use while inside.

    It is to be called by the thread that will use the window: where `memory` is on an accelerator, that thread then
    works on this one, rather than on the first there is, and on a stream of its own, after all that the caller has queued.
    On one stream, whoever waits for its own copies waits for everybody's.
    """
    on_accelerators = [each for each in memory if each.accelerator is not None]
    if not on_accelerators:
        yield partial(_window, nbytes)
        return
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    from shardkeep.stage.pinned import staging_memory  # noqa: PLC0415 - it imports torch

    indices = list(dict.fromkeys(each.accelerator for each in on_accelerators if each.accelerator is not None))
    after = _events_now(indices)
    ring = staging_memory().ring
    per_buffer = ring.buffer_nbytes // nbytes
    pins = per_buffer > 0 and sum(place.nbytes for place in on_accelerators) >= _WORTH_PINNING_NBYTES
    if pins:
        wanted = -(-threads // per_buffer) * ring.buffer_nbytes
        ring.most_nbytes = max(ring.most_nbytes, min(wanted, Options().pinned_bytes))
    taken: list[Buffer] = []
    free: list[memoryview] = []
    lock = threading.Lock()
    numbers = count()

    def lend() -> memoryview:
        torch.accelerator.set_device_index(indices[0])
        with lock:
            _work_aside(next(numbers), after)
            # Never waits: whoever uses the ring now may be waiting for this very thread.
            if pins and not free and (buffer := ring.take(lambda: False)):
                taken.append(buffer)
                free.extend(buffer.view[at * nbytes : (at + 1) * nbytes] for at in range(per_buffer))
            return free.pop() if free else _window(nbytes)

    try:
        yield lend
    finally:
        for buffer in taken:
            ring.give(buffer)


def _window(nbytes: int) -> memoryview:
    with asking_for_memory(f"a window of {nbytes >> 10} KiB", "allow less with Options(host_budget_bytes=...)"):
        return aligned_buffer(nbytes)


def _events_now(indices: Iterable[int]) -> Events:
    """Mark what this thread has queued so far on accelerators."""
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    kind = torch.accelerator.current_accelerator(True)
    devices = [torch.device(kind.type, index) for index in indices] if kind else []
    return {device: torch.accelerator.current_stream(device).record_event() for device in devices}


def _work_aside(number: int, after: Events) -> None:
    """Have this thread, the one of that number, work on streams that come after these events; on the first device."""
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    for device, event in reversed(after.items()):
        stream = _stream(os.getpid(), device, number)
        stream.wait_event(event)
        torch.accelerator.set_stream(stream)  # and its device


@cache  # always the same few: torch keeps memory for each stream apart
def _stream(process_id: int, device: torch.device, number: int) -> torch.Stream:
    import torch  # noqa: PLC0415 - loaded, as there are tensors

    del process_id, number
    return torch.Stream(device)
