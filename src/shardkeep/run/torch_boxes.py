"""Boxes that are wanted of a checkpoint of torch's layout, and the chunks that they are read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.region import intersect, relative, slices
from shardkeep.run.torch_fetch import Wanted, fill

if TYPE_CHECKING:
    from shardkeep.run.torch_open import TorchSource


def fill_boxes(
    source: TorchSource,
    tensor: IntArray,
    boxes: Boxes,
    into: Sequence[torch.Tensor],
    *,
    threads: int,
    budget_nbytes: int,
) -> int:
    """Fill tensors with boxes of stored ones, and return the bytes read."""
    index = source.index
    source.check(np.unique(tensor))
    wanted = []
    for want, row in enumerate(tensor.tolist()):
        rows, ndim = index.chunk_rows(row), int(index.tensors.ndim[row])
        box, key = boxes.box(want, ndim), index.keys.raw(row).decode()
        stored = index.chunks.take(rows).boxes
        for number, place in enumerate(source.places_of(rows)):
            chunk = stored.box(number, ndim)
            if common := intersect(chunk, box):
                target = into[want][slices(relative(common, box))]
                inside = relative(common, chunk)
                wanted.append(Wanted(place, key, chunk.sizes, index.dtype(row), inside, target))
    return fill(source.files, wanted, threads=threads, budget_nbytes=budget_nbytes)[0]
