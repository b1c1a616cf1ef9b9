"""The events of saves and loads, and that callbacks do not affect them."""

import logging
import os
import threading

import msgspec
import pytest
import torch

import shardkeep as sk
from shardkeep import dcp
from shardkeep import events as all_events
from shardkeep.dcp.staging import DefaultStager, StagingOptions
from shardkeep.events import LoadFailed, LoadFinished, SaveCommitted, SaveFailed, SaveProgressed, emit
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import HeldStore, broken
from tests.reports import scene

PHASES = ("blocked", "staged", "written")


def save_and_load(where, background):
    with scene.heard() as events:
        if background:
            report = sk.async_save(scene.state(), where, step=7).result()
        else:
            report = sk.save(scene.state(), where, step=7)
        into = scene.state()
        loaded = sk.load(into, where)
    return scene.names(events), [msgspec.json.encode(event) for event in events], report, loaded


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_events_of_a_save_and_a_load(rank_pool, tmp_path, ranks, background):
    """Every rank gets an event for each step in order, with the numbers of the reports, and every event is JSON."""
    where = str(tmp_path / "ck")
    steps = ["SaveBegan", *(["SaveStaged"] if background else []), "SaveWritten", "SaveCommitted"]
    outcomes = rank_pool.run(ranks, save_and_load, where, background)
    kinds = {name: getattr(all_events, name) for name in [*steps, "LoadBegan", "LoadFinished"]}
    for rank, (names, coded, report, loaded) in enumerate(outcomes):
        assert names == [*steps, "LoadBegan", "LoadFinished"]
        events = [msgspec.json.decode(each, type=kinds[name]) for name, each in zip(names, coded, strict=True)]
        assert [msgspec.json.decode(each)["event"] for each in coded] == names
        assert {(event.rank, event.where) for event in events} == {(rank, where)}
        assert [event.step for event in events] == [7] * len(steps) + [None, 7]
        committed, finished = events[len(steps) - 1], events[-1]
        figures = ("save_id", "bytes_total", "bytes_written", "seconds", *(f"{name}_s" for name in PHASES), "gb_per_s")
        assert {name: getattr(committed, name) for name in figures} == {name: getattr(report, name) for name in figures}
        assert committed.bytes_total == ranks * scene.ROWS * 65536
        assert (committed.phases, committed.ranks, committed.slowest) == (report.phases, report.ranks, report.slowest)
        assert (finished.bytes_read, finished.seconds) == (loaded.bytes_read, loaded.seconds)
        assert all(0 < getattr(committed, f"{name}_s") <= committed.seconds for name in PHASES)


@pytest.mark.parametrize("background", [False, True])
def test_rank_0_knows_the_phases_of_all(rank_pool, tmp_path, background):
    """Each rank has its own phases, within the call; rank 0 has those of all, up to the last byte, and what was moved."""
    outcomes = [both for _, _, *both in rank_pool.run(2, save_and_load, str(tmp_path / "ck"), background)]
    own = ["describe", "plan", "write"]
    expected = sorted([*own, "queue", "stage"] if background else own)
    for rank, (saved, loaded) in enumerate(outcomes):
        assert sorted(span.name for span in saved.phases) == sorted([*expected, "wait", "commit"])
        assert sorted(span.name for span in loaded.phases) == ["open", "place", "plan", "read"]
        assert all(0 <= span.begin_s <= span.end_s <= saved.seconds for span in saved.phases)
        assert sum(span.nbytes for span in saved.phases if span.name == "write") == saved.bytes_written
        assert sum(span.nbytes for span in loaded.phases if span.name == "read") == loaded.bytes_read
        assert bool(saved.ranks) == bool(loaded.ranks) == (rank == 0)
    saved, loaded = outcomes[0]
    assert [each.rank for each in saved.ranks] == [each.rank for each in loaded.ranks] == [0, 1]
    assert saved.ranks[0].spans == saved.phases
    sent = [span for span in outcomes[1][0].phases if span.name not in ("wait", "commit")]
    assert [(span.name, span.nbytes) for span in saved.ranks[1].spans] == [(span.name, span.nbytes) for span in sent]
    assert [span.seconds for span in saved.ranks[1].spans] == pytest.approx([span.seconds for span in sent], abs=1e-6)
    # All begin to write after the same answer, whatever their clocks say.
    planned = [next(span.end_s for span in each.spans if span.name == "plan") for each in saved.ranks]
    assert planned[0] == pytest.approx(planned[1], abs=1e-6)


