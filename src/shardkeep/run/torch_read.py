"""
Boxes of stored tensors of torch's layout, read straight into tensors, or copied box by box where they do not lie in one
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardkeep.format.dtypes import DType, of_torch, to_torch
from shardkeep.format.region import Box, Ints, contiguous_run
from shardkeep.plan.loads import Scatter
from shardkeep.run.item_files import Files, Item, Run, read_runs
from shardkeep.stage.tensors import host_address, scattered


class ChunkRead(NamedTuple):
    """A box of a stored tensor, and the tensor to fill with it."""

    item: Item
    start: int
    """Where the chunk's bytes begin in the file."""
    shape: Ints
    """Of the chunk, as its elements lie in the file."""
    dtype: DType
    source: Box
    """What is wanted of it."""
    target: torch.Tensor
    """Of the size of that box, its axes in the order of the chunk's."""


def read_chunks(files: Files, chunks: Sequence[ChunkRead], *, threads: int, budget_nbytes: int) -> int:
    """Fill tensors, and return the bytes read."""
    runs: list[Run] = []
    scatters: list[Scatter] = []
    for want, chunk in enumerate(chunks):
        if chunk.target.numel():
            _plan_chunk(want, chunk, runs, scatters)
    others = {s.want: scattered(chunks[s.want].target, to_torch(chunks[s.want].dtype)) for s in scatters}
    items = [chunk.item for chunk in chunks]
    return read_runs(files, runs, scatters, others, items, threads=threads, budget_nbytes=budget_nbytes)


def in_order(chunk: ChunkRead, order: Ints) -> ChunkRead:
    """See a chunk and its target with their axes in the order in which the chunk's elements lie."""
    source = Box(tuple(chunk.source.offsets[a] for a in order), tuple(chunk.source.sizes[a] for a in order))
    shape = tuple(chunk.shape[a] for a in order)
    return chunk._replace(shape=shape, source=source, target=chunk.target.permute(order))


def _plan_chunk(want: int, chunk: ChunkRead, runs: list[Run], scatters: list[Scatter]) -> None:
    target, size = chunk.target, chunk.dtype.itemsize
    address = host_address(target) if of_torch(target.dtype) is chunk.dtype else 0
    run = contiguous_run(chunk.shape, chunk.source) if address else None
    if run:
        runs.append((chunk.item.file, chunk.start + run[0] * size, chunk.source.volume * size, address))
        return
    into = Box((0,) * len(chunk.source.sizes), chunk.source.sizes)
    scatters.append(Scatter(chunk.item.file, chunk.start, chunk.shape, size, chunk.source, want, into))
