"""
Boxes of stored tensors, read into tensors: in ranges, on several threads, several to a file.

What lies in one run both in the file and in host memory is read straight into place; small neighbours are read
together. Everything else (strided, on an accelerator, of another dtype) goes through one window a thread. Of a box,
only its own bytes are read, and gaps between them that are shorter than a disk would skip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardkeep.format.dtypes import DType, Ints, of_torch, to_torch
from shardkeep.format.region import Box, contiguous_run, flat_range_to_boxes, intersect, relative
from shardkeep.run.workers import run_workers, window_for
from shardkeep.stage.memory import Scattered, copy_memory, view_memory
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.storages.safetensors_files import OpenFiles
from shardkeep.store.aligned import address_of

_GAP_NBYTES = 64 << 10
"""Bytes between two wanted ones that are cheaper to read than to skip."""
_SMALL_NBYTES = 256 << 10
"""Runs shorter than this are read together with their neighbours."""


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a chunk, and the tensor that it fills."""

    path: str
    start: int
    """Where the chunk begins in its file."""
    dtype: DType
    shape: Ints
    """Of the chunk."""
    box: Box
    """Of the chunk's elements."""
    into: torch.Tensor
    """Of the box's shape; any device, stride and dtype."""


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    nbytes: int
    address: int


@dataclass(frozen=True, slots=True)
class _Task:
    path: str
    start: int
    nbytes: int
    address: int
    """Where the bytes go; 0: into a buffer, for `place`."""
    place: Callable[[memoryview], None] | None = None


def read_boxes(wants: Sequence[Want], files: OpenFiles, *, threads: int, budget_nbytes: int) -> None:
    """Fill the tensors of all wants; memory beyond them is within the budget."""
    threads, window = window_for(threads, budget_nbytes)
    tasks = plan_tasks(wants, window)
    if not tasks:
        return

    def work(task: _Task, buffer: memoryview) -> bool:
        return not do_read(task, files, buffer)

    run_workers(tasks, work, threads=min(threads, len(tasks)), buffer_nbytes=min(window, _largest(tasks)))


def read_box(want: Want, files: OpenFiles, buffer: memoryview) -> None:
    """Fill the tensor of one want, in the calling thread, through a buffer."""
    for task in plan_tasks([want], len(buffer)):
        do_read(task, files, buffer)


def do_read(task: _Task, files: OpenFiles, buffer: memoryview) -> bool:
    """Read the bytes of a task and put them where they belong; return whether they were in memory already."""
    window = view_memory(task.address, task.nbytes) if task.address else buffer[: task.nbytes]
    with files.reader(task.path) as reader:
        cached = reader.cached(task.start, task.nbytes)
        reader.read_into(task.start, window, cached=cached)
    if task.place is not None:
        task.place(window)
    return cached


def _largest(tasks: Iterable[_Task]) -> int:
    return max((task.nbytes for task in tasks if not task.address), default=0)


def plan_tasks(wants: Iterable[Want], window_nbytes: int) -> list[_Task]:
    """Return the reads that fill all wants, each of at most a window, in the order of files and offsets."""
    runs: dict[str, list[_Run]] = {}
    tasks: list[_Task] = []
    for want in wants:
        if not want.box.volume:
            continue
        run = contiguous_run(want.shape, want.box)
        address = host_address(want.into) if of_torch(want.into.dtype) is want.dtype else 0
        if run is None or not address:
            tasks += _scatter(want, window_nbytes)
        else:
            first, count = (n * want.dtype.itemsize for n in run)
            runs.setdefault(want.path, []).append(_Run(want.start + first, count, address))
    for path, each in runs.items():
        tasks += _direct(path, each, window_nbytes)
    tasks.sort(key=lambda task: (task.path, task.start))
    return tasks


def _direct(path: str, runs: list[_Run], window_nbytes: int) -> Iterator[_Task]:
    """Read long runs in windows, into place; short ones with their neighbours, through a buffer."""
    small: list[_Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if run.nbytes > min(_SMALL_NBYTES, window_nbytes):
            for at in range(0, run.nbytes, window_nbytes):
                yield _Task(path, run.start + at, min(window_nbytes, run.nbytes - at), run.address + at)
            continue
        reach = max((each.start + each.nbytes for each in small), default=run.start)
        if small and (run.start - reach > _GAP_NBYTES or run.start + run.nbytes - small[0].start > window_nbytes):
            yield _together(path, small)
            small = []
        small.append(run)
    if small:
        yield _together(path, small)


def _together(path: str, runs: list[_Run]) -> _Task:
    if len(runs) == 1:
        return _Task(path, runs[0].start, runs[0].nbytes, runs[0].address)
    start = runs[0].start
    stop = max(run.start + run.nbytes for run in runs)

    def place(window: memoryview) -> None:
        source = address_of(window) - start
        for run in runs:
            copy_memory(run.address, source + run.start, run.nbytes)

    return _Task(path, start, stop - start, 0, place)


def _scatter(want: Want, window_nbytes: int) -> Iterator[_Task]:
    """Read the ranges that hold a box's elements, in windows of whole elements."""
    shape, box, size = want.shape, want.box, want.dtype.itemsize
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Elements from the first to the last wanted one of the box below each axis.
    extents = [
        sum((n - 1) * s for n, s in zip(box.sizes[axis:], strides[axis:], strict=True)) + 1
        for axis in range(len(shape) + 1)
    ]
    # Along these axes neighbours are far apart, or there is only one.
    split = 0
    while split < len(shape) and (box.sizes[split] == 1 or (strides[split] - extents[split + 1]) * size > _GAP_NBYTES):
        split += 1
    inner = Box(box.offsets[split:], box.sizes[split:])
    low = sum(o * s for o, s in zip(inner.offsets, strides[split:], strict=True))
    step = max(1, window_nbytes // size)
    target = scattered(want.into, to_torch(want.dtype))
    for lead in itertools.product(*(range(n) for n in box.sizes[:split])):
        base = sum((o + i) * s for o, i, s in zip(box.offsets, lead, strides, strict=False))
        for at in range(low, low + extents[split], step):
            end = min(at + step, low + extents[split])
            place = partial(_place, target, lead, shape[split:], inner, at, end, size)
            yield _Task(want.path, want.start + (base + at) * size, (end - at) * size, 0, place)


def _place(
    target: Scattered, lead: Ints, shape: Ints, inner: Box, start: int, stop: int, size: int, window: memoryview
) -> None:
    """Copy what elements `start..stop` of a tensor of this shape have of its box `inner` to where `lead` leads."""
    ones, zeros = (1,) * len(lead), (0,) * len(lead)
    at = 0
    for box in flat_range_to_boxes(shape, start, stop):
        nbytes = box.volume * size
        if common := intersect(box, inner):
            source, goal = relative(common, box), relative(common, inner)
            target.write(
                Box(lead + goal.offsets, ones + goal.sizes),
                window[at : at + nbytes],
                ones + box.sizes,
                Box(zeros + source.offsets, ones + source.sizes),
            )
        at += nbytes
