"""Bytes that no writer of ours would write: errors of ours come out, quickly and without memory."""

import contextlib
import functools
import random
import sys
import time
import tracemalloc
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import CheckpointError, MalformedFile, UnsupportedLeaf
from shardkeep.format.values import decode_value, encode_value
from tests.format.test_values import ARRAYS, FIXED, Opaque, ext, raw_ext

BIG = encode_value(1 << 200_000, key="k")

HOSTILE = {
    "nothing": b"",
    "two values": b"\x01\x02",
    "unused byte": b"\xc1",
    "map": b"\x81\x01\x02",
    "timestamp": b"\xd6\xff\0\0\0\0",
    "bad utf-8": b"\xa1\xff",
    "truncated": b"\xcb\0",
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "bin of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "str of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "ext of 4 GiB": b"\xc9\xff\xff\xff\xff\x04",
    "arrays of 65535, nested": b"\xdc\xff\xff" * 300,
    "65 levels": b"\x91" * 65 + b"\x01",
    "a million levels": b"\x91" * 1_000_000,
    "65 tuples": functools.reduce(lambda inner, _: raw_ext(4, b"\x91" + inner), range(65), b"\x01"),
    "unknown code": ext(99),
    "negative code": ext(-7, 1),
    "code 0": ext(0, 1),
    "payload is no array": raw_ext(4, b"\x01"),
    "payload is a map": raw_ext(4, b"\x80"),
    "payload is empty": raw_ext(4, b""),
    "payload is two": raw_ext(4, b"\x90\x90"),
    "bad surrogates": raw_ext(2, b"\xff"),
    "set of equals": ext(5, 1, 1),
    "set of lists": ext(5, [1]),
    "dict of odd length": ext(7, 1),
    "dict with equal keys": ext(7, 1, 2, True, 3),
    "dict with a list as key": ext(7, [], 2),
    "complex of strings": ext(9, "1", "2"),
    "complex of three": ext(9, 1.0, 2.0, 3.0),
    "range of step 0": ext(10, 1, 2, 0),
    "slice of two": ext(11, 1, 2),
    "datetime of month 13": ext(13, 2020, 13, 1, 0, 0, 0, 0, 0, None),
    "datetime in a list": ext(13, 2020, 12, 1, 0, 0, 0, 0, 0, [1]),
    "datetime from bytes": ext(13, b"\x07\xe4\x01\x01\0\0\0\0\0\0"),
    "date of a huge year": raw_ext(14, b"\x93" + BIG + b"\x01\x01"),
    "time of hour 99": ext(15, 99, 0, 0, 0, 0, None),
    "timedelta too long": ext(16, 10**12, 0, 0),
    "timezone of two days": ext(17, timedelta(days=2)),
    "timezone of nothing": ext(17),
    "zone with dots": ext(18, "../../etc/passwd"),
    "decimal": ext(19, "one"),
    "decimal of an int": raw_ext(19, b"\x91" + BIG),
    "fraction over 0": ext(20, 1, 0),
    "fraction too large": raw_ext(20, b"\x92" + BIG + BIG),
    "uuid of 3 bytes": ext(21, b"abc"),
    "path of an int": ext(22, False, False, 1),
    "enum of three": ext(23, "a", "b", "c"),
    "enum of ints": ext(23, 1, 2, 3, 4),
    "torch dtype": ext(24, "nn"),
    "torch dtype that is a layout": ext(24, "strided"),
    "torch device": ext(25, "toaster:1"),
    "torch size of strings": ext(26, "a"),
    "torch layout": ext(27, "float32"),
    "torch memory format": ext(28, "__name__"),
    "numpy scalar too short": ext(29, "<f8", b"1"),
    "numpy object scalar": ext(29, "|O", b"12345678"),
    "numpy object scalar 2": ext(29, "O8", b"12345678"),
    "numpy text of an int": ext(30, 3),
    "numpy dtype": ext(31, "float"),
    "numpy dtype, object": ext(31, "O"),
    "numpy dtype, commas": ext(31, "i4,O"),
    "numpy dtype, class": ext(31, "builtins.object"),
    "numpy dtype, too wide": ext(31, "V999999999"),
    "numpy dtype, unit": ext(31, "M8[parsec]"),
    "numpy dtype, empty": ext(31, []),
    "numpy dtype, dict": ext(31, {}),
    "numpy dtype, unknown": ext(31, ["what", 1]),
    "numpy dtype, huge array": ext(31, ["array", "<f8", [2**40, 2**40]]),
    "numpy dtype, negative array": ext(31, ["array", "<f8", [-1]]),
    "numpy dtype, object field": ext(31, ["struct", 8, False, [["a", "|O", 0, None]]]),
    "numpy dtype, equal fields": ext(31, ["struct", 8, False, [["a", "<i4", 0, None], ["a", "<i4", 4, None]]]),
    "numpy dtype, field outside": ext(31, ["struct", 4, False, [["a", "<i4", 2, None]]]),
    "numpy dtype, negative offset": ext(31, ["struct", 4, False, [["a", "<i4", -2, None]]]),
    "numpy dtype, field of int": ext(31, ["struct", 4, False, [3]]),
    "numpy dtype, huge struct": ext(31, ["struct", 2**62, False, []]),
    "numpy dtype, title of list": ext(31, ["struct", 4, False, [["a", "<i4", 0, []]]]),
    "numpy array too short": ext(32, "<f8", [2], False, b"12345678"),
    "numpy array of negative shape": ext(32, "<f8", [-1, -1], False, b"12345678"),
    "numpy array of overflowing shape": ext(32, "<f8", [2**32, 2**32, 0], False, b""),
    "numpy array of nothing, huge": ext(32, "|V0", [2**60], False, b""),
    "numpy array of 99 dimensions": ext(32, "|u1", [1] * 99, False, b"1"),
    "numpy array of objects": ext(32, "|O", [1], False, b"12345678"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_malformed_bytes_raise_malformed_file(data):
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile, match=r"^'model\.x': stored value is malformed"):
            decode_value(data, key="model.x", allow_pickle=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data) + 200_000
    assert time.process_time() - began < 5


def test_keys_of_one_hash_do_not_hang():
    """A forged set whose items all have one hash is refused before it takes quadratic time."""
    prime = sys.hash_info.modulus
    items = [prime * i for i in range(50_000)]
    began = time.process_time()
    for forged in (ext(5, *items), ext(7, *items)):
        with pytest.raises(MalformedFile, match="one hash"):
            decode_value(forged, key="k")
    assert time.process_time() - began < 5


def test_what_only_this_machine_lacks_is_no_damage():
    for data in (ext(18, "Mars/Olympus"), ext(29, ["long double", 99, "<f16"], b"0" * 16)):
        with pytest.raises(UnsupportedLeaf, match="'k' cannot be rebuilt here"):
            decode_value(data, key="k")


def corpus():
    plain = [encode_value(value, key="k") for value in [*FIXED, *ARRAYS] if len(repr(value)) < 500]
    return [*plain, encode_value(list(ARRAYS[:3]), key="k"), encode_value([Opaque()], key="k", allow_pickle=True)]


def mutated(rng, data, others):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        choice = rng.randrange(5)
        if choice == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif choice == 1:
            del data[at : at + rng.randint(1, 4)]
        elif choice == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        elif choice == 3:
            data[at:at] = rng.choice(others)
        elif at < len(data):
            data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_mutated_bytes_raise_only_our_errors():
    rng = random.Random(20260730)
    seeds = corpus()
    refused = 0
    for _ in range(40_000):
        data = mutated(rng, rng.choice(seeds), seeds)
        try:
            decode_value(data, key="k")
        except CheckpointError:
            refused += 1
    assert refused > 10_000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.tuples(st.integers(0, 40), st.binary(max_size=40)).map(lambda p: raw_ext(*p)))
def test_random_bytes_raise_only_our_errors(data):
    with contextlib.suppress(CheckpointError):
        decode_value(data, key="k")
