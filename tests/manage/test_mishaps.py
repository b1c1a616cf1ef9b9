"""What users, disks and other jobs do to a Checkpointer."""

import errno
import json
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone

import numpy as np
import pytest
import torch

import shardkeep as sk
from shardkeep.engine.native_save import NativeSave
from shardkeep.errors import StorageError
from shardkeep.events import PruneFailed
from shardkeep.manage.catalog import Walk, template_of
from shardkeep.manage.lease import Lease
from shardkeep.manage.prune import Pruner
from shardkeep.manage.retention import KeepLast
from shardkeep.manage.saves import Saves, find_timeline
from shardkeep.manage.schedule import Clock
from shardkeep.storage.local import LocalStore
from tests.manage.scene import Hooked, checkpointer, empty_state, state_at, train
from tests.warm.python import warm_python


class Fault:
    """Fails a verb below a root, so many times from when it is set."""

    def __init__(self, path):
        self.root = Hooked(LocalStore(path), self._before)
        self.wanted = ()
        self.times = 0
        self.errno = errno.ENOSPC

    def set(self, *wanted, times=1, code=errno.ENOSPC):
        self.wanted, self.times, self.errno = wanted, times, code

    def _before(self, where, verb, *args):
        said = (where, verb, *(each for each in args if isinstance(each, str)))
        if self.times and all(each in said for each in self.wanted):
            self.times -= 1
            raise StorageError("injected", errno=self.errno)


def test_steps_that_go_down_are_refused(tmp_path):
    """Such as steps counted per epoch: they would count as older than what exists, and be deleted at once."""
    with checkpointer(tmp_path, every_steps=10, keep_last=2) as ckpt:
        assert train(ckpt, range(1, 31)) == [10, 20, 30]
        for call in (ckpt.step, ckpt.save):
            with pytest.raises(sk.StateError, match="step 1 comes after step 30") as caught:
                call(1, state_at(1))
            assert "whole run" in str(caught.value)
        ckpt.wait()
        assert ckpt.all_steps() == [20, 30]
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        ckpt.restore_latest(empty_state())
        with pytest.raises(sk.StateError, match="comes after step 30"):
            ckpt.step(1, state_at(1), force=True)
        ckpt.restore(20, empty_state())
        assert train(ckpt, range(21, 23)) == [21, 22]
    with pytest.raises(sk.StateError, match="step 3 is to be saved, and step 4 was restored"):
        find_timeline(Walk([sk.Catalog(tmp_path / "none")]), (0, 4), 3)


def went_back(root):
    """Leave steps 100 and 200, then 150 and 300 of a job that went back to 100."""
    with checkpointer(root) as ckpt:
        ckpt.save(100, state_at(100))
        ckpt.save(200, state_at(200))
        ckpt.restore(100, empty_state())
        ckpt.save(150, state_at(150))
        ckpt.save(300, state_at(300))


def test_an_unreadable_record_is_not_passed_over_silently(tmp_path):
    """A failed read is raised, and a damaged record is reported, whatever its timeline."""
    went_back(tmp_path)
    fault = Fault(tmp_path)
    fault.set("step-300", "get", "shardkeep.json", times=9, code=errno.EACCES)
    with checkpointer(fault.root, retries=0) as ckpt, pytest.raises(StorageError, match="injected"):
        ckpt.restore_latest(empty_state())
    record = tmp_path / "step-300" / "shardkeep.json"
    record.write_bytes(b"XXXX" + record.read_bytes()[4:])
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 150
        assert [each.step for each in ckpt.last_restore.skipped] == [300]
        ckpt.save(160, state_at(160))
    found = sk.Catalog(tmp_path).latest()
    assert (found.timeline, found.step) == (2, 160)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_training_stops_only_for_a_durable_checkpoint(tmp_path, asynchronous, on_error):
    """If the save that a signal requested fails, the next step saves again."""
    fault = Fault(tmp_path)
    how = {"asynchronous": asynchronous, "on_error": on_error, "retries": 0, "signals": ("SIGUSR1",)}
    with checkpointer(fault.root, **how) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        fault.set("step-2", "create")
        signal.raise_signal(signal.SIGUSR1)
        with suppress(sk.CheckpointError):
            ckpt.step(2, state_at(2))
        assert not ckpt.should_stop
        with suppress(sk.EarlierSaveFailed):
            ckpt.step(3, state_at(3))
        assert ckpt.should_stop
        assert ckpt.all_steps() == [1, 3]
        assert ckpt.step(4, state_at(4)) is None


