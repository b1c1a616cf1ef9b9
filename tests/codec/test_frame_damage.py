"""Damage, enemies and wrong keys: always one of our errors; never a crash, a huge allocation or, encrypted, other bytes."""

import contextlib
import resource
import struct
import tracemalloc
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.codecs.base import without_keys
from shardkeep.codecs.chain import CodecChain
from shardkeep.errors import (
    DamagedCheckpoint,
    DamagedFrame,
    InvalidCodec,
    KeyMissing,
    NotAuthentic,
    UnknownCodec,
    WrongKey,
)
from tests.codec.frames import KEYS, NAMES, OTHER_KEYS, coded, decoded, numbers

DATA = numbers("bf16", 3000)
CHAINS = [["zstd"], ["lz4"], ["float"], ["aes"], ["float", "aes"], ["zstd", "lz4"], ["aes", "float"]]


def chain_of(codecs):
    return CodecChain.begin(codecs, keys=KEYS)


@pytest.mark.parametrize("codecs", CHAINS, ids="-".join)
def test_a_changed_byte(codecs):
    """Whichever byte of a frame changes, an encrypted one is refused, and any other is refused or has its length."""
    chain = chain_of(codecs)
    stored = coded(chain, DATA)
    for at in [*range(60), *range(60, len(stored), 97), *range(len(stored) - 20, len(stored))]:
        broken = bytearray(stored)
        broken[at] ^= 1 << at % 8
        if "aes" in codecs:
            with pytest.raises(DamagedCheckpoint):
                decoded(chain, broken, len(DATA))
        else:
            with contextlib.suppress(DamagedCheckpoint):
                decoded(chain, broken, len(DATA))


