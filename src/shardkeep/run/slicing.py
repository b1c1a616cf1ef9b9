"""Read stored tensors, or a slice of one, into tensors of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from shardkeep.format.columns import Boxes, IntArray, matrix_of
from shardkeep.format.dtypes import to_torch
from shardkeep.format.picks import Pick
from shardkeep.format.region import Ints
from shardkeep.options import Options
from shardkeep.run.read import Source

Picks = tuple[Pick, ...]

_APART_NBYTES = 64 << 10
"""Gaps of this size are not read: what is picked with such a step is read one by one."""
_BAND_NBYTES = 64 << 20
_MOST_PARTS = 4096


def read_whole(source: Source, tensors: IntArray, options: Options) -> list[torch.Tensor]:
    """Return these tensors, none of them tied to another, as new ones."""
    index = source.index
    source.check(tensors)
    into = [torch.empty(index.shape(row), dtype=to_torch(index.dtype(row)), device="cpu") for row in tensors.tolist()]
    sizes = np.asarray(index.tensors.shape[tensors], np.int64)
    boxes = Boxes(np.zeros_like(sizes), sizes)
    source.fill(tensors, boxes, into, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
    return into


def read_picks(source: Source, row: int, picks: Picks, options: Options) -> torch.Tensor:
    """Return what the picks select, as a new dense tensor."""
    dtype = source.index.dtype(row)
    budget = options.host_budget_bytes
    if math.prod(pick.count for pick in picks) * dtype.itemsize > budget:
        source.check(np.array([source.index.tensors.alias[row]], np.int64))
    out = torch.empty([pick.count for pick in picks], dtype=to_torch(dtype), device="cpu")
    if out.numel():
        # What is read with gaps in it is held until it has been thinned out.
        band = min(_BAND_NBYTES, budget // 4)
        shape = source.index.shape(row)
        strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
        for parts in _batches(_parts(picks, strides, dtype.itemsize, band), dtype.itemsize, band):
            _fill(source, row, picks, parts, out, threads=options.io_threads, budget_nbytes=budget - band)
    return out[tuple(0 if pick.drop else slice(None) for pick in picks)]


def _has_gaps(picks: Picks) -> bool:
    return any(pick.step > 1 and pick.count > 1 for pick in picks)


def _parts(picks: Picks, strides: Ints, itemsize: int, band_nbytes: int) -> Iterator[Picks]:
    """Cut picks into ones that have no gaps or, gaps included, are at most a band; large gaps lie between them."""
    if not _has_gaps(picks):
        yield picks
        return
    axis = next(axis for axis, pick in enumerate(picks) if pick.count > 1)
    pick = picks[axis]
    row_nbytes = math.prod(p.extent for p in picks[axis + 1 :]) * itemsize
    apart = (pick.step - 1) * strides[axis] >= _APART_NBYTES or row_nbytes > band_nbytes
    many = 1 if apart else (band_nbytes // row_nbytes - 1) // pick.step + 1
    for i in range(0, pick.count, many):
        some = Pick(pick.start + i * pick.step, pick.step, min(many, pick.count - i), drop=False)
        part = (*picks[:axis], some, *picks[axis + 1 :])
        if some.count == 1:
            yield from _parts(part, strides, itemsize, band_nbytes)
        else:
            yield part


def _batches(parts: Iterator[Picks], itemsize: int, band_nbytes: int) -> Iterator[list[Picks]]:
    """Group parts to be read together: those with gaps are at most a band in all."""
    batch: list[Picks] = []
    held = 0
    for part in parts:
        nbytes = math.prod(pick.extent for pick in part) * itemsize if _has_gaps(part) else 0
        if batch and (held + nbytes > band_nbytes or len(batch) == _MOST_PARTS):
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += nbytes
    yield batch


def _places(part: Picks, picks: Picks) -> tuple[slice, ...]:
    """Return where in the result of all picks a part of them goes."""
    first = [(p.start - pick.start) // pick.step for p, pick in zip(part, picks, strict=True)]
    return tuple(slice(i, i + p.count) for i, p in zip(first, part, strict=True))


def _fill(
    source: Source, row: int, picks: Picks, parts: list[Picks], out: torch.Tensor, *, threads: int, budget_nbytes: int
) -> None:
    """Fill those places of `out`, which is for all picks, that the parts stand for."""
    targets = [out[_places(part, picks)] for part in parts]
    # With a gap inside a part, the whole of it is read and thinned out afterwards.
    into = [
        torch.empty([p.extent for p in part], dtype=out.dtype, device="cpu") if _has_gaps(part) else target
        for part, target in zip(parts, targets, strict=True)
    ]
    boxes = Boxes(
        matrix_of([tuple(p.start for p in part) for part in parts], out.dim(), 0),
        matrix_of([tuple(p.extent for p in part) for part in parts], out.dim(), 1),
    )
    rows = np.full(len(parts), row, np.int64)
    source.fill(rows, boxes, into, threads=threads, budget_nbytes=budget_nbytes)
    for part, target, dense in zip(parts, targets, into, strict=True):
        if dense is not target:
            target.copy_(dense[tuple(slice(None, None, p.step) for p in part)])
