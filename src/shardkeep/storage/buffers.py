"""Host memory for I/O: aligned buffers that threads reuse (new memory costs as much as five copies), and memory budgets."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shardkeep.errors import CheckpointError

T = TypeVar("T")

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Direct I/O needs offsets, lengths and addresses that are multiples of this."""

_SMALL_COPY_BYTES = 64 << 10
_FEW = 32
"""For fewer pieces, numpy takes longer than a copy of each."""
_COPIED_APART_NBYTES = 16 << 10
"""Numpy copies larger pieces more slowly than a copy of each."""
_COPIED_AT_ONCE_NBYTES = 256 << 10
"""Numpy copies pieces to memory of its own on the way, which stays in the cache up to this size."""

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

copy_memory = ctypes.memmove
"""Copy raw memory: target, source, bytes. Releases the interpreter's lock."""


def view_memory(address: int, nbytes: int) -> memoryview:
    """View raw memory. The caller keeps its owner alive."""
    view: memoryview = _from_memory(address, nbytes, _WRITABLE)
    return view


Addresses = npt.NDArray[np.int64]


def copy_alike(targets: Addresses, sources: Addresses, nbytes: int) -> None:
    """Copy small pieces of raw memory that all have this size; a call for each would take ten times as long as the copy."""
    if len(targets) < _FEW or nbytes > _COPIED_APART_NBYTES:  # keeps the lock, for which another thread may be waiting
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            view_memory(target, nbytes)[:] = view_memory(source, nbytes)
        return
    (target_at, target), (source_at, source) = (_elements(each, nbytes) for each in (targets, sources))
    step = _COPIED_AT_ONCE_NBYTES // nbytes
    for at in range(0, len(target_at), step):
        target[target_at[at : at + step]] = source[source_at[at : at + step]]


def _elements(addresses: Addresses, nbytes: int) -> tuple[Addresses, npt.NDArray[np.void]]:
    """
    Return the numbers of the elements at these addresses, and an array with an element at every address from the lowest of these on.

    Between these addresses there may be no memory: only these elements may be touched.
    """
    first = int(addresses.min())
    memory = view_memory(first, int(addresses.max()) - first + nbytes)
    return addresses - first, np.ndarray(len(memory) - nbytes + 1, f"V{nbytes}", memory, strides=(1,))


@contextmanager
def allocating(what: str, hint: str) -> Iterator[None]:
    """Turn a failure to allocate memory inside into a CheckpointError that says what it was for."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"no memory for {what}: {error}", hint=hint) from error


def aligned_buffer(nbytes: int, *, huge_pages: bool = True) -> memoryview:
    """Return a zeroed, page-aligned buffer of exactly `nbytes`; it is freed with its last view."""
    rounded = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return memoryview(mmap.mmap(-1, rounded))[:nbytes]
    # Private, not mmap's default of shared: shared anonymous memory never gets huge pages and faults twice as slowly.
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


def address_of(view: memoryview) -> int:
    if not view.nbytes:
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def flat(view: memoryview) -> memoryview:
    return view if view.ndim == 1 and view.format == "B" and view.contiguous else view.cast("B")


def copy(dst: memoryview, src: memoryview) -> None:
    """Copy all of `src` over all of `dst`; only a large copy releases the GIL, because that has a cost."""
    if src.nbytes <= _SMALL_COPY_BYTES:
        dst[:] = src
    else:
        np.copyto(np.frombuffer(dst, np.uint8), np.frombuffer(src, np.uint8))


class PerThread(Generic[T]):
    """One object for each thread, such as a buffer or a compressor; freed with the thread, or with this."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._mine = threading.local()

    def get(self) -> T:
        made: T | None = getattr(self._mine, "made", None)
        if made is None:
            made = self._mine.made = self._make()
        return made


Scratch = PerThread[memoryview]
"""An aligned buffer for each thread; what is in it is undefined."""


class MemoryBudget:
    """A bound on buffered bytes, shared by everything that takes memory from it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """The whole budget."""
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, must: bool = False) -> Any:
        """Return an array that counts against the budget while it lives; None if it does not fit, unless `must`."""
        memory = np.empty(nbytes, np.uint8)
        with self._changed:
            if self._taken + nbytes > self.nbytes and not must:
                return None
            self._taken += nbytes
        weakref.finalize(memory, self._release, nbytes).atexit = False
        return memory

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def _release(self, nbytes: int) -> None:
        with self._changed:
            self._taken -= nbytes
            self._changed.notify_all()
