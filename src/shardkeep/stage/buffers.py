"""
Host memory that is used again over saves and loads: buffers of one size under a limit, pinned or ordinary, and arenas.

Fresh memory costs five times the copy into it, and pinning it a hundred times as much, so nothing here is given back
before `close`. Whoever takes a buffer while all of them are in use waits until one is given back.
"""

from __future__ import annotations

import logging
import sys
import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from shardkeep.stage.memory import asking_for_memory
from shardkeep.state.toolkit.offload import PinningRefused, _register
from shardkeep.store.aligned import aligned_buffer

log = logging.getLogger("shardkeep")

_PATIENCE_S = 0.2
"""How often one who waits for a buffer looks whether it still wants one."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Page-aligned host memory."""

    view: memoryview
    tensor: torch.Tensor
    """The same bytes, for copies from and to accelerators."""
    pinned: bool = False


def ordinary_buffer(nbytes: int) -> Buffer:
    """Make a buffer of ordinary memory."""
    view = aligned_buffer(nbytes)
    return Buffer(view, torch.frombuffer(view, dtype=torch.uint8))


def pinned_buffer(nbytes: int) -> Buffer:
    """Make a buffer that accelerators copy from and to at full speed; an ordinary one where it cannot be pinned."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return ordinary_buffer(nbytes)
    if accelerator.type != "cuda":  # only CUDA can pin memory that exists already; others have their own allocator
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return Buffer(tensor.numpy().data, tensor, pinned=True)
    made = ordinary_buffer(nbytes)
    try:
        _register(made.tensor)
    except PinningRefused as refused:
        # Pinned memory is faster and nothing else: a save must not fail for it.
        log.warning("staging goes on without pinned memory: %s", refused)
        return made
    return Buffer(made.view, made.tensor, pinned=True)


class BufferPool:
    """Buffers of one size, made when they are first needed. May be used by several threads."""

    def __init__(
        self, make: Callable[[int], Buffer], buffer_nbytes: int, most_nbytes: int, *, oldest_first: bool = False
    ) -> None:
        """
        Make nothing yet.

        Args:
            make: makes a buffer.
            buffer_nbytes: the size of each.
            most_nbytes: how much they may take together; one buffer at least.
            oldest_first: give out the one that was made first, rather than the one that came back last. Who fills some
                of them only in part, in the same order each time, then touches the same memory each time.

        """
        self.buffer_nbytes = buffer_nbytes
        self.most_nbytes = most_nbytes
        self._make = make
        self._made = 0
        self._oldest_first = oldest_first
        self._ages: dict[Buffer, int] = {}
        self._age = count()
        self._free: list[Buffer] = []
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return self._made * self.buffer_nbytes

    @property
    def nbytes_in_use(self) -> int:
        """How much of it somebody has taken."""
        with self._changed:
            return (self._made - len(self._free)) * self.buffer_nbytes

    def take(self, wanted: Callable[[], bool] = lambda: True) -> Buffer | None:
        """Return a buffer, when there is one; None as soon as it is no longer wanted."""
        with self._changed:
            while not self._free and self._made and (self._made + 1) * self.buffer_nbytes > self.most_nbytes:
                if not wanted():
                    return None
                self._changed.wait(_PATIENCE_S)
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._new()

    def _new(self) -> Buffer:
        try:
            most = f"{self._made} of {self.buffer_nbytes >> 20} MiB, in {self.most_nbytes >> 20} MiB at most"
            with asking_for_memory(f"buffer number {most}", "allow less with Options(staging_bytes=...)"):
                buffer = self._make(self.buffer_nbytes)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise
        self._ages[buffer] = next(self._age)
        return buffer

    def shrink(self, most_nbytes: int) -> None:
        """Free what nobody uses, as far as more than so much is held."""
        with self._changed:
            while self._free and self._made * self.buffer_nbytes > most_nbytes:
                self._made -= 1
                del self._ages[self._free.pop(0)]

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        with self._changed:
            if self._made * self.buffer_nbytes > max(self.most_nbytes, self.buffer_nbytes):
                self._made -= 1  # closed, or allowed less by now
                del self._ages[buffer]
            elif self._oldest_first:
                insort(self._free, buffer, key=lambda each: -self._ages[each])
            else:
                self._free.append(buffer)
            self._changed.notify()

    def grow(self, wanted: Callable[[], bool]) -> None:
        """Make as many buffers as there may be, while that is wanted."""
        while wanted():
            with self._changed:
                if (self._made + 1) * self.buffer_nbytes > self.most_nbytes:
                    return
                self._made += 1
            self.give(self._new())

    def close(self) -> None:
        """Free what is not in use; the rest is freed as it is given back. Whoever comes next sets the limit anew."""
        with self._changed:
            self.most_nbytes = 0
            self._made -= len(self._free)
            for buffer in self._free:
                del self._ages[buffer]
            self._free.clear()


class Arenas:
    """Runs of host memory of any length, each for one snapshot at a time. May be used by several threads."""

    def __init__(self, make: Callable[[int], Buffer] = ordinary_buffer) -> None:
        """Make nothing yet; `make` will."""
        self._make = make
        self._free: list[Buffer] = []
        self._held = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How much memory is held."""
        return self._held

    @property
    def nbytes_in_use(self) -> int:
        """How much of it holds a snapshot."""
        with self._lock:
            return self._held - sum(each.view.nbytes for each in self._free)

    def take(self, nbytes: int, most_nbytes: int | None = None) -> Buffer:
        """
        Return memory of at least `nbytes`, and at most `most_nbytes` if these are more.

        It is the least of what is free that is enough; if there is none, all that is free is freed, and it is made.
        """
        most_nbytes = sys.maxsize if most_nbytes is None else max(nbytes, most_nbytes)
        with self._lock:
            fits = [each for each in self._free if nbytes <= each.view.nbytes <= most_nbytes]
            if fits:
                arena = min(fits, key=lambda each: each.view.nbytes)
                self._free.remove(arena)
                return arena
            self._held += nbytes - sum(each.view.nbytes for each in self._free)
            self._free.clear()
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self._held -= nbytes
            raise

    def give(self, arena: Buffer) -> None:
        """Take memory back."""
        with self._lock:
            self._free.append(arena)

    def close(self) -> None:
        """Free what is not in use."""
        with self._lock:
            self._held -= sum(each.view.nbytes for each in self._free)
            self._free.clear()
