"""What comes damaged is read once more: from memory where every read can be damaged, from S3 behind a bad network."""

import logging
import os

import pytest
import torch

import shardkeep as sk
from shardkeep.codecs.coded_store import DecodingStore
from shardkeep.opening import verify_stored
from shardkeep.storage.base import read_again
from shardkeep.storage.buffers import flat
from shardkeep.storage.local import cached_bytes
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.codec_engine.scene import OPTIONS, InOrderStore
from tests.engine.samples import bits
from tests.object_store.proxy import Rule
from tests.object_store.test_faults_network import QUICK

VERBS = ("read_into", "get")
KINDS = {"plain": (MemoryStore, None), "apart": (InOrderStore, None), "coded": (MemoryStore, ["zstd", "aes"])}
ONE_THREAD = sk.Options(keys=OPTIONS.keys, io_threads=1)


def state_of(seed):
    torch.manual_seed(seed)
    return {"w": torch.randn(300, 1000), "b": torch.randn(9), "step": seed}


def loaded(store):
    state = {**state_of(0), "step": 0}
    sk.load(state, store, options=ONE_THREAD)
    return bits(state)


@pytest.fixture(params=KINDS, scope="module")
def store(request):
    """A store with state 1 in it: digests in the header, in a file beside, and of coded frames."""
    make, codecs = KINDS[request.param]
    store = make()
    sk.save(state_of(1), store, codecs=codecs, options=OPTIONS)
    return store


def test_one_damaged_read_anywhere_is_mended(store, caplog):
    """Whichever read of a load comes damaged, the load succeeds, and one warning names the file and the offset."""
    counting = FaultyStore(store)
    expected = loaded(counting)
    asked = [each for each in counting.operations if each.split()[0] in VERBS]
    assert expected == bits(state_of(1))
    unheard = 0
    for number, what in enumerate(asked):
        caplog.clear()
        assert loaded(FaultyStore(store, "flip", at=number, verbs=VERBS)) == expected
        said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        unheard += not said
        for each in said:
            assert f"{what.split()[1]}: bytes " in each
            assert "the stored copy is fine" in each
        assert len(said) <= 1
    # Of what is read with the table of a coded file, not all is used.
    assert unheard <= sum(info.name.endswith(".skframes") for info in store.list())


class Wavers(FaultyStore):
    """A store of which every read of some files brings other bytes than the last one, all of them wrong."""

    def __init__(self, inner, name):
        super().__init__(inner)
        self._name = name
        self._turn = 0

    def open(self, name):
        reader = super().open(name)
        if self._name in name:
            inner = reader.read_into

            def read_into(offset, into, *, cached=False):
                inner(offset, into, cached=cached)
                self._turn = self._turn % 255 + 1
                flat(into)[len(flat(into)) // 2] ^= self._turn

            reader.read_into = read_into  # of this one alone
        return reader


def test_what_is_damaged_twice_says_whether_it_was_the_same(store):
    """Damage in the store is distinguished from damage on the way: the error names file and offset, and says what to do."""
    names = [info.name for info in store.list() if info.name.endswith((".safetensors", ".blocks", ".skframes"))]
    for name in names:
        with pytest.raises(sk.DamagedCheckpoint, match="two reads returned different bytes") as raised:
            loaded(Wavers(store, name))
        assert raised.value.details["file"] == name
        assert raised.value.details["same_twice"] is False
        good = store.get(name, limit=1 << 30)
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        store.put(name, bytes(bad), replace=True)
        with pytest.raises(sk.ChecksumMismatch, match="read twice, the same both times") as raised:
            loaded(store)
        assert raised.value.details["same_twice"] is True
        assert raised.value.details["file"] == name
        assert isinstance(raised.value.details["offset"], int)
        store.put(name, good, replace=True)


def test_verifying_without_keys_mends_too(caplog):
    """What came damaged once is no damage of the store's, for those either who cannot decode it."""
    store = MemoryStore()
    sk.save(state_of(1), store, codecs=["aes"], options=OPTIONS)
    counting = FaultyStore(store)
    verify_stored(counting, options=ONE_THREAD)  # with more, reads come in another order each time
    reads = sum(each.startswith("read_into") for each in counting.operations)
    for number in range(reads):
        verify_stored(FaultyStore(store, "flip", at=number, verbs=["read_into"]), options=ONE_THREAD)
    mended = caplog.text.count("the stored copy is fine")
    coded = sum(info.name.endswith(".skframes") for info in store.list())
    assert reads - coded <= mended <= reads  # of what is read with a table, not all is used


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: DecodingStore(store, (), ())], ids=["", "codecs"])
def test_a_second_read_does_not_come_from_the_page_cache(tmp_path, wrap):
    """Pages of a local file are dropped before it is read again, and no others; a store that decodes is looked through."""
    (tmp_path / "a").write_bytes(os.urandom(8 << 20))
    file = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        os.fsync(file)  # dirty pages stay
        whole = os.pread(file, 8 << 20, 0)
        if cached_bytes(file, 0, 8 << 20) != 8 << 20:
            pytest.skip("the system does not say what it has in its cache")
        seen = []

        class Looks(sk.LocalStore):
            """Says what is in the cache when the file is opened anew."""

            def open(self, name):
                seen.append([cached_bytes(file, mib << 20, 1 << 20) for mib in (0, 2, 6)])
                return super().open(name)

        found = read_again(wrap(Looks(tmp_path)), "a", (1 << 20) + 1, 4 << 20)
        assert found == whole[(1 << 20) + 1 : (5 << 20) + 1]
        assert seen == [[1 << 20, 0, 1 << 20]]
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("codecs", "rows", "path", "after"),
    [
        (None, 3, "safetensors", 0),  # all of it comes, and is kept, when the file is opened
        (None, 3, "blocks", 0),
        (None, 3, "skindex", 0),
        (None, 3, "shardkeep.json", 0),
        (["zstd"], 3, "/index-.*skframes", 0),
        (["zstd"], 3, "-of-.*skframes", 0),
        (None, 300, "safetensors", 1),
        (["zstd"], 300, "-of-.*skframes", 2),
    ],
)
def test_a_network_that_flips_bits(proxy, s3_place, caplog, codecs, rows, path, after):
    """A bit is flipped in one answer of S3: the load succeeds, and says so."""
    place = s3_place(endpoint=proxy.endpoint, **QUICK)
    proxy.rules = []
    state, found = ({"w": torch.full((rows, 1000), k).normal_()} for k in (1.0, 2.0))
    sk.save(state, place, codecs=codecs)
    proxy.rules = [Rule("flip_answer", method="GET", path=path, after=after, times=1)]
    sk.load(found, place, options=ONE_THREAD)
    assert bits(found) == bits(state)
    assert proxy.counts.faults["flip_answer"] == 1
    assert "the stored copy is fine" in caplog.text
