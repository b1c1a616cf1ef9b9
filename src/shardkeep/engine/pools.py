"""Pools of host memory, kept until `close`: fresh memory costs five times a copy, pinned memory a hundred times."""

from __future__ import annotations

import logging
import sys
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, count
from typing import Any

import torch

from shardkeep.errors import PinningRefused
from shardkeep.options import per_process
from shardkeep.state.offload import register_pinned
from shardkeep.storage.buffers import address_of, aligned_buffer, allocating

log = logging.getLogger("shardkeep")

WINDOW_NBYTES = 32 << 20
"""Of the buffers that are staged through: large enough that the overhead of Python is small beside the copy."""
_POLL_S = 0.2
"""How often a wait for a buffer checks whether one is still wanted."""
_ALIGNMENT = 64
_KEPT_FOR = 2
"""A storage that this many copies in a row did not use is freed."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """Page-aligned host memory."""

    view: memoryview
    tensor: torch.Tensor
    """The same bytes, for copies from and to accelerators."""
    number: int = field(default_factory=count().__next__)
    """Buffers that were made later have larger ones."""

    @cached_property
    def address(self) -> int:
        """Where it begins; kept, because a save asks for each of its windows."""
        return address_of(self.view)


def ordinary_buffer(nbytes: int, *, huge_pages: bool = True) -> Buffer:
    view = aligned_buffer(nbytes, huge_pages=huge_pages)
    return Buffer(view, torch.frombuffer(view, dtype=torch.uint8))


def pinned_buffer(nbytes: int, make: Callable[[int], Buffer] | None = None) -> Buffer:
    """
    Make a buffer that accelerators copy from and to at full speed; an ordinary one if it cannot be pinned.

    `make` makes the memory, if it has to be shared with another process.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type != "cuda" and not make:
        tensor = _pinned_by_torch(nbytes)
        return Buffer(tensor.numpy().data, tensor)
    made = (make or ordinary_buffer)(nbytes)
    if accelerator is None or accelerator.type != "cuda":
        return made
    # The driver launches nothing while it pins, and pins pages that exist already four times as fast.
    made.tensor.zero_()
    _try_to_pin(made.tensor)
    return made


