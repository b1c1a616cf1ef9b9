"""
Lossless compression of numbers, above all of floating-point numbers.

In a floating-point number, the bits of the exponent hardly vary between the weights of a layer, while the rest looks
random. So the codec splits the words of a frame into planes: the n-th byte of each word beside the n-th byte of the
next. Planes that vary little are coded by Huffman codes (in the form of zstd frames), the others are stored as they
are. The exponent of bf16 and fp32 becomes a byte of its own when words are *rotated*: the sign and the eight bits below
it change places. Which planes to code is decided frame by frame, from a sample of its bytes; no dtype is needed. Where
bytes repeat in runs (counters, masks, text), zstd compresses planes with matches. `docs/codecs.md` specifies frames.

Every step of numpy releases the GIL and takes it again, and threads that wait for it hardly work, so frames of a batch
are analyzed and split together. Fresh memory costs as much as the work done in it, so it is reused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from shardkeep.codecs.base import Codec, CodecConfig, CodecRecord, FramePlace, damaged_frame
from shardkeep.codecs.compression import HUFFMAN_ONLY, LEVEL, decompress_frame, frame_compressor, require_zstd
from shardkeep.codecs.keys import KeySource
from shardkeep.storage.buffers import PerThread

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

WIDTHS = (1, 2, 4, 8)
RAW, SAME, PLANES = 0, 1, 2
STORED, ZSTD = 0, 1
KIND = struct.Struct("<BQ")
LAYOUT = struct.Struct("<BBB")
PART = struct.Struct("<BBQ")
MOST_HEAD_NBYTES = KIND.size + LAYOUT.size + max(WIDTHS) * PART.size + 7
"""The largest header, and what aligns the bytes behind it to a multiple of 8."""
WORST_BITS = 7.7
"""A byte that takes at least this many bits is not worth coding."""
_MIN_NBYTES = 64
"""Smaller frames are stored raw."""
_TRIAL_NBYTES = 8192
_MAX_RATIO = 0.98
"""A frame that does not shrink below this ratio is stored raw, so that it is read faster."""
_MATCH_RATIO = 0.95
"""If matches shrink a trial below this ratio of what Huffman codes would, planes are compressed with matches."""
_WIDER_GAIN = 0.01
"""The part of a frame that wider words have to save in order to be chosen."""
_ROTATION_GAIN = 0.004
"""The part of a frame that rotation has to save: it costs a tenth of the time."""
_BIAS = 1 / (2 * math.log(2))
_REGIONS = 8
_REGION = 1024
_SAMPLE_NBYTES = _REGIONS * _REGION
_WORD_WIDTHS = np.repeat((1, 2, 4, 8), (1, 2, 4, 8))
"""The width of the words that each counted byte belongs to."""


class Float(CodecConfig, frozen=True):
    """Compresses numbers without loss; the smaller, the more alike their exponents are. Needs a module of zstd."""

    name = "float"

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        cls.from_recorded(recorded)
        return _FloatCodec(require_zstd("the codec 'float'"))


class _FloatCodec:
    def __init__(self, zstd: Any) -> None:
        self._zstd = zstd
        self._encoder = PerThread(lambda: Encoder(zstd))
        self._scratch = PerThread(ReusedMemory)

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    def encode(self, data: memoryview, place: FramePlace) -> Any:  # noqa: ARG002 - the same at any place
        return next(self._encoder.get().encode(np.frombuffer(data, np.uint8), data.nbytes))

    def encode_many(self, data: memoryview, places: Sequence[FramePlace]) -> Iterator[Any]:
        return self._encoder.get().encode(np.frombuffer(data, np.uint8), places[0].nbytes)

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        plain = np.empty(_nbytes_of(data, place, most_nbytes), np.uint8)
        self.decode_into(data, place, plain.data)
        return plain.data

    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        nbytes = _nbytes_of(data, place, into.nbytes)
        plain: Bytes = np.frombuffer(into, np.uint8)[:nbytes]
        stored: Bytes = np.frombuffer(data, np.uint8)
        if stored[0] == RAW:
            np.copyto(plain, stored[1:])
        elif stored[0] == SAME:
            word = stored[KIND.size :]
            if word.size not in WIDTHS:
                raise damaged_frame(place, "repeats a word of an invalid size")
            whole, count = np.resize(word, 8), nbytes // 8 * 8
            plain[:count].view(np.uint64)[:] = whole.view(np.uint64)[0]
            plain[count:] = whole[: nbytes - count]
        else:
            self._merge(data, plain, place)
        return nbytes

    def _merge(self, data: memoryview, plain: Bytes, place: FramePlace) -> None:
        parts, width, rotate = _read_parts(data, plain.size, place)
        count = plain.size // width
        words: list[Words] = []
        for size, coder, body in parts:
            if coder == ZSTD:
                body = np.frombuffer(decompress_frame(self._zstd, body.data, count), np.uint8)  # noqa: PLW2901
                if body.size != count:
                    raise damaged_frame(place, f"has a plane of {body.size} bytes instead of {count}")
            words.append(_as_words(body, size))
        whole = plain[: count * width]
        view: Words = whole.view(word_type(width))
        # numpy is slow on words that are not aligned.
        into: Words = view if view.flags.aligned else np.empty(count, word_type(width))
        merge(words, into, self._scratch.get().get(whole.size), rotate=rotate)
        if into is not view:
            np.copyto(whole, into.view(np.uint8))
        if tail := plain.size - whole.size:
            plain[whole.size :] = np.frombuffer(data, np.uint8)[-tail:]


def _read_parts(data: memoryview, nbytes: int, place: FramePlace) -> tuple[list[tuple[int, int, Bytes]], int, bool]:
    """Return parts (bytes of a word, coder, body), width, and if rotated; checks all, as it may be forged."""
    width, rotate, number = LAYOUT.unpack_from(data, KIND.size)
    at = KIND.size + LAYOUT.size
    heads = [PART.unpack_from(data, at + part * PART.size) for part in range(number)]
    ends = list(accumulate((length for _, _, length in heads), initial=at + number * PART.size))
    fits = (
        width in WIDTHS
        and rotate in (0, 1)
        and sum(size for size, _, _ in heads) == width
        and ends[-1] + nbytes % width == data.nbytes
        and all(
            size == 1 if coder == ZSTD else coder == STORED and size in WIDTHS and length == nbytes // width * size
            for size, coder, length in heads
        )
        and not (rotate and (number == 1 or heads[-1][0] > 1))
    )
    if not fits:
        raise damaged_frame(place, "has an invalid header")
    stored: Bytes = np.frombuffer(data, np.uint8)
    parts = [
        (size, coder, stored[end - length : end]) for (size, coder, length), end in zip(heads, ends[1:], strict=True)
    ]
    return parts, width, bool(rotate)


def _nbytes_of(data: memoryview, place: FramePlace, most_nbytes: int) -> int:
    if not data.nbytes or data[0] > PLANES or (data[0] != RAW and data.nbytes < KIND.size):
        raise damaged_frame(place, "does not say how it is stored")
    nbytes: int = data.nbytes - 1 if data[0] == RAW else KIND.unpack_from(data)[1]
    if nbytes > most_nbytes:
        raise damaged_frame(place, f"becomes {nbytes} bytes, expected at most {most_nbytes}")
    return nbytes


# -- words and planes --------------------------------------------------------------------------------------------------
# By casts, shifts and products, which numpy vectorises and runs without the GIL. Strided copies would take twice as long.


def word_type(width: int) -> np.dtype[Any]:
    """Return the type of unsigned numbers of `width` bytes, the lowest byte first."""
    return np.dtype(f"<u{width}")


class ReusedMemory:
    """Memory of one thread, reused from frame to frame."""

    def __init__(self) -> None:
        self._data: Bytes = np.empty(0, np.uint8)

    def get(self, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of undefined contents: the same memory in every call."""
        if self._data.size < nbytes:
            self._data = np.empty(nbytes, np.uint8)
        return self._data[:nbytes]


