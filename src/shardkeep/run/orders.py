"""
What rank 0 tells each rank to write, and how a rank turns that into files: headers, and the memory behind each chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardkeep.format.columns import Boxes, IntArray
from shardkeep.format.dtypes import by_code
from shardkeep.format.header import HeaderEntry, block_nbytes_for, build_header
from shardkeep.format.record import Recorded
from shardkeep.format.region import Box, relative, slices
from shardkeep.layout import native
from shardkeep.plan.draft import ints
from shardkeep.plan.saves import SavePlan
from shardkeep.run.write import FileJob
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.state.describe import Description

if TYPE_CHECKING:
    import torch


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells a rank to write."""

    save_id: str
    files: list[tuple[str, int, int]]
    """Name, bytes of data and bytes of a block of each file."""
    file: bytes
    """For each chunk: its file's position in `files`, where it starts, the rank's row it comes from, and its box."""
    start: bytes
    row: bytes
    axes: int
    offsets: bytes
    sizes: bytes
    chain: list[int | None]
    """Which chain of codecs each file goes through."""
    chains: list[Recorded]
    apart: bool
    """The store takes bytes only in order: digests of files that go through no chain are kept beside them."""


def file_names(plan: SavePlan, save_id: str, world_size: int) -> list[str]:
    """Name every data file of a save."""
    return [
        native.data_name(file.group, file.rank, world_size, save_id, part=file.part, coded=file.chain is not None)
        for file in plan.files
    ]


def cut_orders(
    plan: SavePlan, save_id: str, world_size: int, *, chains: Sequence[Recorded] = (), apart: bool = False
) -> list[Orders]:
    """Cut the plan, which is sorted by file and so by rank, into each rank's part."""
    names = file_names(plan, save_id, world_size)
    ranks = np.array([file.rank for file in plan.files], np.int64)
    first_file = np.searchsorted(ranks, np.arange(world_size + 1))
    first_piece = np.searchsorted(plan.pieces.file, first_file)
    blocks = _block_sizes(plan)
    orders = []
    for rank in range(world_size):
        low, high = int(first_file[rank]), int(first_file[rank + 1])
        pieces = plan.pieces.take(slice(int(first_piece[rank]), int(first_piece[rank + 1])))
        orders.append(
            Orders(
                save_id=save_id,
                files=[(names[i], plan.files[i].data_nbytes, blocks[i]) for i in range(low, high)],
                file=(pieces.file - low).tobytes(),
                start=pieces.start.tobytes(),
                row=pieces.row.tobytes(),
                axes=pieces.boxes.axes,
                offsets=pieces.offsets.tobytes(),
                sizes=pieces.sizes.tobytes(),
                chain=[file.chain for file in plan.files[low:high]],
                chains=list(chains),
                apart=apart,
            )
        )
    return orders


def _block_sizes(plan: SavePlan) -> list[int]:
    """Choose each file's block size by all the data it is a part of: many small blocks keep many threads waiting."""
    together: dict[tuple[int, str], int] = {}
    for file in plan.files:
        together[file.rank, file.group] = together.get((file.rank, file.group), 0) + file.data_nbytes
    return [block_nbytes_for(together[file.rank, file.group]) for file in plan.files]


def make_jobs(description: Description, orders: Orders) -> list[FileJob]:
    """Find the memory behind every chunk this rank is to write, and build its files' headers."""
    file, start, row = ints(orders.file), ints(orders.start), ints(orders.row)
    offsets = ints(orders.offsets).reshape(len(row), orders.axes)
    sizes = ints(orders.sizes).reshape(len(row), orders.axes)
    jobs = []
    for at, (name, data_nbytes, block) in enumerate(orders.files):
        mine = np.flatnonzero(file == at)
        chunks = _Chunks(description, row[mine], Boxes(offsets[mine], sizes[mine]), start[mine])
        apart = orders.apart and orders.chain[at] is None
        header = build_header(
            chunks.entries(), save_id=orders.save_id, data_nbytes=data_nbytes, block_nbytes=block, apart=apart
        )
        tensors = chunks.tensors()
        addresses = [host_address(tensor) for tensor in tensors]
        others = {i: scattered(tensors[i], tensors[i].dtype) for i, address in enumerate(addresses) if not address}
        begins = np.array(addresses, np.int64)
        jobs.append(FileJob(name, header, data_nbytes, block, start[mine], begins, others, apart=apart))
    return jobs


class _Chunks:
    """The chunks of one file: what the header says of them, and the tensors that hold exactly their boxes."""

    def __init__(self, description: Description, row: IntArray, boxes: Boxes, start: IntArray) -> None:
        d = description
        self.rows = row.tolist()
        self.pieces = d.pieces
        self.tensor = d.row_tensor[row]
        self.boxes = boxes
        self.start = start
        self.keys = d.keys
        self.ndim = d.ndim[self.tensor].tolist()
        self.dtype = [by_code(code) for code in d.dtype[self.tensor].tolist()]
        axes = d.boxes.axes
        self.held = d.boxes.take(row)
        narrow = Boxes(boxes.offsets[:, :axes], boxes.sizes[:, :axes])  # what is cut off is other ranks' padding
        self.offsets, self.sizes = narrow.offsets.tolist(), narrow.sizes.tolist()
        self.whole = np.all(narrow.sizes == d.shape[self.tensor], axis=1).tolist()
        self.as_held = np.all(narrow.sizes == self.held.sizes, axis=1).tolist()

    def entries(self) -> Iterator[HeaderEntry]:
        """Say what the header says."""
        columns = zip(self.tensor.tolist(), self.ndim, self.dtype, self.offsets, self.sizes, self.whole, strict=True)
        for start, (tensor, ndim, dtype, offsets, sizes, whole) in zip(self.start.tolist(), columns, strict=True):
            shape = tuple(sizes[:ndim])
            name = native.chunk_name(self.keys[tensor], None if whole else Box(tuple(offsets[:ndim]), shape))
            kind, stored = dtype.in_safetensors(shape)
            yield HeaderEntry(name, kind, stored, start, start + math.prod(shape) * dtype.itemsize)

    def tensors(self) -> list[torch.Tensor]:
        """Return the memory of each chunk: a piece of the state, or a slice of one where replicas share the work."""
        found = [self.pieces[row] for row in self.rows]
        for at, as_held in enumerate(self.as_held):
            if not as_held:
                ndim = self.ndim[at]
                found[at] = found[at][slices(relative(self.boxes.box(at, ndim), self.held.box(at, ndim)))]
        return found
