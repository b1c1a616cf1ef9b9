"""Uploads keep within bounds: of memory, all together, and of the time for which they are waited for in vain."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.storage import multipart
from shardkeep.storage.cancel import CancelScope
from shardkeep.storage.object_store import ObjectStore
from shardkeep.testing.store_contract import read_blob, sample
from tests.object_store.conftest import TAKES_BACK
from tests.object_store.proxy import Proxy, Rule
from tests.support.s3_server import S3Server
from tests.support.uploads import unfinished

PART = 5 << 20
Opened = Callable[..., ObjectStore]


def test_uploads_share_the_room_for_copies(s3_server: S3Server, s3_place: Opened) -> None:
    """However many blobs are written in small pieces to a store that stalls, few parts are copied beyond their room."""
    uploads, requests = 4, 4
    taken = [0] * uploads
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, requests=requests, retries=0, retry_s=0.1)
        writers = [place.create(f"m{i}", 8 * PART) for i in range(uploads)]
        proxy.rules = [Rule("stall", path="partNumber=")]

        def write(i: int) -> None:
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
def test_no_upload_waits_for_itself(s3_place: Opened, order: str) -> None:
    """Where others have all the room, a thread that writes pieces in any order still comes to an end."""
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


@pytest.mark.parametrize("way", ["refused", "ctrl_c"])
@pytest.mark.parametrize("codecs", [None, ["float"]], ids=["plain", "coded"])
def test_a_failure_does_not_wait_for_stalled_uploads(
    s3_server: S3Server, s3_place: Opened, way: str, codecs: list[str] | None
) -> None:
    """When one file fails, or at Ctrl-C, a save ends though parts of other files stall for ever, and leaves nothing."""
    state = {f"m{i}": {"w": torch.randint(0, 255, (2 * PART + 99,), dtype=torch.uint8)} for i in range(3)}
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, conditional_puts=True, timeout_s=300, retries=0)
        proxy.rules = [Rule("stall", path="/m[12]-.*partNumber=")]
        if way == "refused":
            proxy.rules = [*proxy.rules, Rule("broken", path="/m0-.*partNumber=", least=PART, delay_s=1.0)]
            with pytest.raises(StorageError, match=r"m0-.*InternalError"):
                sk.save(state, place, codecs=codecs)
        else:
            with interrupted_when(lambda: proxy.counts.faults["stall"] >= 3), pytest.raises(KeyboardInterrupt):
                sk.save(state, place, codecs=codecs)
        assert proxy.counts.faults["stall"], "or nothing was there to wait for"
        assert [blob.name for blob in place.list()] == []
        assert unfinished(place) == [] or not TAKES_BACK


def test_what_is_given_up_at_its_very_end_is_deleted_when_it_appears(
    s3_server: S3Server, s3_place: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an upload that was told to end and is given up; the object that appears later does not stay."""
    monkeypatch.setattr(multipart, "_DEADLINE_S", 0.0)
    scope = CancelScope()
    with Proxy(s3_server.port) as proxy, ThreadPoolExecutor(1) as pool:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART)
        with scope.active():
            writer = place.create("late", PART + 99)
        writer.write_at(0, memoryview(bytes(PART + 99)))
        proxy.rules = [Rule("delay", method="POST", path=r"late\?uploadId=", delay_s=1.5)]
        finished = pool.submit(writer.finish)
        while not proxy.counts.faults["delay"]:
            time.sleep(0.01)
        scope.cancel()
        with pytest.raises(StorageError, match="was cancelled"):
            finished.result()
        writer.abandon()
        sending = [thread for thread in threading.enumerate() if thread.name == "upload late"]
        assert sending, "or it was waited for"
        sending[0].join()
        assert proxy.counts.requests[-1].path.endswith("?delete"), "it was there"
        assert list(place.list()) == []


@contextlib.contextmanager
def interrupted_when(due: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C reach the main thread, once."""

    def wait() -> None:
        while not due():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()
