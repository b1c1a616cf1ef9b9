"""
Which tensors of two checkpoints are equal by the digests of the blocks they lie in, without reading them. No torch.

Blocks belong to files, not to tensors, so a block may hold parts of neighbours. Where two tensors have the same boxes at
the same distance from the beginning of a block, and all blocks they touch have equal digests, they are equal; where not,
nothing is known, and they must be read.
"""

from __future__ import annotations

import numpy as np

from shardkeep.cli.contents import Item
from shardkeep.errors import StorageError
from shardkeep.format.checksum import DIGEST_NBYTES
from shardkeep.format.columns import ITEMSIZES, segment_starts
from shardkeep.format.index import Index
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import FileEntry
from shardkeep.opening import Checkpoint
from shardkeep.run.read import open_checked


class Digests:
    """The digests of one checkpoint's files, each read once, with its size and header checked, and where chunks lie."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._store = checkpoint.source.store
        self._of_file: dict[int, bytes] = {}
        index = checkpoint.index
        ends = np.asarray(index.chunk_ends, np.int64)
        itemsizes = np.repeat(ITEMSIZES[index.tensors.dtype], ends - segment_starts(ends))
        self._places = np.stack(
            [
                index.chunks.boxes.volumes() * itemsizes,
                np.asarray(index.chunks.file, np.int64),
                np.asarray(index.chunks.start, np.int64),
            ],
            axis=1,
        )

    def places(self, item: Item) -> list[list[int]]:
        """Return bytes, file and start of each chunk of a tensor."""
        places: list[list[int]] = self._places[self.checkpoint.index.chunk_rows(item.row)].tolist()
        return places

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


class Equality:
    """Which tensors of two checkpoints are known to be equal."""

    def __init__(self, one: Checkpoint, other: Checkpoint) -> None:
        self._sides: tuple[Digests, Digests] | None = None
        if one.record.format == other.record.format == NATIVE:
            self._sides = Digests(one), Digests(other)
            self._same_boxes = _same_boxes(one.index, other.index)

    def known(self, item: Item, its_item: Item) -> bool:
        """Say whether two tensors of one shape and dtype are known to be equal; False where nothing is known."""
        if self._sides is None:
            return False
        one, other = self._sides
        a, b = one.checkpoint.index, other.checkpoint.index
        if not (self._same_boxes and item.row == its_item.row):
            mine, its = a.chunk_rows(item.row), b.chunk_rows(its_item.row)
            axes = len(item.shape)
            if not (
                np.array_equal(a.chunks.offsets[mine, :axes], b.chunks.offsets[its, :axes])
                and np.array_equal(a.chunks.sizes[mine, :axes], b.chunks.sizes[its, :axes])
            ):
                return False
        try:
            places = zip(one.places(item), other.places(its_item), strict=True)
            return all(_equal(one, other, *place, *its_place[1:]) for place, its_place in places)
        except StorageError:
            return False  # whoever reads the values says what is wrong


def _same_boxes(a: Index, b: Index) -> bool:
    """Say whether all tensors of two checkpoints are cut in the same way, as saves of one run are."""
    columns = ((a.chunk_ends, b.chunk_ends), (a.tensors.alias, b.tensors.alias))
    boxes = ((a.chunks.offsets, b.chunks.offsets), (a.chunks.sizes, b.chunks.sizes))
    return all(np.array_equal(mine, its) for mine, its in (*columns, *boxes))


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