def _pinned_by_torch(nbytes: int) -> torch.Tensor:
    """Allocate pinned memory: only CUDA can pin memory that exists already, other accelerators have their own allocator."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _try_to_pin(tensor: torch.Tensor) -> bool:
    """Pin memory that exists; return False if the driver refuses. Pinning only saves time, so a save must not fail for it."""
    try:
        register_pinned(tensor)
    except PinningRefused as refused:
        log.warning("staging goes on without pinned memory: %s", refused)
        return False
    return True


class BufferPool:
    """Buffers of one size, made when needed; the oldest goes first, so light use touches little memory. Thread-safe."""

    def __init__(self, make: Callable[[int], Buffer], buffer_nbytes: int, most_nbytes: int) -> None:
        """Buffers take `most_nbytes` together, but at least one is made."""
        self.buffer_nbytes = buffer_nbytes
        self.most_nbytes = most_nbytes
        self._make = make
        self._made = 0
        self._free: list[Buffer] = []
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        return self._made * self.buffer_nbytes

    @property
    def nbytes_in_use(self) -> int:
        with self._changed:
            return (self._made - len(self._free)) * self.buffer_nbytes

    def take(self, wanted: Callable[[], bool] = lambda: True) -> Buffer | None:
        """Wait for a buffer, and return it; None as soon as it is no longer wanted."""
        with self._changed:
            while not self._free and self._made and (self._made + 1) * self.buffer_nbytes > self.most_nbytes:
                if not wanted():
                    return None
                self._changed.wait(_POLL_S)
            if self._free:
                return self._free.pop()
            self._made += 1
        return self._new()

    def _new(self) -> Buffer:
        try:
            most = f"{self._made} of {self.buffer_nbytes >> 20} MiB, in {self.most_nbytes >> 20} MiB at most"
            with allocating(f"buffer number {most}", "allow less with Options(staging_bytes=...)"):
                return self._make(self.buffer_nbytes)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise

    def shrink(self, most_nbytes: int) -> None:
        """Free buffers that are not in use, as long as more than `most_nbytes` are held."""
        with self._changed:
            while self._free and self._made * self.buffer_nbytes > most_nbytes:
                self._made -= 1
                del self._free[0]

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            if self._made * self.buffer_nbytes > max(self.most_nbytes, self.buffer_nbytes):
                self._made -= 1  # the pool was closed, or its limit lowered
            else:
                insort(self._free, buffer, key=lambda each: -each.number)
            self._changed.notify()

    def grow(self, wanted: Callable[[], bool], most: int = sys.maxsize) -> None:
        """Make up to `most` buffers, as the limit allows, while that is wanted."""
        for _ in range(most):
            if not wanted():
                return
            with self._changed:
                if (self._made + 1) * self.buffer_nbytes > self.most_nbytes:
                    return
                self._made += 1
            self.give(self._new())

    def close(self) -> None:
        """Free buffers that are not in use; the others are freed when they are given back. The next user sets the limit."""
        self.most_nbytes = 0
        self.shrink(0)


# The caller of the first save waits for these pages. The system takes small ones from memory that was just freed, but
# huge ones often from memory that was never used, for which the host of a virtual machine needs six times as long.
_small_pages = partial(ordinary_buffer, huge_pages=False)


class Arenas:
    """Memory of any size for snapshots. Thread-safe."""

    def __init__(self, make: Callable[[int], Buffer] = _small_pages) -> None:
        self._make = make
        self._free: list[Buffer] = []
        self.nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes_in_use(self) -> int:
        with self._lock:
            return self.nbytes - sum(each.view.nbytes for each in self._free)

    def take(self, nbytes: int, most_nbytes: int = sys.maxsize) -> Buffer:
        """Return the smallest free arena from `nbytes` to `most_nbytes`; if there is none, free all, and make one."""
        with self._lock:
            fits = [each for each in self._free if nbytes <= each.view.nbytes <= max(nbytes, most_nbytes)]
            if fits:
                arena = min(fits, key=lambda each: each.view.nbytes)
                self._free.remove(arena)
                return arena
            self.nbytes += nbytes - sum(each.view.nbytes for each in self._free)
            self._free.clear()
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self.nbytes -= nbytes
            raise

    def give(self, arena: Buffer) -> None:
        with self._lock:
            self._free.append(arena)

    def close(self) -> None:
        with self._lock:
            self.nbytes -= sum(each.view.nbytes for each in self._free)
            self._free.clear()


@dataclass(frozen=True)
class StagingMemory:
    """What saves and loads of a process stage through. Each user sets how much of it may be used."""

    ring: BufferPool = field(default_factory=lambda: BufferPool(pinned_buffer, WINDOW_NBYTES, 0))
    """Pinned: accelerators copy into it."""
    windows: BufferPool = field(default_factory=lambda: BufferPool(ordinary_buffer, WINDOW_NBYTES, 0))
    """Ordinary: the ring is emptied into it, and files are written from it."""
    arenas: Arenas = field(default_factory=Arenas)
    """Ordinary: copies of tensors that lie in host memory."""
    streams: dict[tuple[torch.device, int], torch.Stream] = field(default_factory=dict)
    """The streams of threads that copy, by number: always the same few, because torch caches memory for each stream."""

    def release(self) -> None:
        self.streams.clear()
        self.ring.close()
        self.windows.close()
        self.arenas.close()


staging_memory = per_process(StagingMemory)
"""Returns the memory of this process, which outlives the calls that use it."""


@dataclass(frozen=True)
class HostSlot:
    """Where a piece lies in host memory."""

    storage: torch.UntypedStorage
    offset: int


class StoragePool:
    """
    Storages in host memory, pinned or shared if so asked. Thread-safe.

    A storage is free again when the last tensor over it is gone: the next copy never overwrites one that is being
    written. Pinning and sharing cost a driver call or a file descriptor for each storage, so all pieces of a copy share
    one then.
    """

    def __init__(self, *, pinned: bool = False, shared: bool = False, pinned_from: int = 0) -> None:
        self._pinned = pinned
        self._shared = shared
        self._pinned_from = pinned_from
        self._kept: dict[int, list[_KeptStorage]] = {}
        self._to_pin: list[torch.UntypedStorage] = []
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> list[HostSlot]:
        """Find memory for pieces of these sizes. Its contents are undefined."""
        with self._lock:
            self._taken += 1
            if sizes and (self._pinned or self._shared):
                ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
                storage = self._storage(ends[-1])
                slots = [HostSlot(storage, start) for start in (0, *ends[:-1])]
            else:
                slots = [HostSlot(self._storage(size), 0) for size in sizes]
            oldest = self._taken - _KEPT_FOR
            kept = {size: [each for each in kept if each.used_in >= oldest] for size, kept in self._kept.items()}
            self._kept = {size: each for size, each in kept.items() if each}
        return slots

    def release(self) -> None:
        """Free all memory; what tensors still use is freed with them."""
        with self._lock:
            self._kept.clear()

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(size * len(kept) for size, kept in self._kept.items())

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        kept = self._kept.setdefault(nbytes, [])
        for each in kept:
            if each.used_in != self._taken and each.is_free():
                break
        else:
            each = _KeptStorage(self._new(nbytes))
            kept.append(each)
        each.used_in = self._taken
        return each.storage

    def _new(self, nbytes: int) -> torch.UntypedStorage:
        pinned = self._pinned and nbytes >= max(1, self._pinned_from)
        if pinned and not self._shared and not torch.cuda.is_available():
            return _pinned_by_torch(nbytes).untyped_storage()
        make: Any = torch.UntypedStorage._new_shared if self._shared else torch.UntypedStorage
        storage: torch.UntypedStorage = make(nbytes)
        if pinned:
            self._to_pin.append(storage)
        return storage

    def pin(self) -> None:
        """Pin the storages that are new: after `take`, because it takes longer than copying to them."""
        with self._lock:
            while self._to_pin and self._pinned:
                self._pinned = _try_to_pin(torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._to_pin.pop()))


@dataclass
class _KeptStorage:
    """A storage, and the last copy of a state it was used in."""

    storage: torch.UntypedStorage
    used_in: int = 0

    def is_free(self) -> bool:
        """Return whether no tensor uses it: the one reference to it is ours."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) == 1