@pytest.mark.parametrize("codecs", CHAINS, ids="-".join)
def test_a_frame_that_was_cut_or_has_more(codecs):
    """Cut anywhere, or with anything behind it, a frame is damaged."""
    chain = chain_of(codecs)
    stored = coded(chain, DATA)
    for broken in (b"", stored[:1], stored[:9], stored[:29], stored[: len(stored) // 2], stored[:-1], stored + b"\0"):
        with pytest.raises(DamagedCheckpoint):
            decoded(chain, broken, len(DATA))


@pytest.mark.parametrize("codecs", [["float", "aes"], ["aes"], ["aes", "lz4"]], ids="-".join)
@pytest.mark.parametrize("place", [{"number": 4}, {"offset": 0}, {"file": "save-2/0.skframes"}], ids=str)
def test_a_frame_at_another_place(codecs, place):
    """An encrypted frame that stands where another one was, in its file or another, is not taken for it."""
    chain = chain_of(codecs)
    stored = coded(chain, DATA)
    with pytest.raises(NotAuthentic, match=r"frame \d of save-"):
        decoded(chain, stored, len(DATA), **place)
    assert decoded(chain, stored, len(DATA)) == DATA


def test_a_frame_of_another_checkpoint():
    one, other = chain_of(["aes"]), chain_of(["aes"])
    assert coded(one, DATA) != coded(one, DATA)  # each time with another nonce
    edited = CodecChain.opened([{**one.recorded[0], "salt": other.recorded[0]["salt"]}], keys=KEYS)
    for wrong in (other, edited):
        with pytest.raises(NotAuthentic):
            decoded(wrong, coded(one, DATA), len(DATA))


def test_frames_say_nothing():
    """Nothing of the plain bytes, the data key or the user's key can be seen in a frame or in what is recorded."""
    secret = b"attack at dawn. " * 50
    chain = chain_of(["aes"])
    stored = coded(chain, secret)
    assert b"dawn" not in stored
    assert len({stored[at : at + 16] for at in range(12, 800, 16)}) == 50
    assert bytes(range(32)).hex() not in repr(chain.recorded)
    assert bytes(range(32)).hex() not in repr(KEYS)


def test_wrong_and_missing_keys():
    """Each says which key is needed, and none gives bytes."""
    chain = chain_of(["float", "aes"])
    [key_id] = KEYS.ids
    with pytest.raises(WrongKey, match=f"encrypted with the key {key_id}; the given keys are {OTHER_KEYS.ids[0]}"):
        CodecChain.opened(chain.recorded, keys=OTHER_KEYS)
    with pytest.raises(KeyMissing, match=f"encrypted with the key {key_id}, and no key was given") as caught:
        CodecChain.opened(chain.recorded)
    assert "SHARDKEEP_KEY_FILE" in caught.value.hint
    with pytest.raises(KeyMissing, match="no key was given"):
        CodecChain.begin(["aes"])
    for wrapped, kind in [
        ({"key_id": key_id, "key": "00" * 40}, WrongKey),
        ({"key_id": key_id, "key": "00"}, WrongKey),
        ({"key_id": key_id, "key": "x"}, InvalidCodec),
        ({"key_id": key_id}, InvalidCodec),
        ("x", InvalidCodec),
    ]:
        with pytest.raises(kind):
            CodecChain.opened([{**chain.recorded[1], "wrapped": wrapped}], keys=KEYS)
    with pytest.raises(InvalidCodec, match="salt"):
        CodecChain.opened([{**chain.recorded[1], "salt": 5}], keys=KEYS)


def test_unknown_codecs():
    with pytest.raises(UnknownCodec, match=r"no codec named 'zip'; the codecs are aes,.* float, lz4,") as caught:
        CodecChain.begin(["zip"])
    assert "register_codec" in caught.value.hint
    with pytest.raises(UnknownCodec, match="no codec named 'zip'"):
        CodecChain.opened([{"name": "zip", "version": 1}])
    for name in ("zstd", "lz4", "float", "aes"):
        for version in (2, None, "1"):
            with pytest.raises(UnknownCodec, match=f"{name!r} was written by version {version!r}; this is version 1"):
                CodecChain.opened([{"name": name, "version": version}], keys=KEYS)


def test_macs():
    """Only chains with a secret have a MAC, of the data and the checkpoint, however keys are wrapped."""
    one, other = chain_of(["zstd", "aes"]), chain_of(["zstd", "aes"])
    assert chain_of(["zstd"]).mac(b"record") is None
    assert not chain_of(["zstd"]).is_secret
    assert one.is_secret
    assert len({one.mac(b"record"), one.mac(b"recorD"), other.mac(b"record")}) == 3
    assert CodecChain.opened(one.recorded, keys=KEYS).mac(b"record") == one.mac(b"record")
    assert without_keys(one.recorded) == [one.recorded[0], {**without_keys(one.recorded)[1]}]
    assert "wrapped" not in without_keys(one.recorded)[1]
    assert "salt" in without_keys(one.recorded)[1]


@cache
def zstd_bomb():
    import backports.zstd

    return backports.zstd.compress(bytes(1 << 28))


def zstd_window_bomb():
    import backports.zstd

    # Says nothing of its size, and asks for a window of 128 MiB.
    made = backports.zstd.ZstdCompressor(options={backports.zstd.CompressionParameter.window_log: 27})
    return made.compress(bytes(1000)) + made.flush()


def float_frame(nbytes, width=1, parts=((1, 1),), body=b"", turn=0):
    head = struct.pack("<BQBBB", 2, nbytes, width, turn, len(parts))
    return head + b"".join(struct.pack("<BBQ", size, coder, len(body)) for size, coder in parts) + body


BOMBS = {
    "zstd": lambda: ("zstd", b"\1" + zstd_bomb()),
    "window": lambda: ("zstd", b"\1" + zstd_window_bomb()),
    "raw zstd": lambda: ("zstd", bytes(100_000)),
    "lz4": lambda: ("lz4", b"\1\x1f\0\1\0" + b"\xff" * (1 << 20)),
    "same": lambda: ("float", struct.pack("<BQ", 1, 1 << 62) + b"\0"),
    "planes": lambda: ("float", float_frame(1 << 62)),
    "a plane": lambda: ("float", float_frame(1000, body=zstd_bomb())),
    "a plane of a size that is a lie": lambda: ("float", float_frame(1000, body=zstd_bomb()[:-4])),
    "raw float": lambda: ("float", bytes(100_000)),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("within", [False, True])
def test_bombs(bomb, within):
    """A small frame that stands for 256 MB, or says it stands for 4 EB, costs neither memory nor a wrong answer."""
    name, stored = BOMBS[bomb]()
    chain = chain_of([name])
    if within:
        lz4 = chain_of(["lz4"])
        stored = coded(lz4, stored)
        chain = CodecChain.opened(chain.recorded + lz4.recorded)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    with pytest.raises(DamagedFrame):
        decoded(chain, stored, 1000)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


HEADERS = [
    b"\3",
    b"\1",
    b"\2",
    struct.pack("<BQ", 1, 1000),
    struct.pack("<BQ", 1, 1000) + b"abc",
    struct.pack("<BQ", 2, 1000),
    float_frame(1000, width=3),
    float_frame(1000, width=0),
    float_frame(1000, width=2),
    float_frame(1000, turn=2),
    float_frame(1000, turn=1, parts=((1, 0),), body=bytes(1000)),
    float_frame(2, width=2, turn=1, parts=((2, 0),), body=bytes(2)),
    float_frame(1000, parts=()),
    float_frame(1000, parts=((1, 0),), body=bytes(999)),
    float_frame(1000, parts=((1, 2),), body=bytes(1000)),
    float_frame(1000, width=2, parts=((2, 1),), body=bytes(1000)),
    float_frame(1000, width=2, parts=((1, 0),), body=bytes(500)),
    float_frame(1000, width=4, parts=((3, 0), (1, 0)), body=bytes(500)),
    float_frame(1000, width=8, parts=((8, 1),), body=bytes(1000)),
    float_frame(1000, parts=((1, 0),), body=bytes(1000))[:-500],
    float_frame(1000, parts=((1, 0),), body=bytes(1000)) + b"x",
    float_frame(1000, parts=((1, 1),), body=b"no zstd"),
    float_frame(999, parts=((1, 0),), body=bytes(999)),
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_hostile_headers(number):
    with pytest.raises(DamagedFrame, match=r"frame 3 of save-1/0\.skframes|codec 'float' cannot read frame 3"):
        decoded(chain_of(["float"]), HEADERS[number], 1000)


@settings(max_examples=300, deadline=None)
@given(
    codecs=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
    stored=st.binary(max_size=200),
    nbytes=st.integers(1, 5000),
)
def test_anything_else(codecs, stored, nbytes):
    """Arbitrary bytes are refused or, where nothing is encrypted, may by chance be a frame."""
    with pytest.raises(DamagedFrame) if "aes" in codecs else contextlib.suppress(DamagedFrame):
        decoded(chain_of(codecs), stored, nbytes)


def test_more_than_was_written_is_said_to_be_so():
    """A frame that is larger than its place says has an error of its own, if the codec can detect it."""
    chain = chain_of(["float"])
    with pytest.raises(DamagedFrame, match="becomes 6000 bytes, expected at most 5000"):
        decoded(chain, coded(chain, DATA), 5000)
