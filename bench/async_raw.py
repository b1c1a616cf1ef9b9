"""The raw speed of a directory: the same number of bytes, written from memory as fast as we can, and made durable."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
SOURCE = 1 << 30
"""Bytes of the memory written again and again: more than any CPU cache holds."""


@dataclass(frozen=True)
class Recipe:
    files: int
    threads: int
    direct: bool
    request: int

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "buffered"
        return f"{self.files} file{'s' * (self.files > 1)}, {self.threads} threads, {self.request // MIB} MiB {how}"


RECIPES = tuple(
    Recipe(files, threads, direct, request * MIB)
    for direct in (True, False)
    for files, threads, request in ((1, 4, 8), (4, 4, 8), (4, 8, 16))
)


def source(nbytes: int) -> mmap.mmap:
    """Make page-aligned memory full of random bytes."""
    size = min(SOURCE, -(-nbytes // (16 * MIB)) * 16 * MIB)
    memory = mmap.mmap(-1, size)
    random = np.random.Generator(np.random.SFC64(0))
    np.frombuffer(memory, dtype=np.uint64)[:] = random.integers(0, 1 << 63, size // 8, dtype=np.uint64)
    return memory


def write(memory: mmap.mmap, nbytes: int, where: str, recipe: Recipe) -> float:
    """Write `nbytes` (in whole pages) under `where` and fdatasync; return the seconds, and take the files away."""
    os.makedirs(where)
    view = memoryview(memory)
    size = -(-nbytes // recipe.files // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = os.O_CREAT | os.O_WRONLY | (os.O_DIRECT if recipe.direct else 0)
    fds: list[int] = []

    def piece(at: tuple[int, int]) -> None:
        offset, file = at
        count = min(recipe.request, size - offset)
        begin = (offset + file * size) // recipe.request * recipe.request % len(view)
        begin = min(begin, len(view) - recipe.request)
        done = 0
        while done < count:
            done += os.pwrite(fds[file], view[begin + done : begin + count], offset + done)

    try:
        began = time.perf_counter()
        fds += [os.open(f"{where}/{number}", flags, 0o644) for number in range(recipe.files)]
        with ThreadPoolExecutor(recipe.threads) as pool:  # offset by offset over all files: each is written in order
            list(pool.map(piece, itertools.product(range(0, size, recipe.request), range(recipe.files))))
            list(pool.map(os.fdatasync, fds))
        return time.perf_counter() - began
    finally:
        for fd in fds:
            os.close(fd)
        view.release()
        shutil.rmtree(where)


def scan(memory: mmap.mmap, nbytes: int, where: str) -> dict[Recipe, float]:
    """Try every recipe once; those the file system refuses are left out."""
    seconds = {}
    for recipe in RECIPES:
        os.sync()  # what others left unwritten must not be charged to this one
        try:
            seconds[recipe] = write(memory, nbytes, where, recipe)
        except OSError as exc:
            print(f"    raw: {recipe}: {exc}")
    return seconds
