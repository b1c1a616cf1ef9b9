"""The float codec: what it makes of the numbers of a training, and that its parts are exact by themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.float import WIDTHS, analyze, merge, rotated, split, word_type
from shardkeep.format.frames import FRAME_NBYTES
from tests.codec.frames import coded, decoded, numbers


@pytest.mark.parametrize(
    ("kind", "width", "turn", "most"),
    [
        ("bf16", 2, True, 0.665),
        ("fp16", 2, False, 0.85),
        ("fp32", 4, True, 0.835),
        ("fp64", 8, False, 0.89),
        ("fp8 e4m3", 1, False, 0.825),
        ("fp8 e5m2", 1, False, 0.7),
        ("int8", 1, False, 0.81),
        ("tokens", 8, False, 0.26),
        ("counter", 8, False, 0.003),
        ("half zeros", 4, None, 0.51),
    ],
)
def test_sizes(kind, width, turn, most):
    """Words are found without knowing dtypes, and shrink as expected."""
    data = numbers(kind, FRAME_NBYTES)
    begin = (len(data) - FRAME_NBYTES) // 2
    data = data[begin : begin + FRAME_NBYTES]
    [found] = analyze([memoryview(data)])
    assert found.width == width
    assert turn is None or found.rotate == turn
    assert len(coded(CodecChain.begin(["float"]), data)) <= most * len(data)


@pytest.mark.parametrize(
    ("word", "most"), [(b"\0", 10), (b"\x80\x3f", 11), (b"\0\0\x80\x3f", 13), (bytes(range(8)), 17)]
)
@pytest.mark.parametrize("size", [64, 65, 71, FRAME_NBYTES, FRAME_NBYTES - 3])
def test_one_word_repeated_is_next_to_nothing(word, most, size):
    """Any word of up to eight bytes, also where the frame ends within one; one byte less alike is seen."""
    chain = CodecChain.begin(["float"])
    data = (word * size)[:size]
    stored = coded(chain, data)
    assert len(stored) == most
    assert decoded(chain, stored, size) == data
    for at in (0, 9, size // 2, size - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        stored = coded(chain, changed)
        assert decoded(chain, stored, size) == changed


def test_what_looks_random_is_left_alone():
    chain = CodecChain.begin(["float"])
    rng = np.random.default_rng(1)
    for size in (0, 1, 63, 100, 8191, 100_001, FRAME_NBYTES):
        data = rng.bytes(size)
        assert len(coded(chain, data)) == size + 1
    mixed = rng.bytes(50_000) + bytes(FRAME_NBYTES - 50_000)
    stored = coded(chain, mixed)
    assert len(stored) < 0.2 * len(mixed)
    assert decoded(chain, stored, len(mixed)) == mixed


WORDS = st.sampled_from(WIDTHS).flatmap(
    lambda width: st.tuples(
        st.lists(st.integers(0, (1 << 8 * width) - 1), min_size=1, max_size=40).map(
            lambda words: np.array(words, word_type(width))
        ),
        st.sampled_from([sizes for sizes in PARTITIONS if sum(sizes) == width]),
        st.booleans(),
    )
)
PARTITIONS = [
    (1,), (2,), (1, 1), (4,), (2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 4), (4, 2, 1, 1), (1, 2, 4, 1), (1,) * 8,
    (2, 2, 2, 1, 1), (1, 4, 2, 1),
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(WORDS)
def test_words_are_taken_apart_and_put_together(drawn):
    """Parts of any sizes are those of the turned words, in order, and make the same words again."""
    words, sizes, turn = drawn
    turn = turn and words.itemsize > 1 and sizes[-1] == 1
    scratch = np.empty(words.nbytes, np.uint8)
    begins = np.cumsum([0, *sizes[:-1]])
    parts = [np.empty(words.size, word_type(size)) for size in sizes]
    for begin, part in zip(begins, parts, strict=True):
        split(words, int(begin), part, scratch, rotate=turn)
    rows = (rotated(words) if turn else words).view(np.uint8).reshape(-1, words.itemsize)
    for begin, size, part in zip(begins, sizes, parts, strict=True):
        assert np.array_equal(part.view(np.uint8).reshape(-1, size), rows[:, begin : begin + size])
    made = np.empty_like(words)
    merge(parts, made, scratch, rotate=turn)
    assert np.array_equal(made, words)


def test_turned_words_have_the_exponent_on_top():
    """The top byte of a turned bf16 or fp32 number is its exponent, whatever its sign."""
    for value in (1.5, -1.5, 3e-5, -2e20):
        word = np.array([value], np.float32).view(np.uint32)
        exponent = int(word[0]) >> 23 & 0xFF
        assert int(rotated(word)[0]) >> 24 == exponent
        assert int(rotated((word >> 16).astype(np.uint16))[0]) >> 8 == exponent
