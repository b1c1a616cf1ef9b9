"""Boxes of an opened checkpoint, as they are wanted and shared by `load`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.dtypes import to_torch
from shardkeep.run.read import Source
from shardkeep.run.sharing_offers import Cut, Want, apart, is_plain
from shardkeep.run.torch_open import TorchSource


def wants_of(source: Source, tensor: IntArray, boxes: Boxes, into: Sequence[torch.Tensor]) -> list[Want]:
    """Describe what `fetch` would be asked for. All ranks have opened one and the same checkpoint."""
    index = source.index
    owner = np.asarray(index.tensors.alias, np.int64)[tensor]
    alone = apart(into)
    wants = []
    for want, (row, target) in enumerate(zip(owner.tolist(), into, strict=True)):
        ndim = int(index.tensors.ndim[row])
        box = boxes.box(want, ndim)
        file, start = _place(source, row, box.offsets) if target.numel() else ("", 0)
        can_share = alone[want] and is_plain(target, to_torch(index.dtype(row)))
        wants.append(Want(repr((row, box.offsets, box.sizes)).encode(), target, file, start, can_share))
    return wants


def only(
    tensor: IntArray, boxes: Boxes, into: Sequence[torch.Tensor], shared: set[int], cuts: Sequence[Cut]
) -> tuple[IntArray, Boxes, list[torch.Tensor]]:
    """Return what is to be fetched by a rank that reads of shared wants only some parts."""
    whole = [want for want in range(len(into)) if want not in shared]
    rows = np.array([*whole, *(cut.want for cut in cuts)], np.int64)
    offsets, sizes = boxes.offsets[rows], boxes.sizes[rows]  # copies, as rows are listed
    pieces = [into[want] for want in whole]
    for row, cut in enumerate(cuts, start=len(whole)):
        target = into[cut.want]
        if target.dim():
            offsets[row, cut.axis] += cut.begin
            sizes[row, cut.axis] = cut.end - cut.begin
            target = target.narrow(cut.axis, cut.begin, cut.end - cut.begin)
        pieces.append(target)
    return tensor[rows], Boxes(offsets, sizes), pieces


def _place(source: Source, row: int, offsets: tuple[int, ...]) -> tuple[str, int]:
    """Return the file, and about where in it, that a box of a tensor begins in."""
    index = source.index
    rows = index.chunk_rows(row)
    at = rows.start
    if rows.stop - rows.start > 1 and offsets:
        chunks = index.chunks.take(rows)
        low = np.asarray(chunks.offsets, np.int64)[:, : len(offsets)]
        high = low + np.asarray(chunks.sizes, np.int64)[:, : len(offsets)]
        at += int(np.argmax(np.all((low <= offsets) & (high > offsets), axis=1)))
    if isinstance(source, TorchSource):
        [place] = source.places_of(slice(at, at + 1))
        return place.file, place.offset
    return str(int(index.chunks.file[at])), int(index.chunks.start[at])
