"""
Coded blobs: frames in the order they were written, then a table of the plain bytes that each of them encodes.

    "SKFRAME1" | frames | table | footer

A frame is the encoded form of up to 1 MiB of plain bytes. The table has the start and length of each frame's plain and
stored bytes, its number, and the digest of the stored bytes: damage is found before decoding, and without the key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from shardkeep.errors import MalformedFile
from shardkeep.format.boxes import IntArray
from shardkeep.format.data_file import DIGEST_NBYTES

MAGIC = b"SKFRAME1"
FRAME_NBYTES = 1 << 20
"""The most plain bytes of a frame: it stays in a core's cache from codec to codec."""
MAX_STORED_NBYTES = 4 << 20
"""The most stored bytes of a frame: no codec adds more than a few bytes to a frame."""
_COLUMNS = 5
_ROW_NBYTES = 8 * _COLUMNS + DIGEST_NBYTES
_FOOTER = struct.Struct("<QQ8s")
FOOTER_NBYTES = _FOOTER.size


@dataclass(frozen=True)
class FrameTable:
    """Sorted by where their plain bytes begin."""

    start: IntArray
    nbytes: IntArray
    stored_start: IntArray
    stored_nbytes: IntArray
    number: IntArray
    """Its number in the order of writing, which authenticating codecs use."""
    digests: bytes

    def __len__(self) -> int:
        return len(self.start)

    @property
    def plain_nbytes(self) -> int:
        return int(self.nbytes.sum())

    def digest(self, frame: int) -> bytes:
        return self.digests[frame * DIGEST_NBYTES : (frame + 1) * DIGEST_NBYTES]


def table_nbytes(frames: int) -> int:
    return frames * _ROW_NBYTES + FOOTER_NBYTES


def encode_table(table: FrameTable) -> bytes:
    columns = (table.start, table.nbytes, table.stored_start, table.stored_nbytes, table.number)
    parts = [np.ascontiguousarray(column, "<i8").tobytes() for column in columns]
    return b"".join([*parts, table.digests, _FOOTER.pack(len(table), table.plain_nbytes, MAGIC)])


def read_footer(footer: bytes, *, stored_nbytes: int, where: str) -> int:
    """Return the size of the table with its footer; raise if it cannot be that of a blob of this size."""
    frames, _, magic = _FOOTER.unpack(footer)
    if magic != MAGIC or table_nbytes(frames) > stored_nbytes - len(MAGIC):
        raise _malformed(where, "it does not end in a table of frames", offset=stored_nbytes - FOOTER_NBYTES)
    return table_nbytes(frames)


def decode_table(data: bytes, *, plain_nbytes: int, stored_nbytes: int, where: str) -> FrameTable:
    """Decode a table that was already verified; frames must neither overlap, leave a hole, nor be too large."""
    frames, plain, magic = _FOOTER.unpack(data[-FOOTER_NBYTES:])
    at = stored_nbytes - len(data)
    if magic != MAGIC or len(data) != table_nbytes(frames):
        raise _malformed(where, "it does not end in a table of frames", offset=at)
    columns = np.frombuffer(data, "<i8", frames * _COLUMNS).reshape(_COLUMNS, frames)
    start, nbytes, stored_start, length, number = columns
    table = FrameTable(start, nbytes, stored_start, length, number, data[columns.nbytes : -FOOTER_NBYTES])
    small = (table.nbytes > 0) & (table.nbytes <= FRAME_NBYTES)
    stored = (table.stored_nbytes >= 0) & (table.stored_nbytes <= MAX_STORED_NBYTES)
    # Sizes must be checked first, so that the sums below cannot overflow.
    if not np.all(small & stored) or len(np.unique(table.number)) != frames:
        raise _malformed(where, "its table has frames of impossible sizes, or two of one number", offset=at)
    order = np.lexsort((table.stored_nbytes, table.stored_start))
    stored_ends = len(MAGIC) + np.cumsum(table.stored_nbytes[order])
    if (
        not plain == plain_nbytes == table.plain_nbytes
        or not np.array_equal(table.start, np.cumsum(table.nbytes) - table.nbytes)
        or not np.array_equal(table.stored_start[order] + table.stored_nbytes[order], stored_ends)
        or len(MAGIC) + int(table.stored_nbytes.sum()) != at
    ):
        raise _malformed(where, "its frames overlap or leave a hole", offset=at)
    return table


def _malformed(where: str, what: str, *, offset: int) -> MalformedFile:
    text = f"{where}: {what} (at byte {offset})"
    return MalformedFile(text, hint="use another checkpoint, or another copy of this one", file=where, offset=offset)
