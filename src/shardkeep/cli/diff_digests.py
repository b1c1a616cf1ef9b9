"""
Which tensors of two checkpoints are equal by the digests of the blocks they lie in, without reading them. No torch.

Blocks belong to files, not to tensors, so a block may hold parts of neighbours. Where two tensors have the same boxes at
the same distance from the beginning of a block, and all blocks they touch have equal digests, they are equal; where not,
nothing is known, and they must be read.
"""

from __future__ import annotations

import numpy as np

from shardkeep.cli.contents import Item, source_of
from shardkeep.errors import StorageError
from shardkeep.format.checksum import DIGEST_NBYTES
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import FileEntry
from shardkeep.opening import Checkpoint
from shardkeep.run.read import open_checked


class Digests:
    """The digests of one checkpoint's files, each read once, with its size and header checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._store = source_of(checkpoint).store
        self._of_file: dict[int, bytes] = {}

    def of_file(self, number: int) -> bytes:
        """Return the digests of all blocks of a file, end to end; empty where it has none."""
        if number not in self._of_file:
            reader, digests = open_checked(self._store, self.entry(number))
            reader.close()
            self._of_file[number] = digests
        return self._of_file[number]

    def entry(self, number: int) -> FileEntry:
        """Return what the commit record says of a file."""
        return self.checkpoint.record.files[number]


def equal_by_digests(one: Digests, item: Item, other: Digests, its_item: Item) -> bool:
    """Say whether two tensors of one shape and dtype are known to be equal; False where nothing is known."""
    a, b = one.checkpoint.index, other.checkpoint.index
    if one.checkpoint.record.format != NATIVE or other.checkpoint.record.format != NATIVE:
        return False
    rows, its_rows = a.chunk_rows(item.row), b.chunk_rows(its_item.row)
    axes = len(item.shape)
    if not (
        np.array_equal(a.chunks.offsets[rows, :axes], b.chunks.offsets[its_rows, :axes])
        and np.array_equal(a.chunks.sizes[rows, :axes], b.chunks.sizes[its_rows, :axes])
    ):
        return False
    itemsize = a.dtype(item.row).itemsize
    nbytes = (np.asarray(a.chunks.sizes[rows, :axes], np.int64).prod(axis=1) * itemsize).tolist()
    places = zip(
        nbytes,
        a.chunks.file[rows].tolist(),
        a.chunks.start[rows].tolist(),
        b.chunks.file[its_rows].tolist(),
        b.chunks.start[its_rows].tolist(),
        strict=True,
    )
    try:
        return all(_equal(one, other, *place) for place in places)
    except StorageError:
        return False  # whoever reads the values says what is wrong


def _equal(one: Digests, other: Digests, nbytes: int, file: int, start: int, its_file: int, its_start: int) -> bool:
    if not nbytes:
        return True
    block = one.entry(file).block_nbytes
    if not block or block != other.entry(its_file).block_nbytes or (start - its_start) % block:
        return False
    mine = _blocks(one.of_file(file), start, nbytes, block)
    return bool(mine) and mine == _blocks(other.of_file(its_file), its_start, nbytes, block)


def _blocks(digests: bytes, start: int, nbytes: int, block: int) -> bytes:
    first, last = start // block, (start + nbytes - 1) // block
    return digests[first * DIGEST_NBYTES : (last + 1) * DIGEST_NBYTES]
