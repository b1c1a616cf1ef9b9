"""
Lossless compression of numbers, above all of floating point ones.

Each frame is looked at: which bytes of its words vary little is found out, not told. Those bytes are taken out into
planes and coded by Huffman codes (in the form of zstd frames), the others are stored as they are. Frames that repeat
one word, such as zeros, become a few bytes; those that look random are stored raw, at about the speed of a copy. Where
bytes repeat in runs (counters, masks, text), planes are compressed by zstd with matches.

The frame says what was done (numbers are little-endian):

    u8 kind = 0                                                             the bytes, as they are
    u8 kind = 1 | u64 nbytes | 1, 2, 4 or 8 bytes                           these bytes, repeated up to nbytes
    u8 kind = 2 | u64 nbytes | u8 width | u8 turn | u8 parts
                | parts x (u8 bytes, u8 coder, u64 stored) | bodies | tail  words taken apart, the lowest part first

A part is 1, 2 or 4 bytes of every word; coder 0 stores it as it is, coder 1 (only for one byte) as a zstd frame. With
turn = 1 words were turned (`planes`), and their top byte is a part. The tail is what is behind the last whole word.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from shardkeep.codec.codecs import FramePlace
from shardkeep.codec.planes import WIDTHS, Bytes
from shardkeep.codec.problems import DamagedFrame, OversizedFrame

RAW, SAME, PLANES = 0, 1, 2
STORED, ZSTD = 0, 1
KIND = struct.Struct("<BQ")
LAYOUT = struct.Struct("<BBB")
PART = struct.Struct("<BBQ")
MOST_HEAD_NBYTES = KIND.size + LAYOUT.size + max(WIDTHS) * PART.size + 7
"""With what it may be moved by for what is behind it to begin at a multiple of 8."""


class Part(NamedTuple):
    """Some bytes of every word, as they are stored."""

    nbytes: int
    coder: int
    body: Bytes


def read_parts(data: memoryview, nbytes: int, place: FramePlace) -> tuple[list[Part], int, bool]:
    """Read the parts of a frame of planes; every number is checked against what can be."""
    stored: Bytes = np.frombuffer(data, np.uint8)
    at = KIND.size + LAYOUT.size
    if stored.size < at:
        raise damaged(place, "it ends within its header")
    width, turn, number = LAYOUT.unpack_from(data, KIND.size)
    if width not in WIDTHS or turn not in (0, 1) or not 1 <= number <= width:
        raise damaged(place, "its header makes no sense")
    if stored.size < at + number * PART.size:
        raise damaged(place, "it ends within its header")
    heads = [PART.unpack_from(data, at + part * PART.size) for part in range(number)]
    at += number * PART.size
    count, tail = divmod(nbytes, width)
    parts = []
    for size, coder, length in heads:
        if size not in WIDTHS or coder not in (STORED, ZSTD) or (coder == ZSTD and size != 1):
            raise damaged(place, "its header makes no sense")
        if length > stored.size - at or (coder == STORED and length != size * count):
            raise damaged(place, "its parts have not the sizes they should have")
        parts.append(Part(size, coder, stored[at : at + length]))
        at += length
    if sum(part.nbytes for part in parts) != width or stored.size - at != tail:
        raise damaged(place, "its parts have not the sizes they should have")
    if turn and (len(parts) == 1 or parts[-1].nbytes > 1):
        raise damaged(place, "its header makes no sense")
    return parts, width, bool(turn)


def nbytes_of(data: memoryview, place: FramePlace, most_nbytes: int) -> int:
    """Return how many plain bytes a frame says it has."""
    if not data.nbytes or data[0] > PLANES or (data[0] != RAW and data.nbytes < KIND.size):
        raise damaged(place, "it does not say how it is stored")
    nbytes: int = data.nbytes - 1 if data[0] == RAW else KIND.unpack_from(data)[1]
    if nbytes > most_nbytes:
        raise OversizedFrame(
            f"frame {place.number} of {place.file} stands for {nbytes} bytes, and {most_nbytes} are the most it may",
            file=place.file,
        )
    return nbytes


def damaged(place: FramePlace, what: str) -> DamagedFrame:
    """Return what to raise for a frame that cannot be what was written."""
    return DamagedFrame(
        f"{place.named}: {what}",
        hint="use another checkpoint, or another copy of this one",
        file=place.file,
    )