def test_the_first_save_may_fail_like_any_other(tmp_path, caplog):
    """A root that cannot be acquired or listed is reported as `on_error` says, and the next save tries again."""
    for verb, code in (("put", errno.EROFS), ("places", errno.EACCES)):
        fault = Fault(tmp_path / verb)
        with checkpointer(fault.root, on_error="warn") as ckpt:
            fault.set(verb, code=code)
            assert ckpt.save(1, state_at(1)) is None
            assert "training goes on" in caplog.text
            assert ckpt.save(2, state_at(2)) is not None
            ckpt.wait()
            assert ckpt.all_steps() == [2]
    with checkpointer(tmp_path / "put", on_error="warn") as ckpt, pytest.raises(sk.CheckpointExists):
        ckpt.save(1, state_at(1))


def test_a_root_that_fails_in_passing_is_asked_again(tmp_path):
    """Restoring, acquiring the root and pruning retry as often as saving does."""
    heard = []
    fault = Fault(tmp_path)
    with checkpointer(fault.root, on_event=heard.append, keep_last=1) as ckpt:
        for verb in ("places", "get", "remove", "list"):
            step = (ckpt.latest_step() or 0) + 1
            fault.set(verb, code=errno.ESTALE)
            ckpt.restore_latest(empty_state())
            ckpt.save(step, state_at(step))
            ckpt.wait()
            assert not fault.times, verb
        assert ckpt.all_steps() == [4]
    assert not [event for event in heard if isinstance(event, PruneFailed)]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_lost_lease_is_always_raised(tmp_path, asynchronous):
    """A job must not go on with a root that another job has taken."""
    reported = []
    first = checkpointer(tmp_path, on_error=reported.append, asynchronous=asynchronous)
    first.save(1, state_at(1))
    first.wait()
    with checkpointer(tmp_path, takeover=True) as second:
        second.restore_latest(empty_state())
        second.save(2, state_at(2))
        second.wait()
        with pytest.raises((sk.LeaseLost, sk.EarlierSaveFailed)) as caught:
            first.step(3, state_at(3), force=True) and first.wait()
        assert isinstance(caught.value.__cause__ or caught.value, sk.LeaseLost)
        first.close()
    assert reported == []


def test_sweeping_raises_nothing(tmp_path):
    """No save fails because something cannot be listed after it, or in the background."""
    fault = Fault(tmp_path)
    catalog = sk.Catalog(fault.root)
    lease = Lease(LocalStore(tmp_path))
    house = Pruner(catalog, KeepLast(1), lease, lambda: datetime.now(timezone.utc))
    for begin in (house.begin, lambda: house.after_replication("step-1")):
        fault.set("places")
        begin()
        house.wait()
        assert not fault.times
    house.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_deletes_keep_up_with_saves(tmp_path, asynchronous):
    """However slow deletes are, at most one round of them is pending."""
    there = []

    def before(where, verb, *args):
        if verb == "remove":
            time.sleep(0.05)
        if verb == "create":
            there.append(len(list(tmp_path.glob("step-*/shardkeep.json"))))

    root = Hooked(LocalStore(tmp_path), before)
    with checkpointer(root, every_steps=1, keep_last=1, asynchronous=asynchronous) as ckpt:
        train(ckpt, range(1, 9))
    assert max(there) <= 2, there
    assert sk.Catalog(tmp_path).entries()[0].step == 8


def test_a_pin_holds_while_others_are_deleted(tmp_path):
    """A pin that is set while others are deleted keeps its checkpoint; a pin that comes too late is refused."""
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 13))
    begun, pinned = threading.Event(), threading.Event()

    def before(where, verb, *args):
        if verb == "remove":
            begun.set()
            pinned.wait(30)

    root = Hooked(LocalStore(tmp_path), before)
    with checkpointer(root, keep_last=1) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(13, state_at(13))
        assert begun.wait(30)
        ckpt.pin(12)
        pinned.set()
        ckpt.wait()
        assert ckpt.all_steps() == [12, 13]

    def too_late(where, verb, *args):
        if verb == "put":
            LocalStore(tmp_path).remove("step-13")

    late = Hooked(LocalStore(tmp_path), too_late)
    with checkpointer(late) as ckpt, pytest.raises(sk.CheckpointNotFound):
        ckpt.pin(13)
    assert not (tmp_path / "pin.step-13").exists()


def leave(root, name, host, save):
    """Leave what a writer leaves that dies in a save."""
    place = LocalStore(root).place(name)
    place.put(f"claim-{save}.json", json.dumps({"host": host, "pid": 1, "started": "1"}).encode())
    place.put(f"model-00000-of-00001-{save}.safetensors", b"x")


