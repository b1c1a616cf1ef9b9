"""Boxes of an opened checkpoint, as they are wanted and shared by `load`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.dtypes import to_torch
from shardkeep.run.read import Source
from shardkeep.run.sharing_offers import Cut, Want, apart, is_plain


class Destinations(NamedTuple):
    """Tensors that are to be filled, and with what: rows of the index, and boxes."""

    tensor: IntArray
    boxes: Boxes
    into: list[torch.Tensor]


def wants_of(source: Source, to: Destinations) -> list[Want]:
    """Describe what is to be filled from a checkpoint; all ranks have opened one and the same."""
    index = source.index
    owner = np.asarray(index.tensors.alias, np.int64)[to.tensor]
    alone = apart(to.into)
    wants = []
    for want, (row, target) in enumerate(zip(owner.tolist(), to.into, strict=True)):
        box = to.boxes.box(want, int(index.tensors.ndim[row]))
        file, start = _place(source, row, box.offsets) if target.numel() else ("", 0)
        can_share = alone[want] and is_plain(target, to_torch(index.dtype(row)))
        wants.append(Want(repr((row, box.offsets, box.sizes)).encode(), target, file, start, can_share))
    return wants


def only(to: Destinations, shared: set[int], cuts: Sequence[Cut]) -> Destinations:
    """Return what is left to be filled by a rank that reads of shared wants only some parts."""
    whole = [want for want in range(len(to.into)) if want not in shared]
    rows = np.array([*whole, *(cut.want for cut in cuts)], np.int64)
    offsets, sizes = to.boxes.offsets[rows], to.boxes.sizes[rows]  # copies, as the rows are a list
    into = [to.into[want] for want in whole]
    for row, cut in enumerate(cuts, start=len(whole)):
        target = to.into[cut.want]
        if target.dim():
            offsets[row, cut.axis] += cut.begin
            sizes[row, cut.axis] = cut.end - cut.begin
            target = target.narrow(cut.axis, cut.begin, cut.end - cut.begin)
        into.append(target)
    return Destinations(to.tensor[rows], Boxes(offsets, sizes), into)


def _place(source: Source, row: int, offsets: tuple[int, ...]) -> tuple[str, int]:
    """Return the file, and about where in it, that a box of a tensor begins in."""
    index = source.index
    rows = index.chunk_rows(row)
    at = rows.start
    if rows.stop == rows.start:  # reading says what is wrong
        return "", 0
    if rows.stop - rows.start > 1 and offsets:
        chunks = index.chunks.take(rows)
        low = np.asarray(chunks.offsets, np.int64)[:, : len(offsets)]
        high = low + np.asarray(chunks.sizes, np.int64)[:, : len(offsets)]
        at += int(np.argmax(np.all((low <= offsets) & (high > offsets), axis=1)))
    return source.place_of(at)
