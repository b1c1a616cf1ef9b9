"""Promotions that fail, are cut short, cancelled, or meet damage: what was saved is as safe as before."""

import errno
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import NotPromoted, SaveCancelled, StorageError
from shardkeep.events import Event, PromotionFailed, PromotionFinished
from shardkeep.layouts.native import read_record
from shardkeep.manage.file_copy import copy_files
from shardkeep.manage.retention import KeepAll
from shardkeep.storage.memory import MemoryStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.manage.scene import Broken, FarRoot, checkpointer, damage, empty_state, state_at, until
from tests.manage.test_tiers import committed

OPTIONS = sk.Options(io_threads=2, host_budget_bytes=8 << 20)


def groups(step):
    return {f"part{number}": {"w": torch.arange(20_000.0) + step + number} for number in range(4)}


def copied(source, target, names=None, wanted=lambda: True):
    record = read_record(source)
    return copy_files(source, target, record, list(names or record.names), OPTIONS, wanted)


@pytest.mark.parametrize("codecs", [None, ["zstd"]])
def test_what_is_sound_is_not_copied_again(codecs):
    """What is there is read and checked: cut short, flipped, or of another size, it is replaced."""
    source, target = MemoryStore(), MemoryStore()
    sk.save({**groups(1), "long": torch.arange(3_000_000)}, source, codecs=codecs)
    record = read_record(source)
    done = copied(source, target)
    assert done.nbytes == record.stored_nbytes
    assert {name: target.get(name, limit=1 << 30) for name in record.names} == {
        name: source.get(name, limit=1 << 30) for name in record.names
    }
    sizes = record.at_rest
    first, second, third, *_ = sorted(sizes)
    data = bytearray(target.get(first, limit=1 << 30))
    data[len(data) // 2] ^= 1
    target.put(first, bytes(data), replace=True)
    target.put(second, target.get(second, limit=1 << 30)[:-1], replace=True)
    target.delete(third)
    again = copied(source, target)
    assert again.nbytes == sum(sizes[name] for name in (first, second, third))
    assert copied(source, target).nbytes == 0
    target.put("shardkeep.json", source.get("shardkeep.json", limit=1 << 20))
    sk.open(target).verify()


@pytest.fixture(params=["plain", "zstd", "windows of 4 KiB"])
def codecs(request, monkeypatch):
    """Also windows so small that headers and indices, each of which has one digest, take several."""
    if "windows" in request.param:
        monkeypatch.setattr("shardkeep.manage.file_copy.divide_budget", lambda *_: (2, 4096))
    return ["zstd"] if request.param == "zstd" else None


NAMES = {f"name-{number}": torch.ones(1) for number in range(200)}


def test_no_damaged_byte_is_copied(codecs):
    """Wherever a bit of the source is flipped, copying stops, and says in which file; nothing is left of that file."""
    source = MemoryStore()
    sk.save({"w": torch.arange(60_000), **NAMES}, source, codecs=codecs)
    for name, nbytes in read_record(source).at_rest.items():
        good = source.get(name, limit=1 << 30)
        for at in {0, 9, nbytes // 3, nbytes // 2, nbytes - 40, nbytes - 1}:
            data = bytearray(good)
            data[at] ^= 4
            source.put(name, bytes(data), replace=True)
            target = MemoryStore()
            with pytest.raises(sk.DamagedCheckpoint, match=name):
                copied(source, target, [name])
            assert not list(target.list())
        source.put(name, good[:-1], replace=True)
        with pytest.raises(sk.WrongSize, match=name):
            copied(source, MemoryStore(), [name])
        source.delete(name)
        with pytest.raises(sk.WrongSize, match="is missing"):
            copied(source, MemoryStore(), [name])
        source.put(name, good)


def test_what_comes_damaged_once_is_no_damage(codecs):
    """Whichever read of the source is damaged on the way, it is read again, and what is copied is right."""
    source = MemoryStore()
    sk.save({"w": torch.arange(6000), **NAMES}, source, codecs=codecs)
    counting = FaultyStore(source)
    copied(counting, MemoryStore())
    reads = sum(each.startswith("read_into") for each in counting.operations)
    assert reads >= 3
    for at in range(reads):
        target = MemoryStore()
        copied(FaultyStore(source, "flip", at=at, verbs=["read_into"]), target)
        assert copied(source, target).nbytes == 0


def test_a_copy_goes_on_after_any_failure():
    source = MemoryStore()
    sk.save(groups(1), source)
    counting = FaultyStore(MemoryStore())
    copied(source, counting)
    for fault in ("error", "short"):
        for at in range(len(counting.operations)):
            target = MemoryStore()
            with suppress(StorageError):
                copied(source, FaultyStore(target, fault, at=at))
            copied(source, target)
            assert copied(source, target).nbytes == 0


def test_a_copy_that_is_cancelled_ends_soon():
    """At the next window; files that were complete by then stay."""
    source, target, asked = MemoryStore(), MemoryStore(), []

    def wanted():
        asked.append(1)
        return len(asked) <= 3

    sk.save(groups(1), source)
    with pytest.raises(SaveCancelled):
        copied(source, target, wanted=wanted)
    assert 0 < len(list(target.list())) <= 3
    assert copied(source, target).nbytes < read_record(source).stored_nbytes


@pytest.mark.parametrize(("verb", "start"), [("create", "part"), ("put", "claim"), ("put", "shardkeep"), ("list", "")])
def test_a_failure_is_told_and_tried_again(tmp_path, verb, start):
    """The checkpoint stays where it was saved, nothing is visible in the far root, and the next save promotes both."""
    far, heard = FarRoot(), list[Event]()
    with checkpointer(tmp_path, promote_to=far, keep_last=1, on_event=heard.append, retries=0) as ckpt:
        ckpt.save(1, groups(1))
        ckpt.wait()
        far.before = Broken(verb, start)
        ckpt.save(2, groups(2))
        with pytest.raises(NotPromoted, match=r"could not be promoted to memory://.*: injected") as caught:
            ckpt.wait()
        assert isinstance(caught.value, sk.EarlierSaveFailed)
        assert isinstance(caught.value.__cause__, StorageError)
        assert committed(tmp_path) == [2]
        far.before = None
        assert committed(far) == [1]
        ckpt.save(3, groups(3))
        ckpt.wait()
        assert committed(far) == [3]
    failed = [event for event in heard if isinstance(event, PromotionFailed)]
    assert [(event.step, event.kind) for event in failed] == [(None if start in ("claim", "") else 2, "StorageError")]
    assert [event.step for event in heard if isinstance(event, PromotionFinished)] == [1, 3]


@pytest.mark.parametrize("required", [True, False])
def test_what_is_to_be_promoted_stays(tmp_path, required):
    """While the far root is away, old steps that it wants are not deleted, unless the user said so; then all come."""
    far = FarRoot()
    how = {"keep_last": 1, "keep_promoted": KeepAll(), "on_error": "warn", "retries": 0}
    with checkpointer(tmp_path, promote_to=far, promote_required=required, **how) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        far.before = Broken("create")
        for step in (2, 3, 4):
            ckpt.save(step, state_at(step))
            ckpt.wait()
        assert committed(tmp_path) == ([2, 3, 4] if required else [4])
        far.before = None
        ckpt.save(5, state_at(5))
        ckpt.wait()
        there = committed(far)
        assert there == [1, 2, 3, 4, 5] if required else {1, 5} <= set(there) <= {1, 4, 5}
        assert committed(tmp_path) == [5]


def test_a_failure_is_told_by_a_later_step(tmp_path):
    """As that of a save is; what the step saves is not affected."""
    far, heard = FarRoot(), list[Event]()
    with checkpointer(tmp_path, promote_to=far, every_steps=1, retries=0, on_event=heard.append) as ckpt:
        ckpt.step(1, state_at(1))
        ckpt.wait()
        far.before = Broken("put", "shardkeep")
        ckpt.step(2, state_at(2))
        ckpt.wait(promotions=False)
        until(ckpt._saves.replicator.rounds._tasks[2].done)
        far.before = None
        with pytest.raises(NotPromoted) as caught:
            ckpt.step(3, state_at(3))
        assert isinstance(caught.value.response, sk.SaveHandle)
        ckpt.wait()
        assert committed(far) == [1, 2, 3]
    copied = {e.step: (e.bytes_copied, e.files_copied) for e in heard if isinstance(e, PromotionFinished)}
    assert copied[2] == (0, 0) < copied[3]  # everything was there except the commit


def test_a_damaged_checkpoint_is_not_promoted(tmp_path):
    """It is reported once, is kept, does not count in the policy, and does not block other checkpoints."""
    far = FarRoot()
    with checkpointer(tmp_path) as ckpt:
        train_three(ckpt)
    damage(tmp_path / "step-2")
    with checkpointer(tmp_path, promote_to=far, keep_last=3) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(4, state_at(4))
        with pytest.raises(NotPromoted, match=r"step-2 is damaged: ChecksumMismatch: .* bytes 4096 to 4352"):
            ckpt.wait()
        ckpt.save(5, state_at(5))
        ckpt.wait()
        assert committed(tmp_path) == [2, 3, 4, 5]
    assert committed(far) == [3, 4, 5]
    assert not [name for name in far.names("step-2") if name == "shardkeep.json"]


@pytest.mark.parametrize("which", ["near", "far"])
def test_a_record_that_comes_damaged_once_is_promoted(monkeypatch, which):
    """Whichever read of it is damaged on the way, in either root, nothing fails."""
    reads, flipped = 1, 0
    while flipped < reads:
        near, far, failed = FarRoot(), FarRoot(), list[Event]()
        reads = 0
        place = (near if which == "near" else far).inner.place("step-1")
        get = place.get

        def once(name, *, limit, get=get, at=flipped):
            nonlocal reads
            data = bytearray(get(name, limit=limit))
            if name == "shardkeep.json":
                data[len(data) // 2] ^= reads == at
                reads += 1
            return bytes(data)

        monkeypatch.setattr(place, "get", once)
        with (
            sk.on_event(failed.append, kinds=[PromotionFailed]),
            checkpointer(near, promote_to=far, asynchronous=False) as ckpt,
        ):
            ckpt.save(1, state_at(1))
            ckpt.wait()
            assert committed(far) == [1]
        assert not failed
        flipped += 1
    assert reads > 1


def test_a_partial_copy_stays_while_the_near_record_cannot_be_read():
    """A near root that does not give a record for a moment has not lost its checkpoint: the next round goes on."""
    near, far = FarRoot(), FarRoot(Broken("put", "shardkeep.json"))
    with checkpointer(near, promote_to=far, on_error="warn", retries=0, asynchronous=False) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        half = far.names("step-1")
        far.before, near.before = None, Broken("get", "shardkeep.json", errno.EIO)
        ckpt._saves.replicator.after(None)  # a round of its own, as after a save
        ckpt.wait()
        assert far.names("step-1") == half
        near.before = None
        far.seen.clear()
        ckpt.save(2, state_at(2))
    assert committed(far) == [1, 2]
    assert not [each for each in far.seen if each.startswith("create") and each.split()[1] in half]


@pytest.mark.parametrize("becomes", ["deleted", "damaged"])
@pytest.mark.parametrize("replaces", [True, False])
def test_nothing_is_left_of_what_will_not_be_promoted(tmp_path, becomes, replaces):
    """A partial copy that will not be continued is removed, alone or beside an older save of the step."""
    far = FarRoot()
    how = {"keep_promoted": KeepAll(), "promote_required": False, "on_error": "warn", "retries": 0}
    with checkpointer(tmp_path, promote_to=far, keep_last=1 if becomes == "deleted" else 3, **how) as ckpt:
        for step in (1, 2) if replaces else (1,):
            ckpt.save(step, state_at(step))
            ckpt.wait()
        ckpt.restore(1, empty_state())
        before = far.names("step-2")
        far.before = Broken("finish")
        ckpt.save(2, state_at(7))
        ckpt.wait()
        far.before = None
        assert [name for name in far.names("step-2") if name.startswith("claim-")]
        if becomes == "damaged":
            damage(tmp_path / "step-2")
        arrived = threading.Event()
        far.before = lambda verb, name: arrived.wait(20)  # until the near copy has gone
        ckpt.save(3, state_at(3))
        ckpt.wait(promotions=False)
        arrived.set()
        ckpt.wait()
        assert far.names("step-2") == before
        assert committed(far) == ([1, 2, 3] if replaces else [1, 3])


def train_three(ckpt):
    for step in (1, 2, 3):
        ckpt.save(step, state_at(step))


def held_at_create():
    """A far root that says when a file is to be made in it, and waits until it may go on."""
    far, arrived, go = FarRoot(), threading.Event(), threading.Event()

    def slow(verb, name):
        if verb == "create":
            arrived.set()
            go.wait(20)

    far.before = slow
    return far, arrived, go


def test_a_checkpoint_that_is_replaced_meanwhile_is_no_failure(tmp_path):
    far, arrived, go = held_at_create()
    with checkpointer(tmp_path, promote_to=far) as ckpt:
        ckpt.save(1, groups(1))
        assert arrived.wait(20)
        ckpt.save(1, groups(7), overwrite=True)
        ckpt.wait(promotions=False)
        go.set()
        ckpt.wait()
    assert float(sk.open(far.place("step-1"))["part0.w"][:1]) == 7.0
    assert len(far.names("step-1")) == 6


def go_on_promoting(near, far):
    """Save once more, in the next job, which copies only what is missing of the first checkpoint."""
    heard = []
    with checkpointer(near, promote_to=far, on_event=heard.append) as ckpt:
        assert ckpt.restore_latest(groups(0)) == 1
        ckpt.save(2, groups(2))
        ckpt.wait()
    assert committed(far) == [1, 2]
    [first] = [event for event in heard if isinstance(event, PromotionFinished) and event.step == 1]
    assert 0 < first.bytes_copied < first.bytes_total


def test_waiting_has_an_end(tmp_path):
    """wait() gives up after a time, close() cancels after one, and the next job goes on with what is there."""
    far, go = FarRoot(), threading.Event()
    far.before = lambda verb, name: go.wait(20) if (verb, name[:5]) == ("create", "part3") else None
    ckpt = checkpointer(tmp_path, promote_to=far)
    ckpt.save(1, groups(1))
    with pytest.raises(TimeoutError, match=r"not all checkpoints were promoted to memory://.* within 0.05 s"):
        ckpt.wait(timeout_s=0.05)
    assert committed(tmp_path) == [1]
    promotions = ckpt._saves.replicator

    def let_go():
        until(lambda: promotions._cancelled_before > 0)
        go.set()

    late = threading.Thread(target=let_go)
    late.start()
    ckpt.close(timeout_s=0.05)
    late.join()
    assert committed(far) == []
    assert not list(far.list())  # the lease was given back
    before = far.count("create", "part")
    go_on_promoting(tmp_path, far)
    assert far.count("create", "part") - before < 4 + 4


def test_cancelled_promotions_are_taken_up_after_the_next_save(tmp_path):
    far, arrived, go = held_at_create()
    with checkpointer(tmp_path, promote_to=far) as ckpt:
        ckpt.save(1, groups(1))
        assert arrived.wait(20)
        ckpt.cancel_promotions()
        go.set()
        ckpt.wait()
        assert committed(far) == []
        ckpt.save(2, groups(2))
        ckpt.wait()
        assert committed(far) == [1, 2]


def test_a_job_that_loses_the_far_root_promotes_no_more(tmp_path):
    """Whatever on_error says, it is raised; both jobs' checkpoints are where they were saved."""
    far = FarRoot()
    first = checkpointer(tmp_path / "a", promote_to=far, on_error="warn")
    first.save(1, state_at(1))
    first.wait()
    with checkpointer(tmp_path / "b", promote_to=far, takeover=True) as second:
        second.restore_latest(empty_state())
        second.save(2, state_at(2))
        second.wait()
        first.save(3, state_at(3))
        for call in (first.wait, first.close):
            with pytest.raises(NotPromoted, match="another job saves here now"):
                call()
        first.close()
    assert committed(far) == [1, 2]
    assert committed(tmp_path / "a") == [1, 3]


JOB = """
import os, signal, sys, time, torch, shardkeep as sk
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore

class Place(FaultyStore):
    def begin(self, verb, name):
        if (verb, name[:5]) == (sys.argv[3], sys.argv[4]):
            if sys.argv[5] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while not ckpt._saves.replicator._cancelled_before:
                time.sleep(0.01)
        return super().begin(verb, name)

class Root(LocalStore):
    def place(self, name):
        return Place(super().place(name))

ckpt = sk.Checkpointer(sys.argv[1], promote_to=Root(sys.argv[2]), options=sk.Options(io_threads=1))
ckpt.save(1, {f"part{number}": {"w": torch.arange(20_000.0) + 1 + number} for number in range(4)})
if sys.argv[5] == "kill":
    ckpt.wait()
ckpt.wait(promotions=False)
"""


def run_job(near, far, verb, start, how):
    code = [sys.executable, "-c", JOB, str(near), str(far), verb, start, how]
    return subprocess.run(code, check=False, timeout=60, capture_output=True, cwd=Path(__file__).parents[2]).returncode


def test_a_killed_promotion_is_taken_up(tmp_path):
    """It was never visible; the next job copies only what is missing, or sweeps what is not wanted."""
    near, far = tmp_path / "near", tmp_path / "far"
    assert run_job(near, far, "finish", "part2", "kill") == -signal.SIGKILL
    assert committed(near) == [1]
    assert committed(far) == []
    shutil.copytree(far, tmp_path / "alone")
    there = {file.name: file.stat().st_mtime_ns for file in (far / "step-1").iterdir()}
    go_on_promoting(near, far)
    now = {file.name: file.stat().st_mtime_ns for file in (far / "step-1").iterdir()}
    assert any(now.get(name) == when for name, when in there.items())
    assert {file.name for file in (near / "step-1").iterdir()} == set(now)  # no claim is left
    sk.open(far / "step-1").verify()

    with checkpointer(tmp_path / "other", promote_to=tmp_path / "alone") as ckpt:
        ckpt.save(2, groups(2))
    assert not (tmp_path / "alone" / "step-1").exists()
    assert committed(tmp_path / "alone") == [2]


def test_a_process_that_ends_without_close_does_not_wait_for_promotions(tmp_path):
    """They are cut short at exit, and the far root has none of it."""
    near, far = tmp_path / "near", tmp_path / "far"
    assert run_job(near, far, "create", "part0", "exit") == 0
    assert committed(near) == [1]
    assert committed(far) == []
