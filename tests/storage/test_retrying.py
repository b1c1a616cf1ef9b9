"""What fails in passing is tried again; what does not, and what must not, is not."""

import errno
import os

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError, StorageFull
from shardkeep.storage.base import free_nbytes, is_cached
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.store_contract import raises_errno


def patient(inner, retries=3):
    waits = []
    return RetryingStore(inner, RetryPolicy(retries, sleep=waits.append)), waits


class _Refusing(MemoryStore):
    """Fails so many times, with an errno, before or after it has done what it was asked."""

    def __init__(self, code, times, *, after=False):
        super().__init__()
        self.code, self.times, self.after = code, times, after

    def _fail(self):
        if self.times:
            self.times -= 1
            raise StorageError(f"injected: {os.strerror(self.code)}", errno=self.code)

    def put(self, name, data, *, replace=False, over=None):
        if not self.after:
            self._fail()
        super().put(name, data, replace=replace, over=over)
        if self.after:
            self._fail()

    def create(self, name, nbytes):
        made = super().create(name, nbytes)
        self._fail()
        return made


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET])
def test_what_passes_is_tried_again(code):
    store, waits = patient(_Refusing(code, 3))
    store.put("a", b"x")
    assert store.get("a", limit=9) == b"x"
    assert len(waits) == 3
    assert 0.25 <= waits[0] < 0.75 <= 2 * waits[0] + 0.25
    assert waits[2] > 1.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOENT])
def test_what_stays_is_not(code):
    """A full disk or missing permissions raise at once."""
    store, waits = patient(_Refusing(code, 1))
    with pytest.raises(StorageError):
        store.put("a", b"x")
    assert not waits


def test_tries_are_bounded():
    store, waits = patient(_Refusing(errno.EIO, 4))
    with raises_errno(errno.EIO):
        store.put("a", b"x")
    assert len(waits) == 3
    none, waits = patient(_Refusing(errno.EIO, 1), retries=0)
    with pytest.raises(StorageError):
        none.put("a", b"x")


def test_a_put_that_failed_after_it_was_done_is_ours():
    """The bytes are there already: that is success, and they are put once more to be durable."""
    store, _ = patient(_Refusing(errno.EIO, 1, after=True))
    store.put("a", b"x")
    assert store.get("a", limit=9) == b"x"


def test_a_swap_that_failed_after_it_was_done_is_ours():
    """A lost answer does not turn our own success into a failure; a put of another writer does."""
    inner = _Refusing(errno.EIO, 0, after=True)
    inner.put("a", b"old")
    store, waits = patient(inner)
    seen = store.version("a")
    inner.times = 1
    store.put("a", b"mine", over=seen)
    assert store.get("a", limit=9) == b"mine"
    assert len(waits) == 1

    class _Overtaken(_Refusing):
        def _fail(self):
            if self.times:
                MemoryStore.put(self, "a", b"theirs", replace=True)
            super()._fail()

    inner = _Overtaken(errno.EIO, 0, after=True)
    inner.put("a", b"old")
    store, _ = patient(inner)
    seen = store.version("a")
    inner.times = 1
    with raises_errno(errno.EEXIST):
        store.put("a", b"mine", over=seen)
    assert inner.get("a", limit=9) == b"theirs"


def test_a_blob_of_another_writer_is_never_replaced():
    inner = _Refusing(errno.EIO, 0)
    inner.put("a", b"theirs")
    inner.times = 1
    store, _ = patient(inner)
    with raises_errno(errno.EEXIST):
        store.put("a", b"mine!!")
    assert inner.get("a", limit=9) == b"theirs"


def test_a_create_that_failed_half_way_begins_anew():
    """What the attempt that failed has made is replaced; one that was there before is an error."""
    inner = _Refusing(errno.EIO, 1)
    store, _ = patient(inner)
    writer = store.create("a", 1)
    writer.write_at(0, memoryview(b"x"))
    writer.finish()
    assert store.get("a", limit=9) == b"x"
    with raises_errno(errno.EEXIST):
        store.create("a", 1)


def test_to_make_durable_is_tried_once():
    """After a failed fsync a second one would succeed, and the bytes would be lost."""
    faulty = FaultyStore(MemoryStore(), "error", at=0, verbs=("finish",))
    store, waits = patient(faulty)
    writer = store.create("a", 1)
    writer.write_at(0, memoryview(b"x"))
    with pytest.raises(StorageError):
        writer.finish()
    assert not waits


@pytest.mark.parametrize("verb", ["create", "write_at", "open", "read_into", "put", "get", "list", "delete"])
def test_every_other_verb_is_tried_again(verb):
    faulty = FaultyStore(MemoryStore(), "short", at=0, verbs=(verb,))
    store, waits = patient(faulty)
    writer = store.create("a", 4)
    writer.write_at(0, memoryview(b"abcd"))
    writer.finish()
    store.put("b", b"x")
    assert store.get("b", limit=9) == b"x"
    into = bytearray(4)
    reader = store.open("a")
    assert (reader.nbytes, is_cached(reader, 0, 4)) == (4, True)
    reader.read_into(0, memoryview(into))
    reader.close()
    assert into == b"abcd"
    assert [info.name for info in store.list()] == ["a", "b"]
    store.delete("a")
    assert len(waits) == 1


def test_a_save_survives_what_passes(tmp_path):
    state = {"w": torch.arange(10.0)}
    count = FaultyStore(LocalStore(tmp_path / "count"))
    sk.save(state, RetryingStore(count, RetryPolicy(0)), step=1)
    verbs = ("create", "write_at", "put", "get", "list", "delete", "open")
    total = sum(operation.split()[0] in verbs for operation in count.operations)
    assert total > 5
    for at in range(total):
        store, waits = patient(FaultyStore(LocalStore(tmp_path / str(at)), "error", at=at, verbs=verbs))
        sk.save(state, store, step=1)
        assert len(waits) == 1
        assert torch.equal(sk.open(tmp_path / str(at))["w"][:], state["w"])


class _Small(LocalStore):
    free = 100

    def free_nbytes(self):
        return self.free


def test_a_save_that_does_not_fit_makes_no_file(tmp_path):
    store = _Small(tmp_path / "step-1")
    with pytest.raises(StorageFull, match=r"takes 4.00 kB, and 100 B are free") as caught:
        sk.save({"w": torch.ones(1000)}, store)
    assert "delete checkpoints" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "step-1").exists()
    assert free_nbytes(RetryingStore(store, RetryPolicy(1))) == 100
    store.free = 4000
    sk.save({"w": torch.ones(1000)}, store)
    store.free = 3999
    with pytest.raises(StorageFull):
        sk.async_save({"w": torch.zeros(1000)}, RetryingStore(store, RetryPolicy(1)), overwrite=True).result()
    assert torch.equal(sk.open(tmp_path / "step-1")["w"][:], torch.ones(1000))
