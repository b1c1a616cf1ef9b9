"""What a caller holds of a save: its waits, its progress, how it is given up."""

import contextlib
import time
from dataclasses import replace

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.queue import SaveHandle
from tests.asynchronous.scene import OPTIONS, PATIENCE_S, HeldStore, broken, full, held, says

WHERE = "somewhere"


def test_a_save_that_goes_well():
    """While it goes on the handle says so, and waits end with TimeoutError; in the end there is a report."""
    where = held()
    handle = sk.async_save(full(1), where, step=7)
    assert where.reached.wait(PATIENCE_S)
    assert not handle.done()
    assert handle.staged.done()
    for ask in (handle.result, handle.exception):
        with pytest.raises(TimeoutError, match=r"not complete within 0\.01 s"):
            ask(0.01)
    where.release.set()
    report = handle.result(PATIENCE_S)
    assert handle.done()
    assert handle.exception() is None
    assert handle.result(0) is report
    assert (report.step, report.bytes_total, report.tensors) == (7, 4 * 1012, 4)
    assert 0 < report.blocked_s <= report.staged_s <= report.seconds
    assert says(where.inner) == {1}


def test_a_save_that_fails():
    handle = sk.async_save(full(1), broken())
    error = handle.exception(PATIENCE_S)
    assert isinstance(error, sk.StorageError)
    for _ in range(2):
        with pytest.raises(sk.StorageError, match="injected") as raised:
            handle.result(0)
        assert raised.value is error
    handle.staged.wait(0)
    assert handle.progress.phase == "failed"


def test_a_silent_rank_is_not_a_timeout_of_the_wait():
    """RanksSilent is a TimeoutError too: it comes from the save, not from the wait, and is told as it is."""
    handle = SaveHandle(WHERE)
    silent = sk.RanksSilent("rank 3 did not answer", ranks=[3])
    handle.end(error=silent)
    for ask in (handle.result, handle.staged.wait):
        with pytest.raises(sk.RanksSilent) as raised:
            ask(0)
        assert raised.value is silent
    assert handle.exception(0) is silent
    assert handle.retrieved


def test_staged_waits():
    """`staged` is done when the state is needed no more, ends with what went wrong before, and has timeouts."""
    handle = SaveHandle(WHERE)
    assert not handle.staged.done()
    with pytest.raises(TimeoutError, match="not copied within 0 s"):
        handle.staged.wait(0)
    handle.end_staging()
    assert handle.staged.done()
    handle.staged.wait(0)
    assert not handle.done()
    handle.end(error=sk.StorageError("later"))
    handle.staged.wait(0)
    failed = SaveHandle(WHERE)
    failed.end(error=sk.StorageError("before"))
    assert failed.staged.done()
    failed.staged.wait_without_raising()
    with pytest.raises(sk.StorageError, match="before"):
        failed.staged.wait()


def test_progress():
    where = HeldStore(sk.MemoryStore(), "list", "put")
    handle = sk.async_save({"w": torch.zeros(3 << 20)}, where, options=OPTIONS)
    assert where.reached.wait(PATIENCE_S)
    assert handle.progress == sk.SaveProgress("planning")
    assert repr(handle) == f"SaveHandle({where.url!r}, planning)"
    seen = [handle.progress]
    where.release.set()
    deadline = time.monotonic() + PATIENCE_S
    while not handle.done() and time.monotonic() < deadline:
        if (now := handle.progress) != seen[-1]:
            seen.append(now)
    handle.result(PATIENCE_S)
    seen.append(handle.progress)
    order = ["planning", "staging", "writing", "committing", "done"]
    phases = [order.index(each.phase) for each in seen]
    assert phases == sorted(phases)
    assert seen[-1].phase == "done"
    assert seen[-1].bytes_written == seen[-1].bytes_total == 12 << 20
    written = [each.bytes_written for each in seen]
    assert all(0 <= n <= 12 << 20 for n in written)
    assert repr(handle) == f"SaveHandle({where.url!r}, done)"