def _as_words(data: Bytes, width: int) -> Words:
    """View bytes as words; a copy if they are not aligned, because numpy is slow on those."""
    words: Words = data.view(word_type(width))
    return words if words.flags.aligned else words.copy()


def split(words: Words, begin: int, into: Words, scratch: Bytes, *, rotate: bool) -> None:
    """Fill `into` with some bytes of every (rotated) word, from the `begin`-th on; a rotated top byte stands alone."""
    nbytes, width = into.itemsize, words.itemsize
    end = begin + nbytes
    if not rotate or width == 1 or end < width - 1:
        _cast(words, 8 * begin, into)
    elif end == width - 1:
        # The sign takes the place of the lowest bit of the exponent.
        sign = into.dtype.type(1 << (8 * nbytes - 1))
        _cast(words, 8 * begin, into)
        np.bitwise_and(into, ~sign, out=into)
        signs: Words = scratch[: into.nbytes].view(into.dtype).reshape(into.shape)
        _cast(words, 8 * (width - nbytes), signs)
        np.bitwise_and(signs, sign, out=signs)
        np.bitwise_or(into, signs, out=into)
    else:  # the top byte, which is a part of its own
        _cast(words, 8 * begin - 1, into)


def _cast(words: Words, shift: int, into: Words) -> None:
    if shift:
        np.right_shift(words, words.dtype.type(shift), out=into, casting="unsafe")
    else:
        np.copyto(into, words, casting="unsafe")