def save_through(where, broken):
    with scene.heard() as events:
        for save in (sk.save, lambda *args: sk.async_save(*args).result()):
            store = sk.LocalStore(where)
            if scene.rank() == broken:
                store = FaultyStore(store, "full", at=0, verbs={"write_at"})
            with pytest.raises(sk.StorageFull):
                save(scene.state(), store)
        with pytest.raises(sk.CheckpointNotFound):
            sk.load(scene.state(), where)
    return events


@pytest.mark.parametrize("ranks", [1, 2])
def test_failures_are_reported_on_every_rank(rank_pool, tmp_path, ranks):
    for events in rank_pool.run(ranks, save_through, str(tmp_path / "ck"), ranks - 1):
        ends = [event for event in events if isinstance(event, (SaveCommitted, SaveFailed, LoadFinished, LoadFailed))]
        assert scene.names(ends) == ["SaveFailed", "SaveFailed", "LoadFailed"]
        assert [event.kind for event in ends] == ["StorageFull", "StorageFull", "CheckpointNotFound"]
        assert "No space left" in ends[0].message
        assert not ends[0].cancelled
        assert ends[0].seconds > 0
        assert {"describe", "plan"} <= {span.name for span in ends[0].phases}
        assert sum(isinstance(event, all_events.SaveBegan) for event in events) == 2


def test_a_cancelled_save_is_marked():
    store = HeldStore(sk.MemoryStore(), "create")
    with scene.heard() as events:
        handle = sk.async_save(scene.state(), store)
        assert store.reached.wait(60)
        assert handle.cancel()
        store.release.set()
        assert isinstance(handle.exception(), sk.SaveCancelled)
        handle.outcome()
        sk.finish_saves()
    assert [(event.kind, event.cancelled) for event in events if isinstance(event, SaveFailed)] == [
        ("SaveCancelled", True)
    ]


def test_a_state_that_cannot_be_saved_is_a_failure(tmp_path):
    """A failure in the call of an asynchronous save is reported once."""
    with scene.heard() as events:
        for save in (sk.save, sk.async_save):
            for state, step, error in (({"f": object()}, 3, sk.UnsupportedLeaf), ({}, object(), sk.StateError)):
                with pytest.raises(error):
                    save(state, tmp_path / "ck", step=step)
    assert scene.names(events) == ["SaveBegan", "SaveFailed"] * 4
    assert [event.step for event in events] == [3, 3, None, None] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is not in use")
