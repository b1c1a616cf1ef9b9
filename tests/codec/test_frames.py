"""Chains of codecs: every frame comes back bit for bit, in any order, on any thread, and is no larger than was said."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.compression import Zstd
from shardkeep.errors import InvalidCodec
from shardkeep.format.frames import FRAME_NBYTES
from tests.codec.frames import KEYS, KINDS, NAMES, coded, decoded, frames, numbers, place_of


@settings(max_examples=300, deadline=None)
@given(codecs=st.lists(st.sampled_from(NAMES), max_size=4), data=frames(), offset=st.integers(0, 1 << 60))
def test_any_frame_through_any_chain(codecs, data, offset):
    chain = CodecChain.begin(codecs, keys=KEYS)
    stored = coded(chain, data, offset=offset)
    assert len(stored) <= chain.bound(len(data))
    assert decoded(CodecChain.opened(chain.recorded, keys=KEYS), stored, len(data), offset=offset) == data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", ["zstd", "lz4", "float", "aes"])
def test_whole_frames_of_every_kind_of_number(codec, kind):
    """Frames of about the usual size, in memory of every alignment, into memory of every alignment."""
    data = numbers(kind, FRAME_NBYTES // 4)[:FRAME_NBYTES]
    chain = CodecChain.begin([codec], keys=KEYS)
    memory = bytearray(FRAME_NBYTES + 8)
    for begin in (0, 1, 4):
        plain = memoryview(memory)[begin : begin + len(data)]
        plain[:] = data
        stored = bytearray(begin) + coded(chain, plain)
        plain[:] = bytes(len(data))
        chain.decode(memoryview(stored)[begin:], plain, place_of(plain))
        assert plain == data


def test_the_order_is_that_of_the_list():
    """The first codec gets the plain bytes: compressed and then encrypted is small, the other way round is not."""
    zeros = bytes(100_000)
    small, large = (CodecChain.begin(codecs, keys=KEYS) for codecs in (["zstd", "aes"], ["aes", "zstd"]))
    assert len(coded(small, zeros)) < 200
    assert len(coded(large, zeros)) > 100_000
    assert [each["name"] for each in small.recorded] == ["zstd", "aes"]


def test_no_codecs_no_copies():
    chain = CodecChain.begin([])
    data = memoryview(b"abc")
    assert chain.encode(data, [place_of(data)]) == [data]
    assert (chain.bound(5), chain.recorded, chain.is_secret, chain.mac(b"x")) == (5, [], False, None)
    assert decoded(chain, data, 3) == b"abc"


def test_many_threads_on_one_chain():
    chain = CodecChain.begin(["float", "zstd", "aes"], keys=KEYS)
    plain = [numbers(kind, 20_000 + at, seed=at) for at, kind in enumerate(KINDS * 4)]

    def there_and_back(number):
        stored = coded(chain, plain[number], number=number)
        return decoded(chain, stored, len(plain[number]), number=number) == plain[number]

    order = random.Random(1).sample(range(len(plain)), len(plain))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, order))


def test_what_is_said_of_codecs_and_what_is_recorded():
    """Names, names with an argument and configs mean the same; the record is JSON with the version and no secret."""
    assert CodecChain.begin(["zstd:7"]).recorded == CodecChain.begin([Zstd(level=7)]).recorded
    assert CodecChain.begin("zstd").recorded == [{"name": "zstd", "version": 1, "level": 1}]
    for wrong, says in [
        (["zstd:x"], "takes a level"),
        (["zstd:99"], "levels"),
        (["float:3"], "no argument after a colon"),
        ([3], "is not a codec"),
    ]:
        with pytest.raises(InvalidCodec, match=says):
            CodecChain.begin(wrong)
    for field, value in [("level", "high"), ("level", 99), ("levels", 1)]:
        with pytest.raises(InvalidCodec, match="is invalid"):
            CodecChain.opened([{"name": "zstd", "version": 1, field: value}])
    for senseless in ({}, {"name": 3}, "zstd", None):
        with pytest.raises(InvalidCodec, match="without a name"):
            CodecChain.opened([senseless])


def test_numpy_arrays_and_other_memory_are_taken():
    chain = CodecChain.begin(["float", "aes"], keys=KEYS)
    array = np.arange(1000, dtype=np.float32)
    array.setflags(write=False)
    stored = memoryview(chain.encode(memoryview(array), [place_of(array)])[0])
    assert decoded(chain, stored, array.nbytes) == array.tobytes()