def rotated(words: Words) -> Words:
    """Return words with the sign and the eight bits below it exchanged; words of one byte as they are."""
    if words.itemsize == 1:
        return words
    kind, top = words.dtype.type, 8 * words.itemsize - 1
    exponent = kind(0xFF << (top - 8))
    made: Words = (words & exponent) << kind(1)
    made |= (words >> kind(top)) << kind(top - 8)
    made |= words & kind((1 << (top - 8)) - 1)
    return made


def merge(parts: list[Words], into: Words, scratch: Bytes, *, rotate: bool) -> None:
    """Fill `into` with words made of parts, the lowest first: undo `split`. Needs as much scratch as `into`."""
    held: Words = scratch[: into.nbytes].view(into.dtype)
    if not rotate or into.itemsize == 1:
        _merge(parts, into, held)
        return
    *low, signed, top = parts
    # The part below the top begins with the sign: as a signed number, it fills all bits above with the sign.
    signs: Words = signed.view(f"<i{signed.itemsize}")
    if low:
        _merge(low, into, held)
        shift, wide = 8 * (into.itemsize - 1 - signed.itemsize), f"<i{into.itemsize}"
        np.multiply(signs, 1 << shift, out=held.view(wide), dtype=wide)
        np.bitwise_or(into, held, out=into)
    else:
        np.copyto(into, signs, casting="unsafe")
    kind, exponent = into.dtype.type, 8 * into.itemsize - 9
    np.bitwise_and(into, ~kind(0xFF << exponent), out=into)
    np.multiply(top, kind(1 << exponent), out=held, dtype=into.dtype)
    np.bitwise_or(into, held, out=into)


def _merge(parts: list[Words], into: Words, held: Words) -> None:
    np.copyto(into, parts[0], casting="unsafe")
    shift = 8 * parts[0].itemsize
    for part in parts[1:]:
        # By a product, for which numpy casts faster than for a shift.
        np.multiply(part, into.dtype.type(1 << shift), out=held, dtype=into.dtype)
        np.bitwise_or(into, held, out=into)
        shift += 8 * part.itemsize


# -- analysis: which bytes of words are worth coding? ------------------------------------------------------------------
# Counts a few kilobytes from several regions of each frame. The entropy of the bytes at each position of a word is nearly
# what an entropy coder would make of them. The result for a frame depends only on its own bytes.


class FrameStats(NamedTuple):
    width: int
    rotate: bool
    bits: tuple[float, ...]
    """What each byte of a word would take, the lowest first."""


def analyze(frames: Sequence[memoryview]) -> list[FrameStats]:
    samples = [_sample(frame) for frame in frames]
    found: list[FrameStats] = []
    for nbytes, alike in groupby(samples, len):
        group = list(alike)
        found += _analyze(np.frombuffer(b"".join(group), np.uint8).reshape(len(group), nbytes))
    return found