def test_what_a_job_left_that_was_taken_over_is_swept(tmp_path):
    """Also beside a checkpoint, whose own files stay; files that another machine may be writing stay, too."""
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_at(1))
    for name, save in (("step-1", "a"), ("step-2", "b")):
        leave(tmp_path, name, "gone", save * 20)
    for name, save in (("step-1", "c"), ("step-3", "d")):
        leave(tmp_path, name, "far", save * 20)
    holder = {"id": "x", "machine": "pod", "host": "gone", "pid": 1, "started": "1", "since": "long ago"}
    (tmp_path / "lease.json").write_text(json.dumps(holder))
    with checkpointer(tmp_path, clock=Clock(sleep=time.sleep, interval_s=0.0, lease_s=0.5)) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 1
        ckpt.save(4, state_at(4))
        ckpt.wait()
        assert ckpt.restore(1, empty_state()) == 1
    left = {path.parent.name + path.stem[-20:] for path in tmp_path.glob("step-*/model-*") if path.stat().st_size == 1}
    assert left == {"step-1" + "c" * 20, "step-3" + "d" * 20}
    assert not list(tmp_path.glob(f"step-1/claim-{'a' * 20}*"))


def test_a_job_that_was_taken_over_commits_nothing_when_another_process_writes(tmp_path, monkeypatch):
    """The lease is looked at before the commit, wherever the data is written."""
    at, go = threading.Event(), threading.Event()
    real = NativeSave.check_written

    def slow(self, *args):
        if self.store.url.endswith("step-2"):
            at.set()
            go.wait(30)
        return real(self, *args)

    monkeypatch.setattr(NativeSave, "check_written", slow)
    first = checkpointer(tmp_path, writer="process")
    first.save(1, state_at(1))
    first.wait()
    handle = first.save(2, state_at(2))
    assert at.wait(30)
    with checkpointer(tmp_path, takeover=True, asynchronous=False) as second:
        second.restore_latest(empty_state())
        second.save(3, state_at(3))
        go.set()
        assert isinstance(handle.exception(), sk.LeaseLost)
        assert second.all_steps() == [1, 3]
    with pytest.raises(sk.EarlierSaveFailed):
        first.close()
    sk.finish_saves()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_pinned_step_is_passed_by(tmp_path, asynchronous, caplog):
    """A job that went back skips it and saves the next due step; an explicit save of that step raises."""
    with checkpointer(tmp_path, every_steps=10) as ckpt:
        train(ckpt, range(1, 31))
        ckpt.wait()
        ckpt.pin(30)
    with checkpointer(tmp_path, every_steps=10, asynchronous=asynchronous) as ckpt:
        ckpt.restore(10, empty_state())
        with pytest.raises(sk.CheckpointExists, match="step-30 is pinned"):
            ckpt.save(30, state_at(-30))
    with checkpointer(tmp_path, every_steps=10, asynchronous=asynchronous) as ckpt:
        ckpt.restore(10, empty_state())
        assert train(ckpt, range(11, 45)) == [20, 40]
    assert "step 30 is not saved" in caplog.text
    state = empty_state()
    sk.load(state, tmp_path / "step-30")
    assert state["step"] == 30


@pytest.mark.parametrize("call", ["save", "restore"])
def test_an_earlier_failure_is_not_lost_where_the_next_call_fails_too(tmp_path, call, caplog):
    """It is the context of what is raised, and is logged."""
    fault = Fault(tmp_path)
    with checkpointer(fault.root, retries=0) as ckpt:
        fault.set("create")
        ckpt.save(1, state_at(1)).exception()
        with pytest.raises((sk.StateError, sk.CheckpointNotFound)) as caught:
            ckpt.save(2, {"w": object()}) if call == "save" else ckpt.restore(77, empty_state())
        assert isinstance(caught.value.__context__, StorageError)
        assert "was not reported before: injected" in caplog.text


def test_close_can_be_called_again_after_an_interrupt(tmp_path, monkeypatch):
    ckpt = checkpointer(tmp_path, signals=("SIGUSR1",))
    ckpt.save(1, state_at(1)).result()
    with monkeypatch.context() as patch:
        for each in (Saves, "wait"), (Pruner, "close"):
            patch.setattr(*each, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    assert not (tmp_path / "lease.json").exists()
    ckpt.close()
    ckpt.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("shardkeep-prune")]
    with checkpointer(tmp_path) as again:
        again.restore_latest(empty_state())
        again.save(2, state_at(2))


def interrupted(*_):
    raise KeyboardInterrupt


