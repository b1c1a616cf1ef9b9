"""Files of fsspec buffer a bounded number of early bytes, and no write waits for ever."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.storage import fsspec as fsspec_files
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.fsspec import FsspecStore
from shardkeep.testing.store_contract import read_blob, sample
from tests.engine.samples import bits

PIECE = 1000
COUNT = 50


@pytest.fixture
def store():
    fs, path = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    yield FsspecStore(fs, path, f"memory:/{path}", settle_s=0.0)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def created(store, pieces, *, scope=None):
    room = MemoryBudget(pieces * PIECE)
    with (scope or CancelScope(budget=room)).active():
        return store.create("a", COUNT * PIECE), room


def test_a_write_too_far_ahead_waits_for_the_gap_to_be_filled(store):
    """With room for two early pieces the third one waits, and all are written once the first comes."""
    data = sample(COUNT * PIECE)
    writer, room = created(store, 2)
    with ThreadPoolExecutor(COUNT) as pool:
        early = [
            pool.submit(writer.write_at, at, memoryview(data)[at : at + PIECE]) for at in range(PIECE, 4000, PIECE)
        ]
        while sum(each.done() for each in early) < 2:
            time.sleep(0.001)
        assert room.take(1) is None, "two pieces are kept"
        assert not all(each.done() for each in early), "the third is not"
        writer.write_at(0, memoryview(data)[:PIECE])
        for each in early:
            each.result()
        assert room.take(2 * PIECE) is not None, "nothing is kept any more"
        for at in range(4000, len(data), PIECE):
            writer.write_at(at, memoryview(data)[at : at + PIECE])
    writer.finish()
    assert read_blob(store, "a") == data


def test_threads_that_take_pieces_in_turn_need_no_more_room_than_there_is(store):
    """As the engine writes: the thread with the next piece never waits, so the write ends even with an empty budget."""
    data = sample(COUNT * PIECE)
    writer, _ = created(store, 0)
    turns, lock = iter(range(0, len(data), PIECE)), threading.Lock()

    def work():
        while True:
            with lock:
                at = next(turns, None)
            if at is None:
                return
            writer.write_at(at, memoryview(data)[at : at + PIECE])

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(work) for _ in range(8)]:
            each.result()
    writer.finish()
    assert read_blob(store, "a") == data


def test_on_terms_that_promise_order_it_goes_on_in_the_end(store, monkeypatch):
    """The next bytes may have to wait for these ones to be taken: then the room does not count, after a while."""
    monkeypatch.setattr(fsspec_files, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(fsspec_files, "_POLL_S", 0.001)
    data = sample(COUNT * PIECE)
    writer, _ = created(store, 1)
    for at in reversed(range(0, len(data), PIECE)):
        writer.write_at(at, memoryview(data)[at : at + PIECE])
    writer.finish()
    assert read_blob(store, "a") == data


@pytest.mark.parametrize("way", ["given up", "abandoned"])
def test_a_waiting_write_raises_at_the_end(store, way):
    """When other work fails, or the file is abandoned, a thread that waits for its turn raises."""
    scope = CancelScope(budget=MemoryBudget(0))
    writer, _ = created(store, 0, scope=scope)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.write_at, PIECE, memoryview(bytes(PIECE)))
        scope.cancel() if way == "given up" else writer.abandon()
        with pytest.raises(StorageError, match=r"cancelled|a blob that is closed"):
            waiting.result()
    writer.abandon()
    assert list(store.list()) == []


@pytest.mark.filterwarnings("ignore:.*does not check the conditions")
@pytest.mark.parametrize("codecs", [None, ["float"]], ids=["plain", "coded"])
def test_saves_with_a_small_budget_are_exact(store, codecs):
    """The engine writes several files at once through little room, and every bit comes back."""
    state = {f"m{i}": {"w": torch.randn(700_001 + i)} for i in range(3)}
    options = sk.Options(io_threads=4, host_budget_bytes=2 << 20)
    sk.save(state, store, codecs=codecs, options=options)
    found = {key: {"w": torch.zeros_like(value["w"])} for key, value in state.items()}
    sk.load(found, store, options=options)
    assert bits(found) == bits(state)
