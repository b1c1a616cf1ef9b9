"""Lossless compression of numbers, above all of floating point ones: `float_frames` says what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardkeep.codec.codecs import Codec, CodecConfig, FramePlace, Recorded
from shardkeep.codec.float_encoder import Encoder
from shardkeep.codec.float_frames import KIND, MOST_HEAD_NBYTES, RAW, SAME, ZSTD, damaged, nbytes_of, read_parts
from shardkeep.codec.planes import WIDTHS, Bytes, Scratch, Words, aligned, merge, type_of
from shardkeep.codec.zstd_codec import ForThread, need_engines

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shardkeep.codec.keys import KeySource
    from shardkeep.codec.zstd_engines import Engine


class Float(CodecConfig, frozen=True):
    """Compresses numbers without loss; the smaller, the more alike their exponents are. Needs a module for zstd."""

    name = "float"

    @classmethod
    def open(cls, recorded: Recorded, keys: KeySource | None) -> Codec:  # noqa: ARG003 - it has none
        """Return the codec."""
        cls.from_recorded(recorded)
        return _FloatCodec(*need_engines("the codec 'float'"))


class _FloatCodec:
    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._reader = reader
        self._encoder = ForThread(lambda: Encoder(writer))
        self._scratch = ForThread(Scratch)

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
