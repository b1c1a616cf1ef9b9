"""Lossless compression of numbers, above all of floating point ones: `float_frames` says what is stored."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkeep.codecs.base import Codec, CodecConfig, CodecRecord, FramePlace
from shardkeep.codecs.zstd import PerThread, need_engines
from shardkeep.errors import DamagedFrame, OversizedFrame

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codecs.keys import KeySource
    from shardkeep.codecs.zstd import Engine


# Numbers taken apart and put together again: the n-th byte of each stands beside the n-th byte of the next.
#
# In a floating point number some bits hold the exponent, which hardly varies between the weights of a layer, while
# the
# rest looks random. Apart, the first compress well and the second are left alone. The exponent of bf16 and fp32 is a
# byte
# of its own after words are *turned*: their sign and the eight bits below it change places.
#
# Numpy does this by casts, shifts and products, which are vectorised and do not hold the GIL. Copies with strides
# would
# take twice as long.

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
"""Unsigned numbers of some width."""
WIDTHS = (1, 2, 4, 8)


def type_of(width: int) -> np.dtype[Any]:
    """Return the type of unsigned numbers of so many bytes, the lowest byte first."""
    return np.dtype(f"<u{width}")


class Scratch:
    """Memory of a thread, kept for frame after frame: to be given new pages takes as long as what is done in them."""

    def __init__(self) -> None:
        self._data: Bytes = np.empty(0, np.uint8)

    def get(self, nbytes: int) -> Bytes:
        """Return so many bytes, whatever is in them; the same as the last time."""
        if self._data.size < nbytes:
            self._data = np.empty(nbytes, np.uint8)
        return self._data[:nbytes]


def aligned(data: Bytes, width: int) -> Words:
    """Return bytes as words; a copy of them, where they do not lie as words should: numpy is slow on those."""
    words: Words = data.view(type_of(width))
    return words if words.flags.aligned else words.copy()


def split(words: Words, begin: int, into: Words, scratch: Bytes, *, turn: bool) -> None:
    """
    Fill `into`, numbers of some bytes, with as many bytes of every word, from the `begin`th on.

    Args:
        words: unsigned numbers; in rows, or not.
        begin: the first byte that is wanted, of those of a turned word.
        into: as many numbers, in the same order.
        scratch: at least as many bytes as `into` has.
        turn: whether words are turned first; their top byte has to be taken by itself.

    """
    nbytes, width = into.itemsize, words.itemsize
    end = begin + nbytes
    if not turn or width == 1 or end < width - 1:
        _cast(words, 8 * begin, into)
    elif end == width - 1:
        # Instead of the lowest bit of the exponent comes the sign.
        sign = into.dtype.type(1 << (8 * nbytes - 1))
        _cast(words, 8 * begin, into)
        np.bitwise_and(into, ~sign, out=into)
        signs: Words = scratch[: into.nbytes].view(into.dtype).reshape(into.shape)
        _cast(words, 8 * (width - nbytes), signs)
        np.bitwise_and(signs, sign, out=signs)
        np.bitwise_or(into, signs, out=into)
    elif nbytes == 1:
        _cast(words, 8 * begin - 1, into)
    else:
        raise ValueError("the top byte of turned words is a part of its own")


def _cast(words: Words, shift: int, into: Words) -> None:
    if shift:
        np.right_shift(words, words.dtype.type(shift), out=into, casting="unsafe")
    else:
        np.copyto(into, words, casting="unsafe")


def turned(words: Words) -> Words:
    """Return words whose sign and the eight bits below it have changed places; those of one byte as they are."""
    if words.itemsize == 1:
        return words
    kind, top = words.dtype.type, 8 * words.itemsize - 1
    exponent = kind(0xFF << (top - 8))
    made: Words = (words & exponent) << kind(1)
    made |= (words >> kind(top)) << kind(top - 8)
    made |= words & kind((1 << (top - 8)) - 1)
    return made


def merge(parts: list[Words], into: Words, scratch: Bytes, *, turn: bool) -> None:
    """Fill `into` with words made of parts, the lowest first: undo `split`. Needs scratch of its size."""
    held: Words = scratch[: into.nbytes].view(into.dtype)
    if turn and into.itemsize > 1:
        _merge_turned(parts, into, held)
    else:
        _merge(parts, into, held)


def _merge(parts: list[Words], into: Words, held: Words) -> None:
    np.copyto(into, parts[0], casting="unsafe")
    shift = 8 * parts[0].itemsize
    for part in parts[1:]:
        # By a product, as numpy casts for it faster than for a shift.
        np.multiply(part, into.dtype.type(1 << shift), out=held, dtype=into.dtype)
        np.bitwise_or(into, held, out=into)
        shift += 8 * part.itemsize


def _merge_turned(parts: list[Words], into: Words, held: Words) -> None:
    *low, signed, top = parts
    # The part below the top begins with the sign: taken for a signed number, it fills all bits above with it.
    signs: Words = signed.view(f"<i{signed.itemsize}")
    shift = 8 * (into.itemsize - 1 - signed.itemsize)
    if low:
        _merge(low, into, held)
        np.multiply(signs, 1 << shift, out=held.view(f"<i{into.itemsize}"), dtype=f"<i{into.itemsize}")
        np.bitwise_or(into, held, out=into)
    else:
        np.copyto(into, signs, casting="unsafe")
    kind, exponent = into.dtype.type, 8 * into.itemsize - 9
    np.bitwise_and(into, ~kind(0xFF << exponent), out=into)
    np.multiply(top, kind(1 << exponent), out=held, dtype=into.dtype)
    np.bitwise_or(into, held, out=into)


# Lossless compression of numbers, above all of floating point ones.
#
# Each frame is looked at: which bytes of its words vary little is found out, not told. Those bytes are taken out into
# planes and coded by Huffman codes (in the form of zstd frames), the others are stored as they are. Frames that
# repeat
# one word, such as zeros, become a few bytes; those that look random are stored raw, at about the speed of a copy.
# Where
# bytes repeat in runs (counters, masks, text), planes are compressed by zstd with matches.
#
# The frame says what was done (numbers are little-endian):
#
#     u8 kind = 0                                                             the bytes, as they are
#     u8 kind = 1 | u64 nbytes | 1, 2, 4 or 8 bytes                           these bytes, repeated up to nbytes
#     u8 kind = 2 | u64 nbytes | u8 width | u8 turn | u8 parts
#                 | parts x (u8 bytes, u8 coder, u64 stored) | bodies | tail  words taken apart, the lowest part first
#
# A part is 1, 2 or 4 bytes of every word; coder 0 stores it as it is, coder 1 (only for one byte) as a zstd frame.
# With
# turn = 1 words were turned (`planes`), and their top byte is a part. The tail is what is behind the last whole word.

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


# A quick look at frames: are these numbers, how wide, and which of their bytes are worth coding?
#
# A few kilobytes from several places of each are counted. What counting says about the bytes at each place of a word
# is
# what an entropy coder would make of them, near enough; nothing needs to know a dtype. What is said of a frame
# depends on
# its own bytes alone. Yet several are looked at together: numpy takes the interpreter's lock anew for every small
# step,
# and threads that all do so wait for one another more than they work.

Counts = npt.NDArray[np.int64]

WORST = 7.7
"""Bits a byte takes, from which on coding it is not worth its time."""
_WIDER = 0.01
"""What part of a frame wider words have to save in order to be preferred."""
_TURNED = 0.004
"""What part of a frame turned words have to save: turning costs a tenth of the time."""
_MISSED = 1 / (2 * math.log(2))
_REGIONS = 8
_REGION = 1024
_SAMPLE_NBYTES = _REGIONS * _REGION
_WIDTHS = np.repeat((1, 2, 4, 8), (1, 2, 4, 8))
"""Of which words each byte is one, of all that are counted."""


class FrameStats(NamedTuple):
    """What a frame seems to be."""

    width: int
    """Bytes of a word."""
    turn: bool
    """Whether words had better be turned (`planes`)."""
    bits: tuple[float, ...]
    """What each byte of a word would take, the lowest first."""


def analyze(frames: Sequence[memoryview]) -> list[FrameStats]:
    """Say what frames seem to be; each has at least eight bytes."""
    samples = [_sample(frame) for frame in frames]
    found: list[FrameStats] = []
    for nbytes, alike in groupby(samples, len):
        group = list(alike)
        found += _looks(np.frombuffer(b"".join(group), np.uint8).reshape(len(group), nbytes))
    return found


def _sample(data: memoryview) -> bytes:
    """Return a few kilobytes of a frame, from all over it; whole words of eight bytes."""
    if data.nbytes <= 2 * _SAMPLE_NBYTES:
        return bytes(data[: min(data.nbytes, _SAMPLE_NBYTES) // 8 * 8])
    step = (data.nbytes - _REGION) // (_REGIONS - 1) // 8 * 8
    return b"".join([data[at * step : at * step + _REGION] for at in range(_REGIONS)])


def _looks(samples: Bytes) -> list[FrameStats]:
    """Say what frames seem to be, from samples of one size: a row for each."""
    eight = _counts(samples, 8)
    # Of words of one byte, of two, of four and of eight, one behind the other.
    counts: Counts = np.empty((len(samples), 15, 256), np.int64)
    counts[:, 7:] = eight
    np.add(eight[:, :4], eight[:, 4:], out=counts[:, 3:7])
    np.add(counts[:, 3:5], counts[:, 5:7], out=counts[:, 1:3])
    np.add(counts[:, 1], counts[:, 2], out=counts[:, 0])
    found = [_straight(bits) for bits in _bits(counts, samples.shape[1] // _WIDTHS)]
    for width in {each.width for each in found} - {1}:
        rows = [row for row, each in enumerate(found) if each.width == width]
        for row, its in zip(rows, _turned_bits(samples[rows], width), strict=True):
            bits = (*found[row].bits[:-2], *its)
            if sum(bits) < sum(found[row].bits) - 8 * _TURNED * width:
                found[row] = FrameStats(width, turn=True, bits=bits)
    return found


def _straight(bits: list[float]) -> FrameStats:
    """Choose the width of words, from what their bytes take: of words of one byte first, then of two, four, eight."""
    width, best = 1, bits[:1]
    for wider in (2, 4, 8):
        its = bits[wider - 1 : 2 * wider - 1]
        if sum(its) / wider < sum(best) / width - 8 * _WIDER:
            width, best = wider, its
    return FrameStats(width, turn=False, bits=tuple(best))


def _turned_bits(samples: Bytes, width: int) -> list[list[float]]:
    """Return what the two upper bytes of turned words take; the others are as they were."""
    uppers = samples.view(type_of(2))[:, width // 2 - 1 :: width // 2]
    return _bits(_counts(_turned_pairs().take(uppers).view(np.uint8), 2), np.array([uppers.shape[1]]))


def _counts(samples: Bytes, width: int) -> Counts:
    """Return how often each byte stands at each place of words of this width, for each sample."""
    rows, nbytes = samples.shape
    numbers = samples.reshape(rows, nbytes // width, width) + _first_numbers(rows, width)
    return np.bincount(numbers.ravel(), minlength=rows * width * 256).reshape(rows, width, 256)


def _bits(counts: Counts, totals: Counts) -> list[list[float]]:
    """Return the entropy of bytes in bits, from how often each was counted, and how many that were."""
    sums = _logs().take(counts).sum(axis=2)
    bits: list[list[float]] = np.minimum(8.0, np.log2(totals) - (sums + _MISSED) / totals).tolist()
    return bits


@cache
def _first_numbers(rows: int, width: int) -> Counts:
    return np.arange(0, rows * width * 256, 256).reshape(rows, 1, width)


@cache
def _turned_pairs() -> npt.NDArray[np.uint16]:
    """Return what every word of two bytes becomes when it is turned."""
    return turned(np.arange(1 << 16, dtype=type_of(2)))


@cache
def _logs() -> npt.NDArray[np.float64]:
    # With the correction of Miller and Madow for how few bytes are counted: random ones would seem to be less so.
    numbers = np.arange(_SAMPLE_NBYTES + 1)
    logs: npt.NDArray[np.float64] = numbers * np.log2(np.maximum(numbers, 1)) - _MISSED * (numbers > 0)
    return logs


# The encoding of numbers: what to do with each frame is found out, then frames alike are taken apart together.
#
# Numpy takes the interpreter's lock anew for each step, and threads that wait for it hardly work: so steps are few
# and
# large, and are done for all frames of a batch at once. New memory costs as much as what is done in it: so it is
# kept.

_LEAST_NBYTES = 64
"""Frames below this are not worth a look."""
_TRIAL_NBYTES = 8192
_SAVES = 0.98
"""What is not smaller than this part of what it was is stored as it was, to be read faster."""
_REPEATS = 0.95
"""Where matches make this of what Huffman codes would, planes are compressed with matches."""


class _Plan(NamedTuple):
    """How to take frames apart."""

    width: int
    turn: bool
    wanted: tuple[bool, ...]
    """Which bytes of words are to be coded, the lowest first."""
    has_matches: bool

    def parts(self) -> list[tuple[int, int, bool]]:
        """
        Cut words: bytes that are wanted one by one, those between them together.

        Returns: for each part its first byte, how many it has, and whether it is wanted.
        """
        parts = []
        begin, end = 0, self.width - self.turn  # the top byte of turned words is a part of its own
        while begin < self.width:
            # As few parts as possible: each is a pass over the frame.
            sizes = (size for size in (4, 2) if begin + size <= end and not any(self.wanted[begin : begin + size]))
            nbytes = next(sizes, 1)
            parts.append((begin, nbytes, self.wanted[begin]))
            begin += nbytes
        return parts


class _Frame:
    """What is stored for a frame, as it grows in the room for it."""

    def __init__(self, room: Bytes, head: bytes, body_at: int) -> None:
        self._room = room
        self._head = bytearray(head)
        self.end = body_at

    def add(self, nbytes: int, coder: int, size: int) -> Bytes:
        """Return where the body of the next part goes."""
        self._head += PART.pack(nbytes, coder, size)
        return self.take(size)

    def take(self, size: int) -> Bytes:
        """Return the next bytes."""
        self.end += size
        return self._room[self.end - size : self.end]

    def done(self) -> Bytes:
        """Return all of it."""
        self._room[: len(self._head)] = np.frombuffer(self._head, np.uint8)
        return self._room[: self.end]


class Encoder:
    """Encodes frames; used by one thread."""

    def __init__(self, engine: Engine) -> None:
        self._literals = engine.literal_frames()
        self._matches = engine.frames(1)
        self._scratch = Scratch()
        self._signs = Scratch()

    def encode(self, plain: Bytes, nbytes: int, rooms: Bytes) -> Iterator[Bytes | bytes]:
        """
        Give what is stored for each frame, one when it is asked for.

        Args:
            plain: the frames, one behind the other.
            nbytes: their size, but for that of the last.
            rooms: a row for each, with `MOST_HEAD_NBYTES` more than a frame has.

        """
        frames = [plain[at : at + nbytes] for at in range(0, max(plain.size, 1), max(nbytes, 1))]
        plans = self._plans(frames)
        # What does not lie as words should has to be copied: not all frames at once.
        alone = bool(plain.ctypes.data % 8)
        kinds = [(frame.size, plan, alone and row) for row, (frame, plan) in enumerate(zip(frames, plans, strict=True))]
        for (size, plan, _), alike in groupby(range(len(frames)), kinds.__getitem__):
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
                yield _raw(frames[row], rooms[row]) if stored is None else stored

    def _plans(self, frames: list[Bytes]) -> list[bytes | _Plan | None]:
        """Say what to make of frames: the word that one repeats, or how to take it apart; None: nothing."""
        plans: list[bytes | _Plan | None] = [_repeated(frame) for frame in frames]
        rows = [row for row, frame in enumerate(frames) if plans[row] is None and frame.size >= _LEAST_NBYTES]
        for row, found in zip(rows, analyze([frames[row].data for row in rows]), strict=True):
            has_matches = self._has_matches(frames[row], found)
            wanted = tuple(has_matches or bits < WORST for bits in found.bits)
            plans[row] = _Plan(found.width, found.turn, wanted, has_matches) if any(wanted) else None
        return plans

    def _has_matches(self, plain: Bytes, found: FrameStats) -> bool:
        """Say whether a piece of the frame shrinks more by matches than by codes for single bytes."""
        begin = max(plain.size - _TRIAL_NBYTES, 0) // 16 * 8
        count = min(plain.size - begin, _TRIAL_NBYTES) // found.width
        piece = plain[begin : begin + count * found.width].reshape(count, found.width)
        size = len(self._matches(np.ascontiguousarray(piece.T).data))
        return size < _REPEATS * piece.size * sum(min(each, 8.0) for each in found.bits) / (8 * found.width)

    def _planes(self, plain: Bytes, plan: _Plan, rooms: Bytes) -> list[Bytes | None]:
        """
        Take apart frames of one size, a row of `plain` for each.

        Returns: what is stored for each, somewhere in its row of `rooms`; None for those that would not be smaller.
        """
        number, nbytes = plain.shape
        count = nbytes // plan.width
        words = planes = aligned(plain[:, : count * plan.width], plan.width)
        signs = self._signs.get(number * nbytes // 2)
        if plan.width > 1:
            planes = self._scratch.get(number * count).reshape(number, count)
        compress = self._matches if plan.has_matches else self._literals
        parts = plan.parts()
        head = KIND.pack(PLANES, nbytes) + LAYOUT.pack(plan.width, plan.turn, len(parts))
        body_at = len(head) + len(parts) * PART.size
        rooms = rooms[:, -body_at % 8 :]  # so that what is behind the header lies as words should
        frames = [_Frame(room, head, body_at) for room in rooms]
        for begin, size, is_wanted in parts:
            if is_wanted:
                if plan.width > 1:
                    split(words, begin, planes, signs, turn=plan.turn)
                for frame, plane in zip(frames, planes, strict=True):
                    coded = np.frombuffer(compress(plane.data), np.uint8)
                    body, coder = (coded, ZSTD) if coded.size < count else (plane, STORED)
                    np.copyto(frame.add(1, coder, body.size), body)
                continue
            begins = {frame.end for frame in frames}
            bodies = [frame.add(size, STORED, size * count).view(type_of(size)) for frame in frames]
            if len(begins) == 1:
                at = begins.pop()
                split(words, begin, rooms[:, at : at + size * count].view(type_of(size)), signs, turn=plan.turn)
            else:  # behind parts that became more in one frame than in another
                for its_words, body in zip(words, bodies, strict=True):
                    split(its_words, begin, body, signs, turn=plan.turn)
        tails = plain[:, count * plan.width :]
        for frame, tail in zip(frames, tails, strict=True):
            np.copyto(frame.take(tail.size), tail)
        return [frame.done() if frame.end <= nbytes * _SAVES else None for frame in frames]


def _raw(plain: Bytes, room: Bytes) -> Bytes:
    room[0] = RAW
    np.copyto(room[1 : 1 + plain.size], plain)
    return room[: 1 + plain.size]


def _repeated(plain: Bytes) -> bytes | None:
    """Return the shortest word that is all there is in a frame; None if there is more, or hardly anything."""
    if plain.size < _LEAST_NBYTES:
        return None
    word = plain[:8].tobytes()
    if plain[-8:].tobytes() != (word + word)[plain.size % 8 :][:8]:
        return None  # most frames are told by this
    words = plain[: plain.size // 8 * 8].view(np.uint64)
    if words[words.size // 2] != words[0] or (words != words[0]).any():
        return None
    return next(word[:width] for width in WIDTHS if word == word[:width] * (8 // width))


class Float(CodecConfig, frozen=True):
    """Compresses numbers without loss; the smaller, the more alike their exponents are. Needs a module for zstd."""

    name = "float"

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        cls.from_recorded(recorded)
        return _FloatCodec(*need_engines("the codec 'float'"))


class _FloatCodec:
    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._reader = reader
        self._encoder = PerThread(lambda: Encoder(writer))
        self._scratch = PerThread(Scratch)

    def bound(self, nbytes: int) -> int:
        return nbytes + 1

    def room_nbytes(self, nbytes: int) -> int:
        return nbytes + MOST_HEAD_NBYTES

    def encode(self, data: memoryview, place: FramePlace) -> Buffer:  # noqa: ARG002 - the same at any place
        room = np.empty((1, self.room_nbytes(data.nbytes)), np.uint8)
        return next(self._encoded(data, data.nbytes, room))

    def encode_many(self, data: memoryview, places: Sequence[FramePlace], room: memoryview) -> Iterator[Buffer]:
        rooms: Bytes = np.frombuffer(room, np.uint8).reshape(len(places), -1)
        return self._encoded(data, places[0].nbytes, rooms)

    def _encoded(self, data: memoryview, nbytes: int, rooms: Bytes) -> Iterator[Buffer]:
        for stored in self._encoder.get().encode(np.frombuffer(data, np.uint8), nbytes, rooms):
            yield stored if isinstance(stored, bytes) else stored.data

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> Buffer:
        plain = np.empty(nbytes_of(data, place, most_nbytes), np.uint8)
        self.decode_into(data, place, plain.data)
        return plain.data

    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        nbytes = nbytes_of(data, place, into.nbytes)
        plain: Bytes = np.frombuffer(into, np.uint8)[:nbytes]
        stored: Bytes = np.frombuffer(data, np.uint8)
        if stored[0] == RAW:
            np.copyto(plain, stored[1:])
        elif stored[0] == SAME:
            _repeat(stored[KIND.size :], plain, place)
        else:
            self._merge(data, plain, place)
        return nbytes

    def _merge(self, data: memoryview, plain: Bytes, place: FramePlace) -> None:
        """Put words together again."""
        parts, width, turn = read_parts(data, plain.size, place)
        count = plain.size // width
        words: list[Words] = []
        for part in parts:
            body = part.body
            if part.coder == ZSTD:
                body = np.frombuffer(self._reader.whole(body.data, count), np.uint8)
                if body.size != count:
                    raise damaged(place, f"a plane has {body.size} bytes instead of {count}")
            words.append(aligned(body, part.nbytes))
        whole = plain[: count * width]
        view: Words = whole.view(type_of(width))
        scratch = self._scratch.get().get(whole.size)
        if view.flags.aligned:
            merge(words, view, scratch, turn=turn)
        else:
            held: Words = np.empty(count, type_of(width))
            merge(words, held, scratch, turn=turn)
            np.copyto(whole, held.view(np.uint8))
        tail = plain.size - count * width
        if tail:
            plain[count * width :] = np.frombuffer(data, np.uint8)[-tail:]


def _repeat(word: Bytes, plain: Bytes, place: FramePlace) -> None:
    if word.size not in WIDTHS:
        raise damaged(place, "the word it repeats has no size that words have")
    whole = np.resize(word, 8)
    count = plain.size // 8 * 8
    plain[:count].view(np.uint64)[:] = whole.view(np.uint64)[0]
    plain[count:] = whole[: plain.size - count]
