"""
Raw host memory as bytes, and the interface of memory that is not one run of host bytes.

This module does not know tensors, so that files can be verified without importing torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Protocol

from shardkeep.errors import CheckpointError
from shardkeep.format.boxes import Box, Ints

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

copy_memory = ctypes.memmove
"""Copy raw memory: target, source, bytes. Releases the GIL."""


def view_memory(address: int, nbytes: int) -> memoryview:
    """View raw memory. The caller keeps its owner alive."""
    view: memoryview = _from_memory(address, nbytes, _WRITABLE)
    return view


@contextlib.contextmanager
def allocating(what: str, hint: str) -> Iterator[None]:
    """Turn a failure to allocate memory inside into a CheckpointError that says what it was for."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"no memory for {what}: {error}", hint=hint) from error


class Scattered(Protocol):
    """Memory that is not one run of host bytes."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def accelerator(self) -> int | None:
        """The index of the accelerator it is on; None for host memory."""

    def read(self, start: int, stop: int, into: memoryview, *, queued: bool = False) -> None:
        """
        Copy bytes `start..stop` of its row-major form, which are whole elements.

        With `queued`, a copy from an accelerator is only queued on its current stream.
        """

    def write(self, box: Box, data: memoryview, shape: Ints, part: Box) -> None:
        """Fill `box` from `part` of row-major elements of this shape."""

    def write_chunk(self, shape: Ints, source: Box, target: Box, data: memoryview, at: int) -> bool:
        """
        Fill box `target` with what `data` holds of box `source` of a row-major chunk of this shape.

        `data` begins `at` bytes after the start of the chunk, or before it. Returns False, and does nothing, if only `write`
        can do it.
        """

    def run_of(self, box: Box) -> int | None:
        """Return where the bytes of a box begin in its row-major form, if `write_run` can fill them at once."""

    def write_run(self, start: int, data: memoryview) -> None:
        """Fill bytes from `start` on; on an accelerator this is only queued, and needs `data` until `wait` returns."""

    def wait(self) -> None:
        """Wait for what this thread has queued on its accelerator, for any memory."""
