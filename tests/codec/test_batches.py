"""Frames that are encoded together: each becomes what it would have become by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.codecs.base import FramePlace
from shardkeep.codecs.chain import CodecChain
from shardkeep.errors import CodecFailed
from tests.codec.frames import KEYS, KINDS, NAMES, decoded, numbers


@st.composite
def batches(draw):
    """Frames of one size, of the same and of different kinds of numbers, and a shorter one behind them; at any address."""
    size = draw(st.sampled_from([1, 63, 64, 100, 1000, 4097, 20_000]))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    frames = [numbers(kind, size, seed=draw(st.integers(0, 1)))[:size] for kind in kinds]
    frames[-1] = frames[-1][: draw(st.sampled_from([size, size, max(1, size - 3), (size + 1) // 2]))]
    return frames, draw(st.integers(0, 8))


def encoded(chain, frames):
    places = [FramePlace("f", number, 1000 * number, len(frame)) for number, frame in enumerate(frames)]
    return list(zip(places, chain.encode(memoryview(b"".join(frames)), places), strict=True))


def check(chain, frames, stored):
    for frame, (place, each) in zip(frames, stored, strict=True):
        assert decoded(chain, each, len(frame), number=place.number, offset=place.offset, file="f") == frame


@settings(max_examples=200, deadline=None)
@given(batch=batches(), codecs=st.lists(st.sampled_from([*NAMES, "float", "float"]), max_size=2))
def test_a_batch_is_what_its_frames_are(batch, codecs):
    """Whatever stands beside it, a frame is coded the same, but for encryption, and all of a batch is there."""
    frames, begin = batch
    chain = CodecChain.begin(codecs, keys=KEYS)
    places = [FramePlace("f", number, 1000 + number, len(frame)) for number, frame in enumerate(frames)]
    data = memoryview(bytes(begin) + b"".join(frames))[begin:]
    stored = chain.encode(data, places)
    check(chain, frames, zip(places, stored, strict=True))
    if "aes" not in codecs:
        for frame, place, each in zip(frames, places, stored, strict=True):
            assert bytes(each) == bytes(chain.encode(memoryview(frame), [place])[0])


def test_parts_behind_parts_of_other_lengths():
    """Words whose low byte is coded, to another length in each frame, and whose others are stored as they are."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (4, 5000), dtype=np.uint32)
    for row, most in zip(words, (2, 20, 60, 90), strict=True):
        row[:] = row & 0xFFFFFF00 | rng.integers(0, most, row.size, dtype=np.uint32)
    chain = CodecChain.begin(["float"])
    frames = [row.tobytes() for row in words]
    stored = encoded(chain, frames)
    check(chain, frames, stored)
    sizes = {len(each) for _, each in stored}
    assert len(sizes) == 4
    assert max(sizes) < 0.98 * len(frames[0])


class Breaks:
    """A first codec that takes batches, and fails at the second frame."""

    def bound(self, nbytes):
        return nbytes

    def encode(self, data, place):
        raise OSError("no")

    def encode_many(self, data, places):
        yield b"fine"
        raise OSError("no")

    def decode(self, data, place, most_nbytes):
        raise OSError("no")


class GivesOne(Breaks):
    """One that gives less than it was asked for."""

    def encode_many(self, data, places):
        yield b"fine"


class FailsAtOnce(Breaks):
    """One that is no generator."""

    def encode_many(self, data, places):
        raise OSError("no")


@pytest.mark.parametrize(
    ("codec", "what"),
    [
        (Breaks(), r"1 of f \(bytes 4 to 8\): OSError"),
        (GivesOne(), r"1 of f \(bytes 4 to 8\): .*it returned fewer frames"),
        (FailsAtOnce(), r"0 of f \(bytes 0 to 4\): OSError"),
    ],
)
def test_a_failure_names_its_frame(codec, what):
    chain = CodecChain([{"name": "breaks"}], [codec])
    places = [FramePlace("f", number, 4 * number, 4) for number in range(3)]
    with pytest.raises(CodecFailed, match=rf"the codec 'breaks' failed on frame {what}"):
        chain.encode(memoryview(bytes(12)), places)
