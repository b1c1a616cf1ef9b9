"""Frames on their way into a blob: where they lie in memory, and codecs that make, or promise, much more than they get."""

import pytest
import torch

import shardkeep as sk
from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.chain import register_codec
from shardkeep.errors import StorageError
from shardkeep.storage.buffers import ALIGNMENT, address_of
from shardkeep.storage.memory import MemoryStore
from tests.codec_engine.scene import MIB, OPTIONS
from tests.engine.samples import bits, blank_like


class Stretch(CodecConfig, frozen=True):
    """A user's codec that says it might make many times as much, and makes so many times as much."""

    name = "test-stretch"
    says: int = 8
    times: int = 1

    @classmethod
    def open(cls, recorded, keys):
        config = cls.from_recorded(recorded)
        return _Stretches(config.says, config.times)


class _Stretches:
    def __init__(self, says, times):
        self.says, self.times = says, times

    def bound(self, nbytes):
        return self.says * nbytes + 64

    def encode(self, data, place):
        return bytes(data) * self.times

    def decode(self, data, place, most_nbytes):
        return data[: data.nbytes // self.times]


register_codec(Stretch)


@pytest.mark.parametrize("frames", [3, 4])
@pytest.mark.parametrize("says", [6, 16])
def test_a_generous_codec_behind_float(frames, says):
    """What `float` made of the frames of a batch is still there when the second codec comes to them."""
    state = {"w": torch.randn(frames * MIB // 2).bfloat16()}
    store = MemoryStore()
    sk.save(state, store, codecs=["float", Stretch(says)], options=OPTIONS)
    found = blank_like(state)
    sk.load(found, store, options=OPTIONS)
    assert bits(found) == bits(state)


def test_a_frame_that_becomes_too_large():
    with pytest.raises(StorageError, match=r"made 5242880 bytes of a frame of 1048576 at offset \d+"):
        sk.save({"w": torch.ones(MIB)}, MemoryStore(), codecs=[Stretch(5, 5)])


@pytest.mark.parametrize("codecs", [["float"], ["zstd"], ["float", "aes"]])
def test_frames_lie_in_memory_as_they_will_on_the_disk(monkeypatch, codecs):
    """As far into a page as into the blob's: so a disk can take them from where they are."""
    seen = []
    create = MemoryStore.create

    def watched(store, name, nbytes):
        inner = create(store, name, nbytes)
        write_at = inner.write_at

        def write(offset, data):
            if name.endswith(".skframes"):
                seen.append((offset, address_of(data), data.nbytes))
            write_at(offset, data)

        inner.write_at = write
        return inner

    monkeypatch.setattr(MemoryStore, "create", watched)
    sk.save({"w": torch.randn(3 * MIB)}, MemoryStore(), codecs=codecs, options=OPTIONS)
    large = [(offset, address) for offset, address, nbytes in seen if nbytes > MIB]
    assert len(large) >= 2
    assert all(address % ALIGNMENT == offset % ALIGNMENT for offset, address in large)