@pytest.mark.parametrize(
    ("before", "state", "held_verb"),
    [(False, full(2), "finish"), (True, full(2), "finish"), (True, {"step": 1}, "list")],
)
def test_cancel_before_the_commit(place, before, state, held_verb):
    if before:
        sk.save(full(1), place)
    there = sorted((info.name, info.nbytes) for info in sk.LocalStore(place).list())
    where = HeldStore(sk.LocalStore(place), held_verb)
    handle = sk.async_save(state, where, overwrite=True)
    assert where.reached.wait(PATIENCE_S)
    assert handle.cancel()
    assert handle.cancel()
    where.release.set()
    with pytest.raises(sk.SaveCancelled):
        handle.result(PATIENCE_S)
    assert handle.progress.phase == "cancelled"
    assert sorted((info.name, info.nbytes) for info in sk.LocalStore(place).list()) == there
    if before:
        assert says(place) == {1}
    sk.finish_saves()
    sk.async_save(full(3), place, overwrite=True).result(PATIENCE_S)
    assert says(place) == {3}


def test_cancel_while_it_commits():
    """From the moment the files are given out of hand the save goes through, and `cancel` says so."""

    class AtIndex(HeldStore):
        def begin(self, verb, name):
            self.held_verbs = ("put",) if name.startswith("index-") else ()
            return super().begin(verb, name)

    where = AtIndex(sk.MemoryStore())
    handle = sk.async_save(full(1), where)
    assert where.reached.wait(PATIENCE_S)
    assert handle.progress.phase == "committing"
    assert not handle.cancel()
    where.release.set()
    handle.result(PATIENCE_S)
    assert not handle.cancel()
    assert handle.progress.phase == "done"
    assert says(where.inner) == {1}


def test_a_save_that_another_rank_cancelled():
    """Where another rank was quicker, or this rank's part was over, `cancel` makes the end known here too."""
    handle = SaveHandle(WHERE)
    handle.end(error=sk.SaveCancelled("by rank 1"))
    assert not handle.retrieved
    assert handle.cancel()
    assert handle.retrieved
    late = SaveHandle(WHERE)
    late.begin_commit()
    assert not late.cancel()
    assert not late.retrieved
    late.end(error=sk.SaveCancelled("by rank 1"))
    assert late.retrieved
    failed = SaveHandle(WHERE)
    failed.end(error=sk.StorageError("the disk"))
    assert not failed.cancel()
    assert not failed.retrieved


@pytest.mark.parametrize("fails", [False, True])
def test_as_a_context(fails):
    """At the end of its block a save is complete, and its failure raised there, unless the block has one of its own."""
    with sk.async_save(full(1), where := sk.MemoryStore()) as handle:
        assert isinstance(handle, SaveHandle)
    assert handle.done()
    with pytest.raises(sk.StorageError, match="injected"), sk.async_save(full(1), broken()):
        pass
    sk.finish_saves()
    store = broken() if fails else where
    with pytest.raises(ZeroDivisionError), sk.async_save(full(2), store, overwrite=True) as handle:
        raise ZeroDivisionError
    assert handle.done()
    assert says(where) == ({1} if fails else {2})
    with pytest.raises(sk.EarlierSaveFailed, match="injected") if fails else contextlib.nullcontext():
        sk.finish_saves()


@pytest.mark.parametrize(("room", "waits"), [(100 * 4096, False), (100 * 4096 - 1, True)])
def test_that_staging_waits_for_the_disk_is_told(room, waits, caplog):
    """With less host memory than the copies take, and only then, the handle and the log say so from the call on."""
    state = {f"t{n}": torch.full((1024,), float(n)) for n in range(100)}
    where = held()
    where.release.set()
    handle = sk.async_save(state, where, options=replace(OPTIONS, staging_bytes=room))
    told = handle.progress.staging_waits
    handle.result(PATIENCE_S)
    assert told == handle.progress.staging_waits == waits
    assert (f"save to {where.url}: 410 kB are staged through" in caplog.text) == waits
    assert ("staging waits for the disk" in caplog.text) == waits
