"""
The encoding of numbers: what to do with each frame is found out, then frames alike are taken apart together.

Numpy takes the interpreter's lock anew for each step, and threads that wait for it hardly work: so steps are few and
large, and are done for all frames of a batch at once. New memory costs as much as what is done in it: so it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkeep.codec.float_frames import KIND, LAYOUT, PART, PLANES, RAW, SAME, STORED, ZSTD
from shardkeep.codec.float_look import WORST, Look, looks
from shardkeep.codec.planes import WIDTHS, Bytes, Scratch, aligned, split, type_of

if TYPE_CHECKING:
    from shardkeep.codec.zstd_engines import Engine

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
        for row, found in zip(rows, looks([frames[row].data for row in rows]), strict=True):
            has_matches = self._has_matches(frames[row], found)
            wanted = tuple(has_matches or bits < WORST for bits in found.bits)
            plans[row] = _Plan(found.width, found.turn, wanted, has_matches) if any(wanted) else None
        return plans

    def _has_matches(self, plain: Bytes, found: Look) -> bool:
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
