"""Read a slice of one stored tensor into a tensor of its own."""

from __future__ import annotations

import math

import numpy as np
import torch

from shardkeep.format.columns import Boxes, matrix_of
from shardkeep.format.dtypes import to_torch
from shardkeep.format.picks import Pick
from shardkeep.options import Options
from shardkeep.run.fetch import fetch
from shardkeep.run.read import Source, check_stored

_APART_NBYTES = 64 << 10
"""Rows picked with a step are read one by one from this size on; smaller ones with what lies between them."""


def read_picks(source: Source, row: int, picks: tuple[Pick, ...], options: Options) -> torch.Tensor:
    """Return what the picks select, as a new dense tensor."""
    dtype = source.index.dtype(row)
    if math.prod(pick.extent for pick in picks) * dtype.itemsize > options.host_budget_bytes:
        check_stored(source, row)
    out = torch.empty([pick.count for pick in picks], dtype=to_torch(dtype))
    if out.numel():
        row_nbytes = math.prod(pick.extent for pick in picks[1:]) * dtype.itemsize
        apart = bool(picks) and picks[0].step > 1 and row_nbytes >= _APART_NBYTES
        _fill(source, row, [_at(picks, i) for i in range(picks[0].count)] if apart else [picks], out, options)
    return out[tuple(0 if pick.drop else slice(None) for pick in picks)]


def _at(picks: tuple[Pick, ...], i: int) -> tuple[Pick, ...]:
    first = picks[0]
    return (Pick(first.start + i * first.step, 1, 1, drop=False), *picks[1:])


def _fill(source: Source, row: int, parts: list[tuple[Pick, ...]], out: torch.Tensor, options: Options) -> None:
    """Fill `out`, whose first axis is divided over the parts."""
    stepped = any(pick.step > 1 and pick.count > 1 for pick in parts[0])
    targets = [out[i : i + 1] for i in range(len(out))] if len(parts) > 1 else [out]
    # With a step inside the box, the whole box is read and thinned out afterwards.
    into = [torch.empty([p.extent for p in part], dtype=out.dtype) for part in parts] if stepped else targets
    axes = out.dim()
    boxes = Boxes(
        matrix_of([tuple(p.start for p in part) for part in parts], axes, 0),
        matrix_of([tuple(p.extent for p in part) for part in parts], axes, 1),
    )
    fetch(
        source,
        np.full(len(parts), row, np.int64),
        boxes,
        into,
        threads=options.io_threads,
        budget_nbytes=options.host_budget_bytes,
    )
    if stepped:
        for target, dense in zip(targets, into, strict=True):
            target.copy_(dense[tuple(slice(None, None, p.step) for p in parts[0])])
