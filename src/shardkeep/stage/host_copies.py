"""
Copies of tensors that lie in host memory, into one arena, as far as there is room for them.

What finds no room is left where it is. That should be what an optimizer guards, whose step can wait; and rather few
large tensors than many small ones.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from shardkeep.stage.aliases import memory_keys
from shardkeep.stage.buffers import Arenas, Buffer
from shardkeep.stage.guards import unguarded
from shardkeep.stage.memory import copy_memory
from shardkeep.stage.tensors import scattered
from shardkeep.store.aligned import address_of

log = logging.getLogger("shardkeep")

ALIGNMENT = 64
"""Where a copy begins in its arena."""
_SMALL_NBYTES = 64 << 10
"""Up to here a copy keeps the interpreter's lock: who lets go of it for each of a thousand may wait as often for it."""
_PART_NBYTES = 16 << 20
"""Larger copies are shared out between threads in parts of this size."""

_signature = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_small = _signature(ctypes.cast(copy_memory, ctypes.c_void_p).value or 0)

Place = tuple[int, int, torch.dtype, torch.Size]
"""A row, where in the arena it begins, and what it is."""


class Copied(NamedTuple):
    """What was copied, and what was not."""

    arena: Buffer | None
    places: list[Place]
    nbytes: int
    """What they take."""
    left: list[int]
    """Rows that found no room."""
    guarded: bool
    """Whether the steps of optimizers keep all of these from changing."""
    refused: bool = False
    """There was no memory, where there should have been some."""


class _Layout(NamedTuple):
    """Where tensors go in an arena; those that are one and the same go to one place."""

    starts: list[int]
    copies: list[tuple[int, int, torch.Tensor]]
    """Where to, how much, and what."""
    nbytes: int


class OnHost(NamedTuple):
    """Rows of a state that lie in host memory."""

    rows: list[int]
    arenas: Arenas
    threads: int
    optimizers: Sequence[Optimizer]
    """Those whose steps may wait for what is not copied."""

    def copy(self, tensors: Sequence[torch.Tensor], most_nbytes: int) -> Copied:
        """Copy what fits."""
        rows = self.rows
        sources = [tensors[row] for row in rows]
        keys = memory_keys(sources)
        layout = _lay_out(sources, keys)
        loose: set[int] = set()
        if layout.nbytes > most_nbytes:
            loose = set(unguarded(tensors, rows, self.optimizers))
            fits = _fitting(sources, keys, [row in loose for row in rows], most_nbytes)
            rows = [rows[at] for at in fits]
            sources = [sources[at] for at in fits]
            layout = _lay_out(sources, [keys[at] for at in fits])
        arena = self._arena(layout.nbytes, most_nbytes) if rows else None
        if arena is None:
            loose = loose or set(unguarded(tensors, self.rows, self.optimizers))
            return Copied(None, [], 0, self.rows, guarded=not loose, refused=bool(rows))
        try:
            _copy_all(layout.copies, arena, self.threads)
            # Now: until somebody asks for tensors, the caller may have given its own another shape.
            dtypes, shapes = [source.dtype for source in sources], [source.shape for source in sources]
            places = list(zip(rows, layout.starts, dtypes, shapes, strict=True))
            left = sorted(set(self.rows).difference(rows)) if len(rows) < len(self.rows) else []
            return Copied(arena, places, layout.nbytes, left, guarded=loose.isdisjoint(left))
        except BaseException:
            self.arenas.give(arena)
            raise

    def _arena(self, nbytes: int, most_nbytes: int) -> Buffer | None:
        """Take an arena; None where there is no memory for it."""
        try:
            return self.arenas.take(nbytes, most_nbytes)
        except (OSError, MemoryError) as error:
            log.warning("no memory for a copy of %.2f GB of the state: %s", nbytes / 1e9, error)
            return None


def _lay_out(sources: Sequence[torch.Tensor], keys: Sequence[Hashable]) -> _Layout:
    places: dict[Hashable, int] = {}
    starts: list[int] = []
    copies: list[tuple[int, int, torch.Tensor]] = []
    end = 0
    for source, key in zip(sources, keys, strict=True):
        start = places.setdefault(key, end)
        starts.append(start)
        if start == end:
            nbytes = source.nbytes
            copies.append((start, nbytes, source))
            end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT  # not by a call: there may be many thousands
    return _Layout(starts, copies, end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _fitting(
    sources: Sequence[torch.Tensor], keys: Sequence[Hashable], loose: Sequence[bool], most_nbytes: int
) -> list[int]:
    """Return which tensors fit: first what nothing guards, and of that what is small."""
    sizes = [source.nbytes for source in sources]
    taken: set[Hashable] = set()
    fits: list[int] = []
    free = most_nbytes
    for at in sorted(range(len(sources)), key=lambda at: (not loose[at], sizes[at])):
        nbytes = 0 if keys[at] in taken else _aligned(sizes[at])
        if nbytes <= free:
            free -= nbytes
            taken.add(keys[at])
            fits.append(at)
    return sorted(fits)


def _copy_all(copies: list[tuple[int, int, torch.Tensor]], arena: Buffer, threads: int) -> None:
    base = address_of(arena.view)
    large: list[tuple[int, int, int]] = []
    for start, nbytes, source in copies:
        if not source.is_contiguous():
            scattered(source, source.dtype).read(0, nbytes, arena.view[start : start + nbytes])
        elif nbytes <= _SMALL_NBYTES:
            _copy_small(base + start, source.data_ptr(), nbytes)
        elif nbytes < _PART_NBYTES:
            copy_memory(base + start, source.data_ptr(), nbytes)
        else:
            address, target = source.data_ptr(), base + start
            large += [
                (target + at, address + at, min(_PART_NBYTES, nbytes - at)) for at in range(0, nbytes, _PART_NBYTES)
            ]
    if large:
        with ThreadPoolExecutor(threads, thread_name_prefix="shardkeep-stage") as pool:
            for _ in pool.map(lambda copy: copy_memory(*copy), large):
                pass
