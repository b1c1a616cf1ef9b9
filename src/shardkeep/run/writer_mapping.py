"""
A range of a file as memory, of which the system keeps no file descriptor: Python's own `mmap` holds one for each.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref

import numpy as np

from shardkeep.stage.memory import view_memory

_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, offset: int, nbytes: int, *, owned: bool) -> memoryview:
    """
    Map whole pages of a file in memory, until the last view of them is gone.

    Args:
        fd: the file.
        offset: where they begin.
        nbytes: how many bytes.
        owned: may be written to, and the file's memory is given back with them. Else they are only read.

    """
    access = mmap.PROT_READ | mmap.PROT_WRITE if owned else mmap.PROT_READ
    address: int | None = _libc().mmap(None, nbytes, access, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of shared memory")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # only where the system allows it for shared memory
    # Views of the array hold it, as they would not hold a plain address.
    pages = np.frombuffer(view_memory(address, nbytes), np.uint8)
    weakref.finalize(pages, _unmap, address, nbytes, owned, os.getpid()).atexit = False
    return pages.data if owned else pages.data.toreadonly()


def _unmap(address: int, nbytes: int, owned: bool, process_id: int) -> None:
    if process_id != os.getpid():  # a fork, whose copy of the mapping is of no consequence
        return
    if owned:
        _libc().madvise(address, nbytes, mmap.MADV_REMOVE)
    _libc().munmap(address, nbytes)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc
