"""Requests that stall are not waited for once their save cannot succeed, whatever they are."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.workers import budget_for_store
from shardkeep.errors import StorageError
from shardkeep.options import cores, local_ranks
from shardkeep.storage import cancel, multipart
from shardkeep.storage.buffers import MemoryBudget
from shardkeep.storage.cancel import CancelScope, current_scope, run_cancellable
from tests.object_store.conftest import TAKES_BACK
from tests.object_store.proxy import Proxy, Rule
from tests.object_store.test_uploads import PART, interrupted_when
from tests.support.stores import BeforeStore
from tests.support.uploads import unfinished

STALLS = {
    "look whether it is there": (1000, Rule("stall", method="HEAD", path=r"/m1-[^?]*safetensors$")),
    "put of one part": (1000, Rule("stall", method="PUT", path=r"/m1-[^?]*safetensors$")),
    "digests beside": (1000, Rule("stall", method="PUT", path=r"/m1-[^?]*blocks$")),
    "look at what arrived": (PART + 99, Rule("stall", method="HEAD", path=r"/m1-[^?]*safetensors$", after=1)),
    "parts": (2 * PART + 99, Rule("stall", path="/m1-.*partNumber=")),
    "parts of a coded file": (2 * PART + 99, Rule("stall", path="/m1-.*partNumber=")),
}
"""How large a file is, and what of it stalls; no request is cut short by its timeout."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Wait a moment only for what was given up to end by itself."""
    monkeypatch.setattr(multipart, "_DEADLINE_S", 0.3)
    monkeypatch.setattr(cancel, "CANCEL_DEADLINE_S", 2.0)


def save_and_stop(way, state, place, due, **how):
    """Begin a save, and stop it, by Ctrl-C or by cancelling it, once something is so."""
    if way == "ctrl_c":
        with interrupted_when(due), pytest.raises(KeyboardInterrupt):
            sk.save(state, place, **how)
        return
    handle = sk.async_save(state, place, **how)
    while not due():
        time.sleep(0.01)
    assert handle.cancel()
    with pytest.raises(sk.SaveCancelled):
        handle.result()


# Python reports an interrupt inside a finalizer as a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", STALLS)
@pytest.mark.parametrize("way", ["refused", "ctrl_c", "cancelled"])
def test_no_request_of_a_save_is_waited_for_in_vain(s3_server, s3_place, what, way):
    """When another file fails, at Ctrl-C, and when the save is cancelled, it ends at once and leaves nothing."""
    (nbytes, rule), codecs = STALLS[what], ["float"] if "coded" in what else None
    state = {f"m{i}": {"w": torch.randint(0, 255, (nbytes,), dtype=torch.uint8)} for i in range(2)}
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, conditional_puts=True, timeout_s=300, retries=0)
        proxy.rules = [rule]

        def stalls():
            return proxy.counts.faults["stall"] > 0

        def fail_then(verb, name):
            if verb == "finish" and name.startswith("m0-"):
                while not stalls():
                    time.sleep(0.01)
                raise StorageError(f"{name}: no more, on purpose", name=name, errno=errno.EDQUOT)

        if way == "refused":
            with pytest.raises(StorageError, match=r"m0-.* no more, on purpose"):
                sk.save(state, BeforeStore(place, fail_then), codecs=codecs)
        else:
            save_and_stop(way, state, place, stalls, codecs=codecs)
        assert stalls(), "or nothing was there to wait for"
        assert [blob.name for blob in place.list()] == []
        assert unfinished(place) == [] or not TAKES_BACK


@pytest.mark.parametrize("way", ["ctrl_c", "cancelled"])
def test_a_network_that_is_gone_is_not_waited_for(s3_server, s3_place, way):
    """Nor are deletes: files that were finished stay, and so does their claim, by which the next save removes them."""
    state = {f"m{i}": {"w": torch.randint(0, 255, (1000,), dtype=torch.uint8)} for i in range(3)}
    with Proxy(s3_server.port) as proxy:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, conditional_puts=True, timeout_s=300, retries=0)
        beyond = s3_place(path=place.prefix.rstrip("/"))
        proxy.rules = [Rule("stall", method="PUT", path=r"/m2-[^?]*safetensors$")]

        def left():
            return [blob.name.partition("-")[0] for blob in beyond.list()]

        def goes():
            if not proxy.counts.faults["stall"] or left() != ["claim", "m0", "m0", "m1", "m1"]:
                return False
            proxy.rules = [Rule("stall")]
            return True

        save_and_stop(way, state, place, goes)
        assert left() == ["claim", "m0", "m0", "m1", "m1"]
        sk.save(state, beyond)
        assert left() == ["index", *("m0", "m0", "m1", "m1", "m2", "m2"), "shardkeep.json"]


@pytest.mark.parametrize(
    ("nbytes", "method", "path", "thread"),
    [(99, "PUT", "late", "put late"), (PART + 99, "POST", r"late\?uploadId=", "upload late")],
    ids=["put", "upload"],
)
def test_what_was_left_behind_does_not_stay(s3_server, s3_place, monkeypatch, nbytes, method, path, thread):
    """A cancelled put or upload whose last request is on its way is not waited for; what appears later is deleted."""
    monkeypatch.setattr(multipart, "_DEADLINE_S", 0.0)
    scope = CancelScope()
    with Proxy(s3_server.port) as proxy, ThreadPoolExecutor(1) as pool:
        place = s3_place(endpoint=proxy.endpoint, part_bytes=PART, conditional_puts=True)
        with scope.active():
            writer = place.create("late", nbytes)
        writer.write_at(0, memoryview(bytes(nbytes)))
        proxy.rules = [Rule("delay", method=method, path=path, delay_s=60)]
        finished = pool.submit(writer.finish)
        while not proxy.counts.faults["delay"]:
            time.sleep(0.01)
        scope.cancel()
        with pytest.raises(StorageError, match="was cancelled"):
            finished.result()
        writer.abandon()
        [sending] = [each for each in threading.enumerate() if each.name == thread]
        proxy.hurry.set()
        sending.join()
        assert proxy.counts.requests[-1].path.endswith("?delete"), "it was there"
        assert list(place.list()) == []


def test_a_put_of_one_part_says_itself_what_is_wrong(s3_place):
    """On terms that can be given up as without them: that there is one of that name, which stays."""
    place = s3_place(conditional_puts=True)
    with CancelScope().active():
        first, second = place.create("a", 2), place.create("a", 2)
    for writer, data in ((first, b"11"), (second, b"22")):
        writer.write_at(0, memoryview(data))
    first.finish()
    with pytest.raises(StorageError, match="EEXIST"):
        second.finish()
    second.abandon()
    assert place.get("a", limit=2) == b"11"


@pytest.mark.parametrize("codecs", [[], ["float"]], ids=["plain", "coded"])
def test_an_asynchronous_save_has_the_room_that_its_threads_leave(s3_place, codecs):
    """All its files share one, of the same division as its threads: of as many as write, and with codecs if there are."""
    rooms, budget = set(), 96 << 20

    def note(verb, name):
        if verb == "create" and name.startswith("m") and (scope := current_scope()) is not None:
            rooms.add(scope.budget)

    store = BeforeStore(s3_place(part_bytes=PART), note)
    state = {f"m{i}": {"w": torch.zeros(1000)} for i in range(3)}
    sk.async_save(state, store, codecs=codecs, options=sk.Options(io_threads=64, host_budget_bytes=budget)).result()
    [room] = rooms
    threads = min(64, max(2, cores() // local_ranks()))
    assert room is not None
    assert room.nbytes == budget_for_store(store, threads, budget, coded=bool(codecs)).room_nbytes


def test_a_scope_is_cancelled_with_its_parent():
    """And has its memory; an answer that comes is returned, an error raised, and one that does not come left behind."""
    outer = CancelScope(budget=MemoryBudget(3))
    inner = CancelScope(parent=outer)
    assert inner.budget is outer.budget
    assert run_cancellable(lambda: 7, "it", inner) == 7
    with pytest.raises(ZeroDivisionError):
        run_cancellable(lambda: 1 // 0, "it", inner)
    never = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run_cancellable, never.wait, "it", inner)
        outer.cancel()
        with pytest.raises(StorageError, match="it: was cancelled"):
            asked.result()
    never.set()
    assert inner.cancelled
