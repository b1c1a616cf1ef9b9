"""
What the bytes of a checkpoint's files must be as they lie in a store: pieces with their digests, found without any key.

A plain data file has the digests of its blocks in its header, or in a file beside it; a coded one has those of its stored
frames in its table; what is left has one digest in the commit record. So whoever copies a checkpoint knows for each
piece whether it is what was saved, and need not know what it means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shardkeep.errors import BlobNotFound, ChecksumMismatch, WrongSize
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, digest
from shardkeep.format.frames import MAGIC
from shardkeep.format.header import count_blocks, read_block_digests
from shardkeep.format.record import Blob, FileEntry, Record
from shardkeep.layout.digest_files import read_apart
from shardkeep.layout.frame_reader import read_table
from shardkeep.layout.rereading import mend
from shardkeep.store.protocol import BlobReader, Gets, Opens

_HINT = "the file was damaged after the save: use another copy, or another checkpoint"


class Reads(Opens, Gets, Protocol):
    """What proving needs of a store."""

    @property
    def url(self) -> str: ...


class Piece(NamedTuple):
    """Some bytes of a file, and what they must be."""

    start: int
    nbytes: int
    digest: bytes

    def check(self, found: bytes, where: str) -> None:
        """Raise `ChecksumMismatch` where the digest of what was found is another one."""
        if found != self.digest:
            raise ChecksumMismatch(
                f"{where}: bytes {self.start} to {self.start + self.nbytes} are not what was saved",
                hint=_HINT,
                file=where,
                offset=self.start,
            )

    def insist(self, data: memoryview, store: Reads, reader: BlobReader, name: str) -> None:
        """
        Check what was read; where it is damaged, it is read once more, and mended if it came right then.

        Raises:
            ChecksumMismatch: it is damaged still.

        """
        if digest(data) != self.digest and not mend(name, store, reader, self.start, data, self._fits).fits:
            self.check(digest(data), f"{store.url}/{name}")

    def _fits(self, data: bytearray) -> bool:
        return digest(data) == self.digest


@dataclass(frozen=True)
class Proof:
    """A file, and what all of its bytes must be."""

    name: str
    nbytes: int
    """How large it is in the store."""
    pieces: list[Piece]
    """Without gaps, in order."""

    def windows(self, nbytes: int) -> Iterator[list[Piece]]:
        """Go through the pieces, as many together as fit into so many bytes, and at least one."""
        window: list[Piece] = []
        for piece in self.pieces:
            if window and piece.start + piece.nbytes - window[0].start > nbytes:
                yield window
                window = []
            window.append(piece)
        if window:
            yield window


def open_sized(store: Reads, name: str, nbytes: int) -> BlobReader:
    """
    Open a file that must be of a size.

    Raises:
        WrongSize: it is not, or is missing.

    """
    where = f"{store.url}/{name}"
    try:
        reader = store.open(name)
    except BlobNotFound as exc:
        raise WrongSize(f"{where}: the file is missing", hint="restore it from a copy", file=name) from exc
    if reader.nbytes != nbytes:
        found = reader.nbytes
        reader.close()
        raise WrongSize(
            f"{where}: {found} bytes, the commit record says {nbytes}",
            hint="the file was cut short or changed after the save",
            file=name,
        )
    return reader


def prove(store: Reads, record: Record, name: str) -> Proof:
    """
    Find out what the bytes of one of a record's files must be; reads only what tells.

    Raises:
        DamagedCheckpoint: what tells is itself not what was saved.

    """
    nbytes = record.at_rest[name]
    for entry in (record.index, *record.files):
        if name == entry.name and entry.chain is not None:
            return Proof(name, nbytes, _frames(store, entry, nbytes))
        if name == entry.name and isinstance(entry, FileEntry):
            return Proof(name, nbytes, _blocks(store, entry))
        if name in dict(entry.at_rest):  # the index, or the digests of a data file
            return Proof(name, nbytes, [Piece(0, nbytes, _digest_in(entry.checksum))])
    raise KeyError(name)  # unreachable: `at_rest` has no others


def _frames(store: Reads, entry: Blob, nbytes: int) -> list[Piece]:
    """Prove a coded file: by the table of its frames."""
    with closing(open_sized(store, entry.name, nbytes)) as reader:
        table = read_table(reader, entry, store)
    frames = [
        Piece(int(table.stored_start[frame]), int(table.stored_nbytes[frame]), table.digest(frame))
        for frame in np.lexsort((table.stored_nbytes, table.stored_start)).tolist()
    ]
    at = len(MAGIC) + sum(frame.nbytes for frame in frames)
    return [
        Piece(0, len(MAGIC), digest(MAGIC)),
        *frames,
        Piece(at, nbytes - at, _digest_in(entry.table_checksum or "")),
    ]


def _blocks(store: Reads, entry: FileEntry) -> list[Piece]:
    """Prove a plain data file: by its header, or by the file that has its digests."""
    count = count_blocks(entry.nbytes - entry.header_nbytes, entry.block_nbytes)
    if entry.blocks is None:
        with closing(open_sized(store, entry.name, entry.nbytes)) as reader:
            header = bytearray(entry.header_nbytes)
            reader.read_into(0, memoryview(header))
            of_header = _digest_in(entry.checksum)
            Piece(0, len(header), of_header).insist(memoryview(header), store, reader, entry.name)
        digests = read_block_digests(header, blocks=count, where=entry.name)
    else:
        of_header, digests = read_apart(store, entry, count)
    pieces = [Piece(0, entry.header_nbytes, of_header)]
    for block in range(count):
        start = entry.header_nbytes + block * entry.block_nbytes
        size = min(entry.block_nbytes, entry.nbytes - start)
        pieces.append(Piece(start, size, digests[block * DIGEST_NBYTES : (block + 1) * DIGEST_NBYTES]))
    return pieces


def _digest_in(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix(f"{ALGORITHM}:"))
