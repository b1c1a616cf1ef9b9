"""Multipart uploads: parts in any order, sent from the caller's memory; a blob that is not finished never appears."""

import contextlib
import errno
import gc
import itertools
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardkeep.errors import BlobNotFound, StorageError
from shardkeep.storage.multipart import ObjectWriter
from shardkeep.testing.store_contract import raises_errno, read_blob, sample
from tests.object_store.proxy import Proxy, Rule
from tests.support.s3_server import BUCKET

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture
def small_parts(s3_place):
    return s3_place(part_bytes=PART, requests=4)


def begun(boto, store):
    found = boto.list_multipart_uploads(Bucket=BUCKET, Prefix=store.prefix).get("Uploads", [])
    return [each["Key"] for each in found]


def windows(nbytes, size, first=0):
    cuts = [*range(first, nbytes, size), nbytes]
    return [(0, first)] * (first > 0) + list(itertools.pairwise(cuts))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("first", [0, 4096], ids=["aligned", "shifted"])
def test_memory_may_be_used_again_at_once(small_parts, threads, first):
    """When a write returns its memory is the caller's, whether the parts were sent from it or copied."""
    data = sample(4 * PART + 12345)
    writer = small_parts.create("a", len(data))
    own = threading.local()

    def write(window):
        start, stop = window
        if not hasattr(own, "memory"):
            own.memory = np.empty(2 * PART, np.uint8)
        own.memory[: stop - start] = np.frombuffer(data, np.uint8, stop - start, start)
        writer.write_at(start, own.memory[: stop - start].data)
        own.memory[:] = 0

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, windows(len(data), 2 * PART, first)))
    writer.finish()
    assert read_blob(small_parts, "a") == data


@pytest.mark.parametrize("threads", [1, 3])
def test_any_order_comes_to_an_end(small_parts, threads):
    data = sample(9 * PART)
    order = windows(len(data), PART // 2 + 1) if threads > 1 else windows(len(data), PART)
    random.Random(0).shuffle(order) if threads > 1 else order.reverse()
    writer = small_parts.create("a", len(data))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: writer.write_at(at[0], memoryview(data)[at[0] : at[1]]), order))
    writer.finish()
    assert read_blob(small_parts, "a") == data


@pytest.mark.parametrize("end", [0, 1000, PART, PART + 1, 2 * PART])
def test_ends_early_in_any_part(small_parts, end):
    """A blob created with more space ends where `finish` says, sent in parts or in one request."""
    data = sample(end)
    writer = small_parts.create("a", 10 * PART)
    writer.write_at(0, memoryview(data))
    writer.finish(end)
    assert read_blob(small_parts, "a") == data


def test_what_is_abandoned_leaves_nothing(small_parts, boto):
    writer = small_parts.create("a", 3 * PART)
    writer.write_at(0, memoryview(bytes(2 * PART)))
    assert begun(boto, small_parts) == [f"{small_parts.prefix}a"]
    assert list(small_parts.list()) == []
    writer.abandon()
    writer.abandon()
    assert begun(boto, small_parts) == []
    assert list(small_parts.list()) == []
    with pytest.raises(StorageError):
        writer.write_at(2 * PART, memoryview(bytes(PART)))


def test_gaps_and_second_thoughts_are_refused(small_parts, boto):
    """A blob with a hole is not made, bytes that were sent do not change, and each error says where."""
    writer = small_parts.create("a", 3 * PART)
    writer.write_at(0, memoryview(bytes(PART)))
    with raises_errno(errno.EINVAL, match="sent already"):
        writer.write_at(10, memoryview(b"other"))
    writer.write_at(PART, memoryview(bytes(100)))
    with pytest.raises(StorageError, match=rf"nothing was written at offset {PART + 100}$"):
        writer.finish()
    writer.abandon()
    assert begun(boto, small_parts) == []
    with pytest.raises(BlobNotFound):
        small_parts.open("a")
    alone = small_parts.create("b", 10)
    with pytest.raises(StorageError, match="nothing was written at offset 0"):
        alone.finish()
    alone.abandon()


