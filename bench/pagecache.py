"""The page cache of a checkpoint's files: drop pages, load them, and check which are cached."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
DROP = "/proc/sys/vm/drop_caches"


def files_of(where: str) -> list[Path]:
    return [path for path in Path(where).rglob("*") if path.is_file()]


def can_drop() -> bool:
    return os.access(DROP, os.W_OK)


def chill(where: str) -> None:
    """Drop the whole page cache where we may; else ask the kernel to forget these files."""
    os.sync()
    if can_drop():
        Path(DROP).write_text("3")
        return
    for path in files_of(where):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def resident_fraction(where: str) -> float:
    """How much of the files is in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = total = 0
    for path in files_of(where):
        try:
            nbytes = path.stat().st_size
        except FileNotFoundError:  # a claim of a save that ends just now
            continue
        if not nbytes:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
            pages = -(-nbytes // PAGE)
            seen = np.zeros(pages, dtype=np.uint8)
            view = np.frombuffer(mapped, dtype=np.uint8)
            address = ctypes.c_void_p(view.ctypes.data)
            if libc.mincore(address, ctypes.c_size_t(nbytes), seen.ctypes.data_as(ctypes.c_void_p)):
                raise OSError(ctypes.get_errno(), f"mincore on {path}")
            del view
            held += int((seen & 1).sum())
            total += pages
    return held / total if total else 0.0


def io_counter(name: str) -> int:
    """What this process has read so far: `read_bytes` from the disk, `rchar` in all."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
