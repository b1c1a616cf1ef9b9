"""What the page cache holds and what it does not: every way of reading gives the same bytes."""

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep.errors import WrongSize
from shardkeep.storage import local
from shardkeep.storage.buffers import ALIGNMENT, aligned_buffer
from shardkeep.storage.local import LocalStore
from shardkeep.testing.store_contract import read_blob, sample, write_blob
from tests.storage.system import MIB, cached, drop_cached, failing, is_direct, linux_only


@linux_only
@pytest.mark.parametrize("offset", [0, 100])
def test_large_writes_bypass_the_cache(store, offset):
    data = aligned_buffer(3 * MIB + 100)
    writer = store.create("a", len(data))
    writer.write_at(offset, data[offset:])
    writer.finish()
    assert cached(store, "a") <= ALIGNMENT * (1 + bool(offset))


@linux_only
@pytest.mark.parametrize("shift", [0, 64])
def test_cold_reads_bypass_the_cache(store, shift):
    """A large cold read leaves nothing in the page cache, wherever the bytes go; a second one is right too."""
    data = sample(12 * MIB + 5 * ALIGNMENT)
    write_blob(store, "a", data)
    into = aligned_buffer(len(data) + shift)[shift:]
    drop_cached(store, "a", 0, len(data))
    for _ in range(2):
        into[:] = bytes(len(into))
        with closing(store.open("a")) as reader:
            reader.read_into(0, into)
        assert into == data
        assert cached(store, "a") == 0


@linux_only
def test_one_refused_buffer_does_not_end_direct_reads(store):
    """Threads that all offer memory the disk may refuse get their bytes, and direct reads go on."""
    data = sample(16 * MIB)
    write_blob(store, "a", data)
    drop_cached(store, "a", 0, len(data))
    into = aligned_buffer(len(data) + 64)[64:]
    with closing(store.open("a")) as reader, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: reader.read_into(i * 2 * MIB, into[i * 2 * MIB : (i + 1) * 2 * MIB]), range(8)))
    assert into == data
    assert cached(store, "a") == 0


@linux_only
def test_warm_reads_come_from_the_cache(store, monkeypatch):
    data = sample(6 * MIB)
    write_blob(LocalStore(store.url, direct=False), "a", data)
    if cached(store, "a") < len(data):
        pytest.skip("the system did not keep the file cached")
    failing("preadv", errno.EIO, monkeypatch, when=is_direct)
    assert read_blob(store, "a") == data


SIZE = 300_001
CONTENT = sample(SIZE)
edges = st.integers(0, SIZE + 9000)
ranges = st.tuples(edges, edges).map(lambda pair: (min(pair), max(pair)))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A store whose requests are so small that every seam between them is met."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_REQUEST_BYTES", 32768), ("_DIRECT_READ_BYTES", 8192), ("_SCRATCH_BYTES", 40960)):
            patch.setattr(local, name, value)
        store = LocalStore(tmp_path_factory.mktemp("mixed"))
        write_blob(store, "a", CONTENT)
        yield store


@given(cold=st.lists(ranges, max_size=4), wanted=ranges, shift=st.sampled_from([0, 1, 64, 4095]), warm=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_range_in_any_state_of_the_cache(mixed, cold, wanted, shift, warm):
    if warm:
        Path(mixed.url, "a").read_bytes()
    for start, end in cold:
        drop_cached(mixed, "a", start, end)
    start, end = wanted
    into = aligned_buffer(end - start + shift)[shift:]
    with closing(mixed.open("a")) as reader:
        if end <= SIZE or start == end:
            reader.read_into(start, into)
            assert into == CONTENT[start:end]
            return
        with pytest.raises(WrongSize) as caught:
            reader.read_into(start, into)
    assert caught.value.details["got"] == max(0, SIZE - start)


@given(
    parts=st.permutations(range(12)),
    cuts=st.lists(st.integers(0, SIZE), min_size=11, max_size=11),
    shift=st.sampled_from([0, 512]),
)
@settings(max_examples=40, deadline=None)
def test_any_parts_in_any_order(tmp_path_factory, parts, cuts, shift):
    store = LocalStore(tmp_path_factory.mktemp("parts"))
    memory = aligned_buffer(SIZE + shift)[shift:]
    memory[:] = CONTENT
    edges = sorted([0, *cuts, SIZE])
    writer = store.create("a", SIZE)
    for part in parts:
        writer.write_at(edges[part], memory[edges[part] : edges[part + 1]])
    writer.finish()
    assert Path(store.url, "a").read_bytes() == CONTENT


@linux_only
def test_a_reader_knows_what_is_in_memory(store):
    write_blob(store, "a", sample(2 * MIB))
    drop_cached(store, "a", 0, 2 * MIB)
    with closing(store.open("a")) as reader:
        assert not reader.cached(0, 2 * MIB)
        Path(store.url, "a").read_bytes()
        assert reader.cached(0, 2 * MIB)
