"""How promotions behave: they let training and saves go first, trust no store that checks nothing, and say what they did."""

import json
import os
import sys
import threading
from dataclasses import replace

import pytest
import torch

import shardkeep as sk
from shardkeep.engine.workers import MIN_WINDOW_NBYTES
from shardkeep.errors import NotPromoted, StorageError
from shardkeep.layouts.native import read_record
from shardkeep.manage.file_copy import copy_files
from shardkeep.storage.base import verifies_uploads
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_place
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from tests.manage.scene import QUICK, FarRoot, checkpointer, state_at
from tests.manage.test_tiers import committed, groups


def test_a_save_goes_first(tmp_path):
    """While one is under way each window of a promotion waits a moment, before and after it none does."""
    near, far, slept = FarRoot(), FarRoot(), list[float]()
    held, go, copying, copy = (threading.Event() for _ in range(4))

    def hold_the_save(verb, name):
        if verb == "create" and near.count("create", "state-") > 1:
            held.set()
            go.wait(20)

    def hold_the_promotion(verb, name):
        if verb == "create":
            copying.set()
            copy.wait(20)

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 30:  # the promotion went on all the same: three windows
            go.set()

    near.before, far.before = hold_the_save, hold_the_promotion
    with checkpointer(near, promote_to=far, clock=replace(QUICK, sleep=sleep)) as ckpt:
        ckpt.save(1, state_at(1))
        assert copying.wait(20)
        assert not slept
        handle = ckpt.save(2, state_at(2))
        assert held.wait(20)
        copy.set()
        handle.result(20)
        ckpt.wait()
        assert set(slept) == {0.02}
        slept.clear()
        far.seen.clear()
    assert not slept
    assert committed(far) == [1, 2]