def _sample(data: memoryview) -> bytes:
    """Return a few kilobytes of a frame, from all over it; whole words of eight bytes."""
    if data.nbytes <= 2 * _SAMPLE_NBYTES:
        return bytes(data[: min(data.nbytes, _SAMPLE_NBYTES) // 8 * 8])
    step = (data.nbytes - _REGION) // (_REGIONS - 1) // 8 * 8
    return b"".join([data[at * step : at * step + _REGION] for at in range(_REGIONS)])


def _analyze(samples: Bytes) -> list[FrameStats]:
    eight = _counts(samples, 8)
    # Of words of one byte, then of two, of four and of eight.
    counts: Counts = np.empty((len(samples), 15, 256), np.int64)
    counts[:, 7:] = eight
    np.add(eight[:, :4], eight[:, 4:], out=counts[:, 3:7])
    np.add(counts[:, 3:5], counts[:, 5:7], out=counts[:, 1:3])
    np.add(counts[:, 1], counts[:, 2], out=counts[:, 0])
    found = [_choose_width(bits) for bits in _entropy(counts, samples.shape[1] // _WORD_WIDTHS)]
    for width in {each.width for each in found} - {1}:
        rows = [row for row, each in enumerate(found) if each.width == width]
        for row, upper in zip(rows, _rotated_entropy(samples[rows], width), strict=True):
            bits = (*found[row].bits[:-2], *upper)
            if sum(bits) < sum(found[row].bits) - 8 * _ROTATION_GAIN * width:
                found[row] = FrameStats(width, rotate=True, bits=bits)
    return found


def _choose_width(bits: list[float]) -> FrameStats:
    """Choose the width of words by what their bytes take: those of words of one byte, then of two, four, eight."""
    width, best = 1, bits[:1]
    for wider in (2, 4, 8):
        its = bits[wider - 1 : 2 * wider - 1]
        if sum(its) / wider < sum(best) / width - 8 * _WIDER_GAIN:
            width, best = wider, its
    return FrameStats(width, rotate=False, bits=tuple(best))


def _rotated_entropy(samples: Bytes, width: int) -> list[list[float]]:
    """Return what the two upper bytes of rotated words take; the others are unchanged."""
    uppers = samples.view(word_type(2))[:, width // 2 - 1 :: width // 2]
    return _entropy(_counts(_rotated_pairs().take(uppers).view(np.uint8), 2), np.array([uppers.shape[1]]))


def _counts(samples: Bytes, width: int) -> Counts:
    """Return how often each byte occurs at each position of words of this width, for each sample."""
    rows, nbytes = samples.shape
    numbers = samples.reshape(rows, nbytes // width, width) + _first_numbers(rows, width)
    return np.bincount(numbers.ravel(), minlength=rows * width * 256).reshape(rows, width, 256)


def _entropy(counts: Counts, totals: Counts) -> list[list[float]]:
    sums = _logs().take(counts).sum(axis=2)
    bits: list[list[float]] = np.minimum(8.0, np.log2(totals) - (sums + _BIAS) / totals).tolist()
    return bits


@cache
def _first_numbers(rows: int, width: int) -> Counts:
    return np.arange(0, rows * width * 256, 256).reshape(rows, 1, width)


@cache
def _rotated_pairs() -> npt.NDArray[np.uint16]:
    return rotated(np.arange(1 << 16, dtype=word_type(2)))


@cache
def _logs() -> npt.NDArray[np.float64]:
    # With the Miller-Madow correction: in a small sample, random bytes would seem less random than they are.
    numbers = np.arange(_SAMPLE_NBYTES + 1)
    logs: npt.NDArray[np.float64] = numbers * np.log2(np.maximum(numbers, 1)) - _BIAS * (numbers > 0)
    return logs


class _Plan(NamedTuple):
    width: int
    rotate: bool
    coded: tuple[bool, ...]
    """Which bytes of words to code, the lowest first."""
    has_matches: bool

    def parts(self) -> list[tuple[int, int, bool]]:
        """Cut words: bytes to code one by one, those between them together. Returns (first byte, bytes, whether to code)."""
        parts = []
        begin, end = 0, self.width - self.rotate  # the top byte of rotated words is a part of its own
        while begin < self.width:
            # As few parts as possible: each is a pass over the frame.
            sizes = (size for size in (4, 2) if begin + size <= end and not any(self.coded[begin : begin + size]))
            nbytes = next(sizes, 1)
            parts.append((begin, nbytes, self.coded[begin]))
            begin += nbytes
        return parts


class _StoredFrame:
    def __init__(self, room: Bytes, head: bytes, body_at: int) -> None:
        self._room = room
        self._head = bytearray(head)
        self.end = body_at

    def add(self, nbytes: int, coder: int, size: int) -> Bytes:
        self._head += PART.pack(nbytes, coder, size)
        return self.take(size)

    def take(self, size: int) -> Bytes:
        self.end += size
        return self._room[self.end - size : self.end]

    def done(self) -> Bytes:
        self._room[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        return self._room[: self.end]


class Encoder:
    """Encodes frames, on one thread."""

    def __init__(self, zstd: Any) -> None:
        self._literals = frame_compressor(zstd, HUFFMAN_ONLY)
        self._matches = frame_compressor(zstd, {LEVEL: 1})
        self._scratch = ReusedMemory()
        self._signs = ReusedMemory()

    def encode(self, plain: Bytes, nbytes: int) -> Iterator[Bytes | bytes]:
        """Yield the stored form of each frame of `nbytes`; the last may be smaller."""
        frames = [plain[at : at + nbytes] for at in range(0, max(plain.size, 1), max(nbytes, 1))]
        rooms: Bytes = np.empty((len(frames), -(-(nbytes + MOST_HEAD_NBYTES) // 8) * 8), np.uint8)
        plans = self._plans(frames)
        kinds = [(frame.size, plan) for frame, plan in zip(frames, plans, strict=True)]
        for (size, plan), alike in groupby(range(len(frames)), kinds.__getitem__):
            rows = list(alike)
            begin, end = rows[0], rows[-1] + 1
            if isinstance(plan, bytes):
                yield from [KIND.pack(SAME, size) + plan] * (end - begin)
                continue
            coded: list[Bytes | None] = [None] * (end - begin)
            if plan is not None:
                block = plain[begin * nbytes :][: (end - begin) * size].reshape(end - begin, size)
                coded = self._planes(block, plan, rooms[begin:end])
            for row, stored in zip(rows, coded, strict=True):
                if stored is not None:
                    yield stored
                    continue
                rooms[row, 0] = RAW
                np.copyto(rooms[row, 1 : 1 + size], frames[row])
                yield rooms[row, : 1 + size]

    def _plans(self, frames: list[Bytes]) -> list[bytes | _Plan | None]:
        """Decide about frames: the word that one repeats, or how to split it; None: store it raw."""
        plans: list[bytes | _Plan | None] = [_repeated(frame) for frame in frames]
        rows = [row for row, frame in enumerate(frames) if plans[row] is None and frame.size >= _MIN_NBYTES]
        for row, found in zip(rows, analyze([frames[row].data for row in rows]), strict=True):
            has_matches = self._has_matches(frames[row], found)
            coded = tuple(has_matches or bits < WORST_BITS for bits in found.bits)
            plans[row] = _Plan(found.width, found.rotate, coded, has_matches) if any(coded) else None
        return plans

    def _has_matches(self, plain: Bytes, found: FrameStats) -> bool:
        """Return whether a piece of the frame shrinks more by matches than by codes for single bytes."""
        begin = max(plain.size - _TRIAL_NBYTES, 0) // 16 * 8
        count = min(plain.size - begin, _TRIAL_NBYTES) // found.width
        piece = plain[begin : begin + count * found.width].reshape(count, found.width)
        size = len(self._matches(np.ascontiguousarray(piece.T).data))
        return size < _MATCH_RATIO * piece.size * sum(min(each, 8.0) for each in found.bits) / (8 * found.width)

    def _planes(self, plain: Bytes, plan: _Plan, rooms: Bytes) -> list[Bytes | None]:
        """Split and code frames, rows of `plain`, into rows of `rooms`; None for those that would not shrink."""
        number, nbytes = plain.shape
        count = nbytes // plan.width
        words = planes = _as_words(plain[:, : count * plan.width], plan.width)
        signs = self._signs.get(number * nbytes // 2)
        if plan.width > 1:
            planes = self._scratch.get(number * count).reshape(number, count)
        compress = self._matches if plan.has_matches else self._literals
        parts = plan.parts()
        head = KIND.pack(PLANES, nbytes) + LAYOUT.pack(plan.width, plan.rotate, len(parts))
        body_at = len(head) + len(parts) * PART.size
        rooms = rooms[:, -body_at % 8 :]  # aligns what is behind the header
        frames = [_StoredFrame(room, head, body_at) for room in rooms]
        for begin, size, is_coded in parts:
            if is_coded:
                if plan.width > 1:
                    split(words, begin, planes, signs, rotate=plan.rotate)
                for frame, plane in zip(frames, planes, strict=True):
                    coded = np.frombuffer(compress(plane.data), np.uint8)
                    body, coder = (coded, ZSTD) if coded.size < count else (plane, STORED)
                    np.copyto(frame.add(1, coder, body.size), body)
                continue
            begins = {frame.end for frame in frames}
            bodies = [frame.add(size, STORED, size * count).view(word_type(size)) for frame in frames]
            if len(begins) == 1:
                at = begins.pop()
                split(words, begin, rooms[:, at : at + size * count].view(word_type(size)), signs, rotate=plan.rotate)
            else:  # coded parts before it have different sizes
                for its_words, body in zip(words, bodies, strict=True):
                    split(its_words, begin, body, signs, rotate=plan.rotate)
        tails = plain[:, count * plan.width :]
        for frame, tail in zip(frames, tails, strict=True):
            np.copyto(frame.take(tail.size), tail)
        return [frame.done() if frame.end <= nbytes * _MAX_RATIO else None for frame in frames]


def _repeated(plain: Bytes) -> bytes | None:
    """Return the shortest word that a frame repeats; None if there is none, or the frame is tiny."""
    if plain.size < _MIN_NBYTES:
        return None
    word = plain[:8].tobytes()
    if plain[-8:].tobytes() != (word + word)[plain.size % 8 :][:8]:
        return None  # decides most frames
    words = plain[: plain.size // 8 * 8].view(np.uint64)
    if words[words.size // 2] != words[0] or (words != words[0]).any():
        return None
    return next(word[:width] for width in WIDTHS if word == word[:width] * (8 // width))
