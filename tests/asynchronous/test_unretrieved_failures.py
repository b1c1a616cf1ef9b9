"""A failure that nobody asks for is raised by what comes next, once, on every rank, with where it came from."""

import contextlib
import logging
import traceback

import pytest
import torch
import torch.distributed as dist

import shardkeep as sk
from tests.asynchronous.scene import PATIENCE_S, BrokenStore, HeldStore, broken, full, says

HASTY = sk.Options(timeout_s=4)
"""Half of it is how long rank 0 stays for a rank that has left as well."""
NEXT = {
    "async_save": lambda: sk.async_save(full(2), sk.MemoryStore()),
    "save": lambda: sk.save(full(2), sk.MemoryStore()),
    "finish_saves": sk.finish_saves,
}


def fail_unasked():
    handle = sk.async_save(full(1), where := broken())
    handle.outcome()
    return where


@pytest.mark.parametrize("then", NEXT)
def test_the_next_call_raises_it(then, caplog):
    """It is raised once, names the place, has the original and its lines as its cause, and was logged."""
    with caplog.at_level(logging.ERROR, "shardkeep"):
        where = fail_unasked()
    assert where.url in caplog.text
    assert "injected" in caplog.text
    with pytest.raises(sk.EarlierSaveFailed, match="injected") as raised:
        NEXT[then]()
    assert where.url in str(raised.value)
    cause = raised.value.__cause__
    assert isinstance(cause, sk.StorageError)
    text = "".join(traceback.format_exception(cause))
    assert "scene.py" in text
    assert "raise self.broken(verb, name)" in text
    NEXT[then]()


@pytest.mark.parametrize("then", ["async_save", "save"])
def test_the_call_that_raises_saves_all_the_same(then):
    fail_unasked()
    where = sk.MemoryStore()
    call = {"save": sk.save, "async_save": sk.async_save}[then]
    with pytest.raises(sk.EarlierSaveFailed) as raised:
        call(full(2), where)
    response = raised.value.response
    report = response.result(PATIENCE_S) if then == "async_save" else response
    assert report.where == where.url
    assert says(where) == {2}
    sk.finish_saves()


def test_a_save_that_fails_at_once_is_not_an_earlier_one():
    for _ in range(20):
        sk.async_save(full(1), broken()).exception(PATIENCE_S)


@pytest.mark.parametrize("ask", ["result", "exception", "context", "cancel"])
def test_what_was_asked_for_is_not_raised_again(ask):
    handle = sk.async_save(full(1), broken())
    if ask == "cancel":
        handle.cancel()
        handle.outcome()
    elif ask == "exception":
        assert handle.exception(PATIENCE_S) is not None
    else:
        with pytest.raises(sk.StorageError):
            handle.__exit__(None, None, None) if ask == "context" else handle.result(PATIENCE_S)
    sk.finish_saves()
    sk.save(full(1), sk.MemoryStore())


def test_looking_is_not_asking():
    """`done`, `progress`, `staged` and a wait that timed out do not take a failure for known."""
    handle = sk.async_save(full(1), broken())
    handle.staged.wait(PATIENCE_S)
    with contextlib.suppress(TimeoutError, sk.StorageError):
        handle.staged.wait(0)
    handle.outcome()
    assert handle.done()
    assert handle.progress.phase == "failed"
    with pytest.raises(sk.EarlierSaveFailed):
        sk.finish_saves()


def test_several_failures_are_told_together():
    stores = [HeldStore(broken()) for _ in range(3)]
    handles = [sk.async_save(full(n), store, max_in_flight=9) for n, store in enumerate(stores)]
    for handle, store in zip(handles, stores, strict=True):
        store.release.set()  # only now: a save that has failed would be told by the next call
        handle.outcome()
    with pytest.raises(sk.EarlierSaveFailed, match=r"and 2 more"):
        sk.finish_saves()
    sk.finish_saves()


# On ranks


def told_by(call):
    try:
        call()
    except sk.CheckpointError as error:
        text = "".join(traceback.format_exception(error))
        return type(error).__name__, type(error.__cause__).__name__, list(error.by_rank), text
    return "ok"


def rank_1_fails(folder, asking, then):
    """Save to a store that is broken on rank 1; these ranks ask for the result; return what comes next says."""
    rank = dist.get_rank()
    store = sk.LocalStore(f"{folder}/broken")
    handle = sk.async_save({"w": sk.PerRank(torch.ones(2))}, BrokenStore(store) if rank == 1 else store)
    if rank in asking:
        assert isinstance(handle.exception(PATIENCE_S), sk.StorageError)
    else:
        handle.outcome()
    dist.barrier()
    state = {"w": sk.PerRank(torch.full((2,), 2.0))}
    if then == "finish_saves":
        first = told_by(sk.finish_saves)
    elif then == "save":
        first = told_by(lambda: sk.save(state, f"{folder}/next", options=HASTY))
    else:
        first = told_by(lambda: sk.async_save(state, f"{folder}/next", options=HASTY).result(PATIENCE_S))
    sk.finish_saves()
    dist.barrier()
    if then != "finish_saves":
        assert sk.open(f"{folder}/next").keys()
    sk.async_save(state, f"{folder}/after").result(PATIENCE_S)
    return first


@pytest.mark.parametrize("asking", [(), (0,), (1,)])
@pytest.mark.parametrize("then", NEXT)
def test_every_rank_that_has_not_asked_is_told(rank_pool, tmp_path, then, asking):
    """One rank's failure is raised by the next call, with the lines it came from; the save after that is made by both."""
    told = rank_pool.run(2, rank_1_fails, str(tmp_path), asking, then)
    for rank in range(2):
        if rank in asking:
            assert told[rank] == "ok"
            continue
        kind, cause, ranks, text = told[rank]
        assert (kind, cause, ranks) == ("EarlierSaveFailed", "StorageError", [1])
        assert text.count("raise self.broken(verb, name)") == 1, "once, also where it did not happen"
        assert ("RemoteTraceback: on rank 1:" in text) == (rank == 0)


def a_loop_that_goes_on(folder):
    """Save again and again, log what goes wrong, and ask for nothing; rank 1's first state is bad."""
    ended = []
    for step in range(6):
        state = {"w": torch.ones(2), "bad": object() if step == 0 and dist.get_rank() == 1 else 1}
        try:
            sk.async_save(state, f"{folder}/{step}")
        except sk.CheckpointError as error:
            ended.append(type(error).__name__)
        else:
            ended.append("")
        dist.barrier()
    with contextlib.suppress(sk.EarlierSaveFailed):
        sk.finish_saves()
    return ended


def test_a_loop_that_goes_on_saves_again(rank_pool, tmp_path):
    rank_pool.run(2, a_loop_that_goes_on, str(tmp_path))
    assert sk.open(str(tmp_path / "5")).step is None
