"""
Coded blobs: frames in the order they were written, then a table that says which bytes each of them stands for.

    "SKFRAME1" | frames | table | footer

A frame is what codecs made of up to 1 MiB of plain bytes. The table has, for each frame, where its plain bytes begin and
how many they are, where it is stored and how long it is there, its number, and the digest of what is stored: so damage
is found before anything is decoded, and by those who have no key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import IntArray
from shardkeep.format.checksum import DIGEST_NBYTES

MAGIC = b"SKFRAME1"
FRAME_NBYTES = 1 << 20
"""Most plain bytes of a frame."""
MAX_STORED_NBYTES = 4 << 20
"""Most bytes that a frame may have become: none of our codecs adds more than a few to a frame."""
_COLUMNS = 5
_ROW_NBYTES = 8 * _COLUMNS + DIGEST_NBYTES
_FOOTER = struct.Struct("<QQ8s")
FOOTER_NBYTES = _FOOTER.size


@dataclass(frozen=True)
class FrameTable:
    """The frames of a blob, sorted by where their plain bytes begin."""

    start: IntArray
    """Where its plain bytes begin."""
    nbytes: IntArray
    stored_start: IntArray
    """Where in the blob it is stored."""
    stored_nbytes: IntArray
    number: IntArray
    """Which frame it was, in the order of writing; codecs that authenticate are told."""
    digests: bytes
    """Of what is stored of each frame, end to end."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def plain_nbytes(self) -> int:
        """How many plain bytes all frames stand for."""
        return int(self.nbytes.sum())

    def digest(self, frame: int) -> bytes:
        """Return the digest of what is stored of a frame."""
        return self.digests[frame * DIGEST_NBYTES : (frame + 1) * DIGEST_NBYTES]


def table_nbytes(frames: int) -> int:
    """Return how long the table of so many frames is, with its footer."""
    return frames * _ROW_NBYTES + FOOTER_NBYTES


def encode_table(table: FrameTable) -> bytes:
    """Write a table and the footer behind it."""
    columns = (table.start, table.nbytes, table.stored_start, table.stored_nbytes, table.number)
    parts = [np.ascontiguousarray(column, "<i8").tobytes() for column in columns]
    return b"".join([*parts, table.digests, _FOOTER.pack(len(table), table.plain_nbytes, MAGIC)])


def read_footer(footer: bytes, *, stored_nbytes: int, where: str) -> int:
    """Return how long the table with its footer is; nothing is believed that does not fit a blob of this size."""
    frames, _, magic = _FOOTER.unpack(footer)
    if magic != MAGIC or table_nbytes(frames) > stored_nbytes - len(MAGIC):
        raise _malformed(where, "it does not end in a table of frames", offset=stored_nbytes - FOOTER_NBYTES)
    return table_nbytes(frames)


def decode_table(data: bytes, *, plain_nbytes: int, stored_nbytes: int, where: str) -> FrameTable:
    """
    Read a table whose own checksum was already checked.

    Raises:
        MalformedFile: frames overlap, leave a hole, or are larger than frames may be.

    """
    frames, plain, magic = _FOOTER.unpack(data[-FOOTER_NBYTES:])
    at = stored_nbytes - len(data)
    if magic != MAGIC or len(data) != table_nbytes(frames):
        raise _malformed(where, "it does not end in a table of frames", offset=at)
    columns = np.frombuffer(data, "<i8", frames * _COLUMNS).reshape(_COLUMNS, frames)
    start, nbytes, stored_start, length, number = columns
    table = FrameTable(start, nbytes, stored_start, length, number, data[columns.nbytes : -FOOTER_NBYTES])
    small = (table.nbytes > 0) & (table.nbytes <= FRAME_NBYTES)
    stored = (table.stored_nbytes >= 0) & (table.stored_nbytes <= MAX_STORED_NBYTES)
    # Sizes first: sums of what is left cannot wrap.
    if not np.all(small & stored) or len(np.unique(table.number)) != frames:
        raise _malformed(where, "its table has frames of impossible sizes, or two of one number", offset=at)
    order = np.lexsort((table.stored_nbytes, table.stored_start))
    if (
        not plain == plain_nbytes == table.plain_nbytes
        or not np.array_equal(table.start, np.cumsum(table.nbytes) - table.nbytes)
        or not _tiles(table.stored_start[order], table.stored_nbytes[order], len(MAGIC), at)
    ):
        raise _malformed(where, "its frames overlap or leave a hole", offset=at)
    return table


def _tiles(start: IntArray, nbytes: IntArray, low: int, high: int) -> bool:
    """Tell whether ranges follow each other without gaps, from `low` to `high`."""
    return np.array_equal(start, low + np.cumsum(nbytes) - nbytes) and low + int(nbytes.sum()) == high


def _malformed(where: str, what: str, *, offset: int) -> MalformedFile:
    text = f"{where}: {what} (at byte {offset})"
    return MalformedFile(text, hint="use another checkpoint, or another copy of this one", file=where, offset=offset)