def test_a_state_that_a_stager_copies_on_its_thread_is_reported_as_staged(tmp_path):
    """The event comes when the thread has copied the state, and the report says when that was."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    with scene.heard() as events:
        response = dcp.async_save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "ck", async_stager=stager)
        response.upload_completion.result()
    stager.close()
    assert scene.names(events) == ["SaveBegan", "SaveStaged", "SaveWritten", "SaveCommitted"]
    assert events[-1].staged_s == max(events[1].seconds, events[-1].blocked_s)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_hurts_nothing(tmp_path, caplog, error):
    """An exception in a callback is logged once; it and other callbacks still get all events."""
    calls = []

    def broken(event):
        calls.append(event)
        raise error("no such dashboard")

    with caplog.at_level(logging.WARNING, "shardkeep"), sk.on_event(broken), scene.heard() as events:
        sk.save(scene.state(), tmp_path / "a")
        sk.async_save(scene.state(), tmp_path / "b").result()
        sk.load(scene.state(), tmp_path / "b")
    said = [record for record in caplog.records if "no such dashboard" in str(record.exc_info)]
    assert len(said) == len(caplog.records) == 1
    assert len(calls) == len(events) == 9
    assert "broken" in said[0].getMessage()


def test_a_stopped_callback_gets_no_events(tmp_path):
    first, second = [], []
    listening = sk.on_event(first.append)
    with sk.on_event(second.append):
        sk.save(scene.state(), tmp_path / "a")
    listening.stop()
    listening.stop()
    sk.save(scene.state(), tmp_path / "b")
    assert len(first) == len(second) == 3


def test_only_the_requested_kinds_arrive(tmp_path):
    with scene.heard() as some, scene.heard(kinds=[SaveCommitted]) as ends, scene.heard(kinds=[SaveProgressed]) as bars:
        sk.save(scene.state(), tmp_path / "a")
    assert scene.names(ends) == ["SaveCommitted"]
    assert not any(isinstance(event, SaveProgressed) for event in some)
    assert bars
    assert bars[-1].bytes_written == bars[-1].bytes_total == ends[0].bytes_total


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_progress_of_a_save_in_the_background(tmp_path, writer):
    with scene.heard(kinds=[SaveProgressed]) as bars:
        sk.async_save({"w": torch.ones(1 << 20)}, tmp_path / "a", writer=writer).result()
    assert bars[-1].bytes_staged == bars[-1].bytes_written == bars[-1].bytes_total == 4 << 20
    assert [each.bytes_written for each in bars] == sorted(each.bytes_written for each in bars)


def test_no_event_is_built_without_a_listener():
    def made():
        raise AssertionError("there is no listener")

    with sk.on_event(print, kinds=[LoadFailed]):
        with pytest.raises(AssertionError):
            emit(LoadFailed, made)
        emit(SaveCommitted, made)
    emit(LoadFailed, made)


def test_saves_go_on_while_a_callback_waits(tmp_path):
    entered, release = threading.Event(), threading.Event()

    def slow(event):
        if event.where.endswith("/a"):
            entered.set()
            assert release.wait(60)

    with sk.on_event(slow, kinds=[SaveCommitted]):
        handle = sk.async_save(scene.state(), tmp_path / "a", max_in_flight=2)
        assert entered.wait(60)
        sk.save(scene.state(), tmp_path / "b")
        assert not handle.done()
        release.set()
        handle.result()


def in_a_fork():
    with scene.heard() as events:
        child = os.fork()
        if child == 0:
            emit(SaveCommitted, lambda: os._exit(1))
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(events)


def test_a_forked_process_has_no_listeners(rank_pool):
    """Callbacks hold threads and files that a fork does not have."""
    assert rank_pool.run(1, in_a_fork) == [(0, 0)]


def test_names_that_are_no_text_do_not_break_json(tmp_path):
    where = os.fsdecode(os.fsencode(tmp_path) + b"/ck-\xff")
    with scene.heard() as events:
        sk.save(scene.state(), where)
    assert len([msgspec.json.encode(event) for event in events]) == 3
    assert events[0].where.endswith("ck-\\udcff")


class GoneError(RuntimeError):
    pass


class GoneHandler(logging.Handler):
    def handle(self, record):
        raise GoneError("the log server is gone")


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_that_fails_ends_no_save(tmp_path, fails):
    """A handler that raises neither fails a save that is committed nor keeps one that failed from ending."""
    handler = GoneHandler()
    log = logging.getLogger("shardkeep")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        handle = sk.async_save({"w": torch.ones(3)}, broken() if fails else tmp_path / "ck")
        assert (handle.exception(60) is None) is not fails
        if not fails:
            sk.save({"w": torch.ones(3)}, tmp_path / "other")
            sk.load({"w": torch.ones(3)}, tmp_path / "other")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
