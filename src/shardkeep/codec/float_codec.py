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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkeep.codec.codecs import Codec, CodecConfig, FramePlace, Recorded
from shardkeep.codec.float_look import WORST, Bytes, Look, look, sample_of
from shardkeep.codec.planes import WIDTHS, Splitter, Words, merge, type_of
from shardkeep.codec.problems import DamagedFrame, OversizedFrame
from shardkeep.codec.zstd_codec import ForThread, need_engines

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codec.keys import KeySource
    from shardkeep.codec.zstd_engines import Engine, OneFrame

_RAW, _SAME, _PLANES = 0, 1, 2
_STORED, _ZSTD = 0, 1
_KIND = struct.Struct("<BQ")
_LAYOUT = struct.Struct("<BBB")
_PART = struct.Struct("<BBQ")
_LEAST_NBYTES = 64
"""Frames below this are not worth a look."""
_TRIAL_NBYTES = 8192
_SAVES = 0.98
"""What is not smaller than this part of what it was is stored as it was, to be read faster."""
_REPEATS = 0.95
"""Where matches make this of what Huffman codes would, planes are compressed with matches."""


class Float(CodecConfig, frozen=True):
    """Compresses numbers without loss; the smaller, the more alike their exponents are. Needs a module for zstd."""

    name = "float"

    @classmethod
    def open(cls, recorded: Recorded, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        cls.from_recorded(recorded)
        return _FloatCodec(*need_engines("the codec 'float'"))


class _Part(NamedTuple):
    """Some bytes of every word."""

    nbytes: int
    coder: int
    body: Bytes
    """What is stored of it."""


class _FloatCodec:
    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._reader = reader
        self._literals = ForThread(writer.literal_frames)
        self._matches = ForThread(lambda: writer.frames(1))

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        plain: Bytes = np.frombuffer(data, np.uint8)
        if plain.size < _LEAST_NBYTES:
            return _raw(plain).data
        repeated = _repeated(plain)
        if repeated is not None:
            return _KIND.pack(_SAME, plain.size) + repeated
        found = look(sample_of(plain))
        coded = self._planes(plain, found)
        return (_raw(plain) if coded is None else coded).data

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        plain = np.empty(_nbytes_of(data, place, most_nbytes), np.uint8)
        self.decode_into(data, place, plain.data)
        return plain.data

    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        nbytes = _nbytes_of(data, place, into.nbytes)
        plain: Bytes = np.frombuffer(into, np.uint8)[:nbytes]
        stored: Bytes = np.frombuffer(data, np.uint8)
        if stored[0] == _RAW:
            np.copyto(plain, stored[1:])
        elif stored[0] == _SAME:
            _repeat(stored[_KIND.size :], plain, place)
        else:
            self._merge(data, plain, place)
        return nbytes

    def _planes(self, plain: Bytes, found: Look) -> Bytes | None:
        """Return the frame with its words taken apart; None if it would not be smaller."""
        has_matches = self._has_matches(plain, found)
        if not has_matches and min(found.bits) >= WORST:
            return None
        count = plain.size // found.width
        splitter = Splitter(_aligned(plain[: count * found.width], found.width), turn=found.turn)
        compress = (self._matches if has_matches else self._literals).get()
        wanted = [has_matches or bits < WORST for bits in found.bits]
        parts = _parts(splitter, found, wanted, compress)
        tail = plain[count * found.width :]
        head = _KIND.pack(_PLANES, plain.size) + _LAYOUT.pack(found.width, found.turn, len(parts))
        head += b"".join(_PART.pack(part.nbytes, part.coder, part.body.size) for part in parts)
        size = len(head) + sum(part.body.size for part in parts) + tail.size
        if size > plain.size * _SAVES:
            return None
        stored: Bytes = np.empty(size, np.uint8)
        np.concatenate([np.frombuffer(head, np.uint8), *(part.body for part in parts), tail], out=stored)
        return stored

    def _has_matches(self, plain: Bytes, found: Look) -> bool:
        """Say whether a piece of the frame shrinks more by matches than by codes for single bytes."""
        begin = max(plain.size - _TRIAL_NBYTES, 0) // 16 * 8
        count = min(plain.size - begin, _TRIAL_NBYTES) // found.width
        piece = plain[begin : begin + count * found.width].reshape(count, found.width)
        size = len(self._matches.get()(np.ascontiguousarray(piece.T).data))
        return size < _REPEATS * piece.size * sum(min(each, 8.0) for each in found.bits) / (8 * found.width)

    def _merge(self, data: memoryview, plain: Bytes, place: FramePlace) -> None:
        """Put words together again."""
        parts, width, turn = _read_parts(data, plain.size, place)
        count = plain.size // width
        words: list[Words] = []
        for part in parts:
            body = part.body
            if part.coder == _ZSTD:
                body = np.frombuffer(self._reader.whole(body.data, count), np.uint8)
                if body.size != count:
                    raise _damaged(place, f"a plane has {body.size} bytes instead of {count}")
            words.append(_aligned(body, part.nbytes))
        whole = plain[: count * width]
        view: Words = whole.view(type_of(width))
        if view.flags.aligned:
            merge(words, view, turn=turn)
        else:
            held: Words = np.empty(count, type_of(width))
            merge(words, held, turn=turn)
            np.copyto(whole, held.view(np.uint8))
        tail = plain.size - count * width
        if tail:
            plain[count * width :] = np.frombuffer(data, np.uint8)[-tail:]


def _parts(splitter: Splitter, found: Look, wanted: list[bool], compress: OneFrame) -> list[_Part]:
    """Take words apart: bytes that are wanted one by one and coded, those between them together and as they are."""
    parts: list[_Part] = []
    begin, end = 0, found.width - found.turn  # the top byte of turned words is a part of its own
    while begin < found.width:
        # As few parts as possible: each is a pass over the frame.
        sizes = (size for size in (4, 2) if begin + size <= end and not any(wanted[begin : begin + size]))
        nbytes = next(sizes, 1)
        body = splitter.part(begin, nbytes).view(np.uint8)
        coded = compress(body.data) if wanted[begin] else None
        if coded is not None and len(coded) < body.size:
            parts.append(_Part(nbytes, _ZSTD, np.frombuffer(coded, np.uint8)))
        else:
            parts.append(_Part(nbytes, _STORED, body))
        begin += nbytes
    return parts


def _read_parts(data: memoryview, nbytes: int, place: FramePlace) -> tuple[list[_Part], int, bool]:
    """Read the parts of a frame of planes; every number is checked against what can be."""
    stored: Bytes = np.frombuffer(data, np.uint8)
    at = _KIND.size + _LAYOUT.size
    if stored.size < at:
        raise _damaged(place, "it ends within its header")
    width, turn, number = _LAYOUT.unpack_from(data, _KIND.size)
    if width not in WIDTHS or turn not in (0, 1) or not 1 <= number <= width:
        raise _damaged(place, "its header makes no sense")
    if stored.size < at + number * _PART.size:
        raise _damaged(place, "it ends within its header")
    heads = [_PART.unpack_from(data, at + part * _PART.size) for part in range(number)]
    at += number * _PART.size
    count, tail = divmod(nbytes, width)
    parts = []
    for size, coder, length in heads:
        if size not in WIDTHS or coder not in (_STORED, _ZSTD) or (coder == _ZSTD and size != 1):
            raise _damaged(place, "its header makes no sense")
        if length > stored.size - at or (coder == _STORED and length != size * count):
            raise _damaged(place, "its parts have not the sizes they should have")
        parts.append(_Part(size, coder, stored[at : at + length]))
        at += length
    if sum(part.nbytes for part in parts) != width or stored.size - at != tail:
        raise _damaged(place, "its parts have not the sizes they should have")
    if turn and (len(parts) == 1 or parts[-1].nbytes > 1):
        raise _damaged(place, "its header makes no sense")
    return parts, width, bool(turn)


def _nbytes_of(data: memoryview, place: FramePlace, most_nbytes: int) -> int:
    """Return how many plain bytes a frame says it has."""
    if not data.nbytes or data[0] > _PLANES or (data[0] != _RAW and data.nbytes < _KIND.size):
        raise _damaged(place, "it does not say how it is stored")
    nbytes: int = data.nbytes - 1 if data[0] == _RAW else _KIND.unpack_from(data)[1]
    if nbytes > most_nbytes:
        raise OversizedFrame(
            f"frame {place.number} of {place.file} stands for {nbytes} bytes, and {most_nbytes} are the most it may",
            file=place.file,
        )
    return nbytes


def _raw(plain: Bytes) -> Bytes:
    stored: Bytes = np.empty(plain.size + 1, np.uint8)
    stored[0] = _RAW
    np.copyto(stored[1:], plain)
    return stored


def _repeated(plain: Bytes) -> bytes | None:
    """Return the shortest word that is all there is in a frame; None if there is more."""
    word = plain[:8].tobytes()
    if plain[-8:].tobytes() != (word + word)[plain.size % 8 :][:8]:
        return None  # most frames are told by this
    words = plain[: plain.size // 8 * 8].view(np.uint64)
    if words[words.size // 2] != words[0] or (words != words[0]).any():
        return None
    return next(word[:width] for width in WIDTHS if word == word[:width] * (8 // width))


def _repeat(word: Bytes, plain: Bytes, place: FramePlace) -> None:
    if word.size not in WIDTHS:
        raise _damaged(place, "the word it repeats has no size that words have")
    whole = np.resize(word, 8)
    count = plain.size // 8 * 8
    plain[:count].view(np.uint64)[:] = whole.view(np.uint64)[0]
    plain[count:] = whole[: plain.size - count]


def _aligned(data: Bytes, width: int) -> Words:
    """Return bytes as words; a copy of them, where they do not lie as words should: numpy is slow on those."""
    words: Words = data.view(type_of(width))
    return words if words.flags.aligned else words.copy()


def _damaged(place: FramePlace, what: str) -> DamagedFrame:
    return DamagedFrame(
        f"frame {place.number} of {place.file} (bytes {place.offset} to {place.offset + place.nbytes}): {what}",
        hint="use another checkpoint, or another copy of this one",
        file=place.file,
    )
