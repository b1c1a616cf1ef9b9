"""Traces, held against the trace event format: what Perfetto and chrome://tracing read."""

import itertools
import json
import os
from collections import defaultdict

import pytest
import torch.distributed as dist

import shardkeep as sk
from shardkeep.events import SaveCommitted
from shardkeep.testing.faulty_store import FaultyStore
from tests.asynchronous.scene import HeldStore
from tests.reports import scene

FIELDS = {
    "M": {"name": str, "ph": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "ph": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
}
ARGS_OF_NAMES = {
    "process_name": {"name": str},
    "process_labels": {"labels": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}


def read(path):
    entries = defaultdict(list)
    for entry in json.loads(path.read_bytes()):
        fields = FIELDS[entry["ph"]]
        assert {name: type(value) for name, value in entry.items()} == fields, entry
        assert entry["pid"] >= 0
        assert entry["tid"] >= 0
        if entry["ph"] == "M":
            assert {name: type(value) for name, value in entry["args"].items()} == ARGS_OF_NAMES[entry["name"]]
        else:
            assert entry["ts"] > 0
            assert entry.get("dur", 0) >= 0
        entries[entry["ph"]].append(entry)
    named = {(entry["pid"], entry["tid"]) for entry in entries["M"] if entry["name"] == "thread_name"}
    assert {(entry["pid"], entry["tid"]) for entry in entries["X"]} == named
    return entries


def insist_on_order(spans):
    """Spans of one row come one after the other; those of a call lie within its own."""
    rows = defaultdict(list)
    for span in spans:
        rows[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(row)), row
    for whole in (span for span in spans if span["name"] in ("save", "load")):
        inner = [
            span
            for span in spans
            if span["pid"] == whole["pid"]
            and span["args"]["where"] == whole["args"]["where"]
            and same_call(span, whole)
        ]
        assert len(inner) > 3
        assert all(
            whole["ts"] <= span["ts"] and span["ts"] + span["dur"] <= whole["ts"] + whole["dur"] for span in inner
        )


def same_call(span, whole):
    return (span["tid"] >= 800) == (whole["name"] == "load")


def traced(path, where, times):
    with sk.trace(path):
        handles = [sk.async_save(scene.state(), f"{where}-{time}", step=time, max_in_flight=2) for time in range(times)]
        del handles
    with sk.trace(path + ".loads"):
        sk.load(scene.state(), f"{where}-0")
    return os.path.exists(path)


def test_a_trace_of_asynchronous_saves_on_two_ranks(rank_pool, tmp_path):
    """One valid file with the phases of both ranks, each call around its phases; saves under way are waited for."""
    assert rank_pool.run(2, traced, str(tmp_path / "trace.json"), str(tmp_path / "ck"), 3) == [True, True]
    entries = read(tmp_path / "trace.json")
    insist_on_order(entries["X"])
    assert {entry["args"]["name"] for entry in entries["M"] if entry["name"] == "process_name"} == {"rank 0", "rank 1"}
    for rank, late in ((0, ["commit", "wait"]), (1, [])):
        mine = [span for span in entries["X"] if span["pid"] == rank]
        for step in range(3):
            found = sorted(span["name"] for span in mine if span["args"]["step"] == step)
            assert found == sorted(["save", "queue", "describe", "stage", "plan", "write", *late])
        assert all(span["args"]["bytes"] > scene.ROWS * 65536 for span in mine if span["name"] in ("write", "save"))
    loads = read(tmp_path / "trace.json.loads")
    insist_on_order(loads["X"])
    assert sorted(span["name"] for span in loads["X"] if span["pid"] == 1) == ["load", "open", "place", "plan", "read"]


def without_a_group_in_the_end(path, where):
    with sk.trace(path):
        sk.save(scene.state(), where)
        dist.barrier()
        dist.destroy_process_group()


def test_other_ranks_never_touch_the_file(rank_pool, tmp_path):
    """Also where the process group is gone in the end, and every rank seems to be alone."""
    rank_pool.run(2, without_a_group_in_the_end, str(tmp_path / "trace.json"), str(tmp_path / "ck"))
    assert {span["pid"] for span in read(tmp_path / "trace.json")["X"]} == {0, 1}


def test_failures_are_in_a_trace(tmp_path):
    store = FaultyStore(sk.MemoryStore(), "full", at=0, verbs={"write_at"})
    with sk.trace(tmp_path / "trace.json"), pytest.raises(sk.StorageFull):
        sk.save(scene.state(), store, step=4)
    spans = read(tmp_path / "trace.json")["X"]
    assert [span["name"] for span in spans] == ["save", "describe", "plan", "write"]
    assert spans[0]["args"]["kind"] == "StorageFull"
    insist_on_order(spans)


def test_a_trace_of_nothing_is_one(tmp_path):
    """Without a call inside there is still a file that opens, in place of an older one."""
    (tmp_path / "trace.json").write_text("an older one")
    with sk.trace(tmp_path / "trace.json"):
        pass
    entries = read(tmp_path / "trace.json")
    assert (entries["X"], len(entries["M"])) == ([], 1)


def test_an_exception_leaves_a_valid_trace_and_does_not_wait(tmp_path):
    """What ended before is in it; a save under way is left alone."""
    store = HeldStore(sk.MemoryStore(), "create")

    def fail():
        with sk.trace(tmp_path / "trace.json"):
            sk.save(scene.state(), tmp_path / "ck", step=1)
            handles.append(sk.async_save(scene.state(), store, step=2))
            raise RuntimeError("training went wrong")

    handles = []
    with pytest.raises(RuntimeError, match="training went wrong"):
        fail()
    assert {span["args"]["step"] for span in read(tmp_path / "trace.json")["X"]} == {1}
    store.release.set()
    handles[0].result()
    assert {span["args"]["step"] for span in read(tmp_path / "trace.json")["X"]} == {1}


def test_what_a_killed_job_leaves_needs_only_its_bracket(tmp_path):
    """Each call is on disk when it has ended: the file lacks nothing but what viewers do without."""
    path = tmp_path / "trace.json"
    seen = []
    with sk.trace(path), sk.on_event(lambda _: seen.append(path.read_bytes()), kinds=[SaveCommitted]):
        sk.save(scene.state(), tmp_path / "ck")
    assert len(seen) == 1
    assert next(entry["name"] for entry in json.loads(seen[0] + b"]") if entry["ph"] == "X") == "save"


def test_a_save_that_began_before_the_trace_is_not_waited_for(tmp_path):
    """One that ends inside is in it, one that does not is not."""
    early, late = HeldStore(sk.MemoryStore(), "create"), HeldStore(sk.MemoryStore(), "create")
    handles = [sk.async_save(scene.state(), store, step=1, max_in_flight=2) for store in (early, late)]
    with sk.trace(tmp_path / "trace.json"):
        early.release.set()
        handles[0].result()
    late.release.set()
    handles[1].result()
    assert len([span for span in read(tmp_path / "trace.json")["X"] if span["name"] == "save"]) == 1


def test_a_folder_that_is_not_there_is_known_at_once(tmp_path):
    with pytest.raises(sk.StorageError, match="cannot be created"), sk.trace(tmp_path / "nowhere" / "trace.json"):
        pytest.fail("the block was entered")


def test_a_file_that_cannot_be_written_is_logged_in_the_end(tmp_path):
    """The saves are made, what comes after the block does not depend on it, and no exception inside is hidden."""

    def fail():
        with sk.trace("/dev/full"):
            sk.save(scene.state(), tmp_path / "ck")
            raise RuntimeError("training went wrong")

    with scene.logged() as lines, pytest.raises(RuntimeError, match="training went wrong"):
        fail()
    assert "/dev/full could not be written" in lines[-1]
    with scene.logged() as lines, sk.trace("/dev/full"):
        sk.save(scene.state(), tmp_path / "other")
    assert "/dev/full could not be written" in lines[-1]
    sk.open(tmp_path / "ck").verify()