def misuse(root, metrics):
    """Save with metrics on rank 0 that are none."""
    numbers = {"every_steps": np.int64(1), "keep_last": np.int32(2), "every_minutes": np.float32(5)}
    with checkpointer(root, asynchronous=False, **numbers) as ckpt:
        try:
            ckpt.step(1, state_at(1), metrics=metrics if torch.distributed.get_rank() == 0 else None)
        except sk.StateError as error:
            ckpt.step(2, state_at(2), metrics={"loss": np.float32(0.5)})
            return error.message
    return "saved"


@pytest.mark.parametrize("metrics", [0.5, {"loss": 10**400}, {"loss": 10**5000}])
def test_metrics_of_a_wrong_kind_are_refused_on_all_ranks(tmp_path, rank_pool, metrics):
    for outcome in rank_pool.outcomes(2, misuse, tmp_path, metrics, timeout_s=60):
        assert "metric" in str(outcome.value), outcome
    assert [entry.step for entry in sk.Catalog(tmp_path).entries()] == [2]


def test_restoring_beside_a_job_that_deletes(tmp_path):
    """A checkpoint that is deleted before it is loaded is no loss, because there is a newer one."""
    training = checkpointer(tmp_path, keep_last=1)
    training.save(1, state_at(1))
    training.wait()
    seen = []
    state = empty_state()
    with training, checkpointer(tmp_path) as reader:
        listing = reader._tiers.near.listing

        def late():
            found = listing()
            if len(seen) < 2:
                seen.append("look")
                training.save(len(seen) + 1, state_at(len(seen) + 1))
                training.wait()
            return found

        reader._tiers.near.listing = late
        assert reader.restore_latest(state) == 3
        assert state["step"] == 3
        assert reader.last_restore.skipped == ()


def test_checkpoints_of_another_name_are_told_of(tmp_path, caplog):
    """If the template was changed, training does not silently start afresh."""
    with checkpointer(tmp_path, template="ckpt_{step:04d}.x") as ckpt:
        ckpt.save(7, state_at(7))
    (tmp_path / "notes-1").mkdir()
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.restore_latest(empty_state()) is None
    assert "ckpt_0007.x: is template='ckpt_{step:04d}.x' meant?" in caplog.text
    assert "notes" not in caplog.text
    assert template_of("step-1000") == "step-{step}"
    assert template_of("nothing") is None


def test_a_lease_that_is_there_because_it_was_just_put_is_held(tmp_path):
    """A network file system may carry out a request twice."""
    done = []

    class Twice(LocalStore):
        def put(self, name, data, **how):
            super().put(name, data, **how)
            if name == "lease.json" and not done:
                done.append(name)
                raise StorageError("exists", errno=errno.EEXIST)

    with checkpointer(Twice(tmp_path)) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        assert ckpt.all_steps() == [1]


def test_a_checkpointer_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    """No event listener stays, and a reserved name is refused as the request file."""
    heard = []
    with pytest.raises(sk.StateError, match="SIGKILL"):
        checkpointer(tmp_path, signals=("SIGUSR1", "SIGKILL"), on_event=heard.append)
    sk.save(state_at(1), tmp_path / "step-1")
    assert heard == []
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    for name in ("lease.json", "latest", "pin.step-1"):
        with pytest.raises(sk.StateError, match="request_file"):
            checkpointer(tmp_path, request_file=name)


def test_close_works_while_the_interpreter_shuts_down(tmp_path):
    """A function registered with `atexit` may close a Checkpointer, though no thread pool takes work any more."""
    script = (
        "import atexit, sys, torch, shardkeep as sk\n"
        "ckpt = sk.Checkpointer(sys.argv[1], keep_last=1)\n"
        "def close():\n"
        "    ckpt.close()\n"
        "    print('closed')\n"
        "atexit.register(close)\n"
        "for step in (1, 2):\n"
        "    ckpt.save(step, {'w': torch.ones(2)})\n"
    )
    done = warm_python("-c", script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert sk.Catalog(tmp_path).latest().step == 2


def test_old_checkpoints_are_deleted_also_where_a_script_ends_without_close(tmp_path):
    """Although no more threads can be started by then to read records."""
    with checkpointer(tmp_path) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, state_at(step))
    script = (
        "import sys, torch, shardkeep as sk\n"
        "ckpt = sk.Checkpointer(sys.argv[1], keep_last=1); w = {'w': torch.zeros(64), 'step': 0}\n"
        "ckpt.restore_latest(w); ckpt.save(5, w)\n"
    )
    done = warm_python("-c", script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [entry.step for entry in sk.Catalog(tmp_path).entries()] == [5]
    assert (tmp_path / "latest").read_text() == "step-5\n"
    assert not (tmp_path / "lease.json").exists()