def test_windows_are_bounded_and_each_gives_way():
    """A copy takes windows of what its budget allows, and asks before each of them, also of those it reads back."""
    source, target, asked, sizes = MemoryStore(), MemoryStore(), list[int](), list[int]()
    sk.save({"w": torch.arange(3_000_000)}, source)
    record = read_record(source)

    class Noting(MemoryStore):
        def create(self, name, nbytes):
            writer, noted = super().create(name, nbytes), sizes
            write_at = writer.write_at

            def noting(offset, data):
                noted.append(len(data))
                write_at(offset, data)

            writer.write_at = noting
            return writer

    target = Noting()
    options = sk.Options(io_threads=4, host_budget_bytes=4 * MIN_WINDOW_NBYTES)
    done = copy_files(source, target, record, list(record.names), options, lambda: True, lambda: asked.append(1))
    assert sum(sizes) == done.nbytes == record.stored_nbytes
    assert max(sizes) <= MIN_WINDOW_NBYTES
    assert len(asked) == 2 * len(sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_promotions_stand_back(tmp_path):
    """
    Threads that copy have a lower priority than those of asynchronous saves, which have a lower one than training.

    The thread that asks a store first has that of training, and so have threads that a package starts then, for all.
    """
    near, far = FarRoot(), FarRoot()
    found = {"near": set(), "far": set()}
    first = set[int]()

    def note(root, verb):
        if verb in ("create", "write_at"):
            found[root].add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        elif threading.current_thread().name == "shardkeep-promote":
            first.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    near.before, far.before = (lambda verb, name, root=root: note(root, verb) for root in found)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with checkpointer(near, promote_to=far) as ckpt:
        ckpt.save(1, state_at(1))
    assert mine < min(found["near"]) <= max(found["near"]) < min(found["far"])
    assert first == {mine}
    assert mine == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def flipping(target, start):
    """A store that keeps another byte than it was given, in the middle of a file."""
    create = target.create

    def flipped(name, nbytes):
        writer = create(name, nbytes)
        finish = writer.finish

        def finishing(end=None):
            if name.startswith(start):
                writer.data[nbytes // 2] ^= 1
            finish(end)

        writer.finish = finishing
        return writer

    target.create = flipped
    return target


@pytest.mark.parametrize("codecs", [None, ["zstd"]])
@pytest.mark.parametrize("start", ["w-", "index-"])
def test_what_a_store_changes_is_noticed(codecs, start):
    """What was written is read back: the file and the place in it are named, and the next copy replaces it."""
    source, target = MemoryStore(), MemoryStore()
    sk.save({"w": {"w": torch.arange(60_000)}, "name": "x"}, source, codecs=codecs)
    record, options = read_record(source), sk.Options(io_threads=2, host_budget_bytes=8 << 20)
    with pytest.raises(StorageError, match=rf"{start}.* was written, and is not read back") as caught:
        copy_files(source, flipping(target, start), record, list(record.names), options, lambda: True)
    assert caught.value.details["name"].startswith(start)
    assert caught.value.details["offset"] >= 0
    del target.create
    again = copy_files(source, target, record, list(record.names), options, lambda: True)
    assert again.files == 1
    assert again.nbytes == record.at_rest[caught.value.details["name"]]


def test_a_record_that_the_store_changes_is_noticed(tmp_path, monkeypatch):
    """It is reported as a failed promotion, and written again after the next save."""
    far = FarRoot()
    place_of = far.inner.place("step-1")
    put = place_of.put

    def other(name, data, **how):
        put(name, data.replace(b'"step"', b'"stop"') if name == "shardkeep.json" else data, **how)

    with checkpointer(tmp_path, promote_to=far) as ckpt:
        monkeypatch.setattr(place_of, "put", other)
        ckpt.save(1, state_at(1))
        with pytest.raises(NotPromoted, match="not read back as it was"):
            ckpt.wait()
        monkeypatch.undo()
        ckpt.save(2, state_at(2))
    assert committed(far) == [1, 2]
    sk.open(far.place("step-1")).verify()


def test_which_stores_check_what_arrives(tmp_path):
    """Only S3 itself, with a checksum: all else is read back."""
    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "x"}
    s3 = open_place("s3://bucket/run", **keys).place("step-1")
    assert verifies_uploads(s3)
    assert verifies_uploads(RetryingStore(s3, RetryPolicy(0)))
    for store in (
        open_place("s3://bucket/run", checksum_algorithm="none", **keys).place("step-1"),
        open_place("s3://bucket/run", endpoint="http://localhost:1", **keys).place("step-1"),
        open_place("gs://bucket/run", skip_signature=True).place("step-1"),
        MemoryStore(),
        LocalStore(tmp_path),
    ):
        assert not verifies_uploads(store)


def traced(folder):
    how = {"promote_to": folder / "far", "asynchronous": False}
    with sk.trace(folder / "trace.json"), checkpointer(folder / "near", **how) as ckpt:
        ckpt.save(1, groups(1))
        ckpt.wait()


def test_a_trace_shows_promotions(rank_pool, tmp_path):
    """Those of all ranks, with bytes, files and phases, each within its promotion."""
    rank_pool.run(2, traced, tmp_path)
    record = read_record(LocalStore(tmp_path / "far" / "step-1"))
    entries = json.loads((tmp_path / "trace.json").read_bytes())
    spans = [each for each in entries if each["ph"] == "X" and each["args"]["where"].startswith(str(tmp_path / "far"))]
    names = {rank: [span["name"] for span in spans if span["pid"] == rank] for rank in (0, 1)}
    assert names == {0: ["promote", "choose", "copy", "wait", "commit"], 1: ["promote", "choose", "copy"]}
    for whole in (span for span in spans if span["name"] == "promote"):
        inside = [span for span in spans if span["pid"] == whole["pid"]]
        assert all(whole["ts"] <= span["ts"] for span in inside)
        assert all(span["ts"] + span["dur"] <= whole["ts"] + whole["dur"] for span in inside)
        assert whole["args"]["files"] == whole["args"]["files_total"] == len(record.at_rest)
        assert whole["args"]["source"] == str(tmp_path / "near" / "step-1")
    assert sum(span["args"]["bytes"] for span in spans if span["name"] == "copy") == record.stored_nbytes
