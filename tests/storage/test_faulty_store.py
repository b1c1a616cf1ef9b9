"""The faults we inject are the faults we say."""

import errno
import time
from functools import partial

import pytest

from shardkeep.errors import BlobNotFound, StorageError, StorageFull
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import VERBS, FaultyStore, InjectedCrash
from shardkeep.testing.store_contract import raises_errno, read_blob, write_blob

DATA = bytes(range(100))


def work(store):
    write_blob(store, "a", DATA)
    read_blob(store, "a")
    store.put("b", b"small")
    store.get("b", limit=5)
    list(store.list())
    store.delete("b")
    store.version("b")


def test_operations_are_recorded_in_order():
    store, start = FaultyStore(MemoryStore(), "slow", at=0, delay_s=0.05), time.perf_counter()
    work(store)
    assert time.perf_counter() - start >= 0.05
    assert store.operations == [
        "create a", "write_at a", "finish a", "open a", "read_into a", "put b", "get b", "list", "delete b",
        "version b",
    ]  # fmt: skip


@pytest.mark.parametrize("at", range(len(VERBS)))
@pytest.mark.parametrize(
    ("fault", "error", "number"),
    [("error", StorageError, errno.EIO), ("full", StorageFull, errno.ENOSPC), ("short", StorageError, errno.EIO)],
)
def test_errors_strike_once_at_their_turn(fault, error, number, at):
    store = FaultyStore(MemoryStore(), fault, at=at)
    with raises_errno(number, error):
        work(store)
    assert VERBS[at] == store.operations[-1].split()[0]
    store.put("later", b"1")


def test_only_chosen_verbs_are_counted():
    store = FaultyStore(MemoryStore(), at=1, verbs={"put"})
    store.put("a", b"1")
    store.delete("a")
    with pytest.raises(StorageError):
        store.put("b", b"2")
    assert store.operations == ["put a", "delete a", "put b"]


def test_short_write_and_read_move_half():
    inner = MemoryStore()
    writer = FaultyStore(inner, "short", at=0, verbs={"write_at"}).create("a", 100)
    with pytest.raises(StorageError):
        writer.write_at(0, memoryview(DATA))
    writer.finish()
    assert DATA[:50] + bytes(50) == read_blob(inner, "a")
    into = bytearray(50)
    with pytest.raises(StorageError):
        FaultyStore(inner, "short", at=0, verbs={"read_into"}).open("a").read_into(0, memoryview(into))
    assert DATA[:25] + bytes(25) == into


def test_truncate_and_flip_are_silent():
    inner = MemoryStore()
    write_blob(FaultyStore(inner, "truncate", at=0, verbs={"write_at"}), "cut", DATA)
    write_blob(FaultyStore(inner, "flip", at=0, verbs={"write_at"}), "flipped", DATA)
    FaultyStore(inner, "flip", at=0).put("put", DATA)
    FaultyStore(inner, "truncate", at=0).put("half", DATA)
    once = DATA[:50] + bytes([DATA[50] ^ 0x10]) + DATA[51:]
    assert DATA[:50] + bytes(50) == read_blob(inner, "cut")
    assert once == read_blob(inner, "flipped")
    assert once == read_blob(inner, "put")
    assert DATA[:50] == read_blob(inner, "half")


def test_flip_on_read_harms_only_the_reader():
    inner = MemoryStore()
    write_blob(inner, "a", DATA)
    assert read_blob(FaultyStore(inner, "flip", at=0, verbs={"read_into"}), "a") != DATA
    assert FaultyStore(inner, "flip", at=0).get("a", limit=100) != DATA
    assert read_blob(inner, "a") == DATA


@pytest.mark.parametrize("at", range(len(VERBS)))
def test_crash_ends_everything(at):
    inner = MemoryStore()
    store = FaultyStore(inner, "crash", at=at)
    with pytest.raises(InjectedCrash):
        work(store)
    left = [(blob.name, blob.nbytes) for blob in inner.list()]
    for attempt in (partial(work, store), store.list, partial(store.open, "a"), partial(store.delete, "a")):
        with pytest.raises(InjectedCrash):
            attempt()
    assert left == [(blob.name, blob.nbytes) for blob in inner.list()]


def test_the_dead_do_not_clean_up():
    inner = MemoryStore()
    writer = FaultyStore(inner, "crash", at=1).create("a", 3)
    with pytest.raises(InjectedCrash):
        writer.write_at(0, memoryview(b"abc"))
    writer.abandon()
    assert [blob.name for blob in inner.list()] == ["a"]
    writer = FaultyStore(inner, at=1).create("b", 3)
    with pytest.raises(StorageError):
        writer.write_at(0, memoryview(b"abc"))
    writer.abandon()
    with pytest.raises(BlobNotFound):
        inner.open("b")