def test_an_interrupted_write_spoils_its_blob(small_parts, monkeypatch):
    """The caller may reuse its memory after Ctrl-C, so nothing that was sent from it ever becomes an object."""
    writer = small_parts.create("a", 3 * PART)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_pause", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.write_at(0, memoryview(bytes(PART)))
    with raises_errno(errno.ECANCELED, match="a write was interrupted"):
        writer.write_at(PART, memoryview(bytes(2 * PART)))
    with pytest.raises(StorageError):
        writer.finish()
    writer.abandon()
    assert list(small_parts.list()) == []


@pytest.mark.parametrize(
    ("options", "message", "number"),
    [
        ({"secret_access_key": "wrong"}, "403 SignatureDoesNotMatch", errno.EACCES),
        ({"endpoint": "http://127.0.0.1:1", "retries": 1}, "refused", errno.ECANCELED),
    ],
)
def test_every_write_raises_the_failure_of_its_upload(s3_place, options, message, number):
    """The error has the reason and is never transient, because a retry of the write would not help. No slot stays taken."""
    store = s3_place(part_bytes=PART, requests=2, **options)
    store.version = lambda _: None  # so that it is the upload that fails
    writer, bucket = ObjectWriter(store, "a", 4 * PART), store.bucket
    for _ in range(2):
        with raises_errno(number, match=message):
            writer.write_at(0, memoryview(bytes(2 * PART)))
    with pytest.raises(StorageError, match=message):
        writer.finish()
    writer.abandon()
    assert [bucket.slots.acquire(timeout=5) for _ in range(2)] == [True, True]


def test_parts_grow_with_the_blob(s3_place):
    policy = s3_place().bucket.policy
    assert policy.part_bytes_for(1) == 8 * MIB
    assert policy.part_bytes_for(5 << 40) * 10_000 >= 5 << 40
    assert policy.part_bytes_for(5 << 40) % MIB == 0


def test_uploads_share_the_budget_for_copies(s3_server, s3_place):
    """However many blobs are written in small pieces to a store that stalls, few parts are copied beyond the budget."""
    uploads, requests = 4, 4
    taken = [0] * uploads
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, requests=requests, retries=0, retry_s=0.1)
        writers = [place.create(f"m{i}", 8 * PART) for i in range(uploads)]
        proxy.rules = [Rule("stall", path="partNumber=")]

        def write(i):
            with contextlib.suppress(StorageError):
                while taken[i] < 8 * PART:
                    writers[i].write_at(taken[i], memoryview(bytes(PART // 2)))
                    taken[i] += PART // 2

        threads = [threading.Thread(target=write, args=(i,)) for i in range(uploads)]
        for thread in threads:
            thread.start()
        while proxy.counts.faults["stall"] < requests:
            time.sleep(0.01)
        time.sleep(1)  # in which much more would be copied
        most = sum(taken)
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.abandon()
    assert requests * PART <= most <= (requests + uploads) * PART


@pytest.mark.parametrize("order", ["backwards", "shuffled"])
def test_no_upload_waits_for_itself(s3_place, order):
    """If other uploads have used up the budget, a thread that writes pieces in any order still finishes."""
    place = s3_place(part_bytes=PART, requests=2)
    others = place.bucket.budget.take(2 * PART)
    data = sample(6 * PART + 99)
    starts = list(range(0, len(data), PART // 2 + 1))
    starts.reverse() if order == "backwards" else random.Random(1).shuffle(starts)
    writer = place.create("a", len(data))
    for at in starts:
        writer.write_at(at, memoryview(data)[at : at + PART // 2 + 1])
    writer.finish()
    assert read_blob(place, "a") == data
    del writer
    assert place.bucket.budget.take(1) is None, "what was taken beyond it counts no more, and what others have does"
    del others
    assert place.bucket.budget.take(2 * PART) is not None


@contextlib.contextmanager
def interrupted_when(due):
    """Let Ctrl-C reach the main thread; again after half a minute, because Python drops one inside a finalizer."""
    ended = threading.Event()

    def wait():
        while not due():
            time.sleep(0.01)
        while not ended.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.wait(30)

    thread = threading.Thread(target=wait)
    gc.disable()  # finalizers of older garbage would run in the main thread
    thread.start()
    try:
        yield
    finally:
        ended.set()
        gc.enable()
        thread.join()
