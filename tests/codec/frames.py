"""Frames to code, chains to code them with, and codecs of users' own."""

from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from shardkeep.codecs.base import CodecConfig, FramePlace
from shardkeep.codecs.keys import KeyRing

KEYS = KeyRing([bytes(range(32))])
OTHER_KEYS = KeyRing([bytes(range(1, 33))])
NAMES = ["zstd", "zstd:3", "zstd:-5", "lz4", "float", "aes"]


def place_of(data, number=3, offset=4096, file="save-1/0.skframes"):
    return FramePlace(file, number, offset, memoryview(data).nbytes)


def coded(chain, data, **place):
    return bytes(chain.encode(memoryview(data), [place_of(data, **place)])[0])


def decoded(chain, stored, nbytes, **place):
    into = bytearray(nbytes)
    chain.decode(memoryview(stored), memoryview(into), place_of(into, **place))
    return bytes(into)


@cache
def numbers(kind, count, seed=0):
    """Bytes of numbers as training has them."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(count).astype(np.float32) * np.float32(0.02)
    made = {
        "bf16": lambda: (normal.view(np.uint32) >> 16).astype(np.uint16),
        "fp16": lambda: normal.astype(np.float16),
        "fp32": lambda: normal,
        "fp64": lambda: normal.astype(np.float64) / 3,
        "fp8 e4m3": lambda: fp8(normal, torch.float8_e4m3fn),
        "fp8 e5m2": lambda: fp8(normal, torch.float8_e5m2),
        "odd floats": lambda: np.resize(np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 5e-324, 1e300]), count),
        "bits": lambda: rng.integers(0, 1 << 32, count, dtype=np.uint32),  # NaNs with every payload among them
        "int8": lambda: np.clip(rng.normal(0, 20, count), -128, 127).astype(np.int8),
        "tokens": lambda: rng.integers(0, 50_000, count, dtype=np.int64),
        "counter": lambda: np.arange(count),
        "mask": lambda: rng.random(count) < 0.1,
        "zeros": lambda: np.zeros(count, np.float32),
        "ones": lambda: np.ones(count, np.float64),
        "half zeros": lambda: np.where(np.arange(count) < count // 2, 0, normal),
    }
    return made[kind]().tobytes()


def fp8(values, dtype):
    """Numbers of eight bits, scaled to their range as those who train with them do."""
    values = torch.from_numpy(values)
    largest = values.abs().max() if len(values) else 1.0
    return (values * (torch.finfo(dtype).max / largest)).to(dtype).view(torch.uint8).numpy()


KINDS = ["bf16", "fp16", "fp32", "fp64", "odd floats", "bits", "int8", "tokens", "counter", "mask", "zeros", "ones"]
KINDS += ["half zeros", "fp8 e4m3", "fp8 e5m2"]


@st.composite
def frames(draw):
    """Any bytes at any alignment; or numbers, cut anywhere."""
    if draw(st.booleans()):
        data = draw(st.binary(max_size=300)) * draw(st.sampled_from([1, 1, 7, 100]))
    else:
        data = numbers(
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from([0, 1, 9, 100, 1000, 6000])),
            seed=draw(st.integers(0, 3)),
        )
    begin = draw(st.integers(0, 9))
    return memoryview(data)[begin : len(data) - draw(st.integers(0, 9))]


class Shout(CodecConfig, frozen=True):
    """A user's codec: it has a parameter, turns bits over, and binds frames to their number."""

    name = "shout"
    mask: int = 255

    @classmethod
    def from_text(cls, argument):
        return cls(int(argument or 255))

    @classmethod
    def open(cls, recorded, keys):
        return ShoutCodec(cls.from_recorded(recorded).mask)


class ShoutCodec:
    def __init__(self, mask):
        self.mask = mask

    def bound(self, nbytes):
        return nbytes + 2

    def encode(self, data, place):
        return bytes((place.number & 255, self.mask)) + bytes(byte ^ self.mask for byte in data)

    def decode(self, data, place, most_nbytes):
        if data[0] != place.number & 255:
            raise ValueError("not this frame")
        return bytes(byte ^ self.mask for byte in data[2:])
