"""A Checkpointer of one process."""

import contextlib
import errno
import inspect
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.events import Pruned, PruneFailed, Retried, SaveCommitted, StepSkipped
from shardkeep.layouts import orphans
from shardkeep.manage.schedule import Clock
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.manage.scene import Broken, FarRoot, Overriding, checkpointer, damage, empty_state, state_at, tear, train


def places(root):
    return {each.name for each in root.iterdir() if each.is_dir()}


# -- when


@pytest.mark.parametrize("asynchronous", [True, False])
def test_saves_when_due_and_restores(tmp_path, asynchronous):
    """Every N steps and at given ones; the restored state is bit-identical to what was saved."""
    with checkpointer(tmp_path / "run", every_steps=3, at_steps=[4], asynchronous=asynchronous) as ckpt:
        assert ckpt.restore_latest(empty_state()) is None
        assert not (tmp_path / "run").exists()
        assert train(ckpt, range(7)) == [3, 4, 6]
        ckpt.wait()
        assert ckpt.all_steps() == [3, 4, 6]
        assert ckpt.latest_step() == 6
    state = empty_state()
    with checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore_latest(state) == 6
        assert torch.equal(state["w"], state_at(6)["w"])
        assert state["step"] == 6
        assert ckpt.restore(3, state) == 3
        assert torch.equal(state["w"], state_at(3)["w"])
        assert ckpt.last_restore.name == "step-3"
    assert (tmp_path / "run" / "latest").read_text() == "step-6\n"
    assert not (tmp_path / "run" / "lease.json").exists()


def test_by_the_clock(tmp_path):
    """N minutes after the last save, whatever caused that one."""
    now = [0.0]
    clock = Clock(monotonic=lambda: now[0], interval_s=0.0)
    with checkpointer(tmp_path, every_minutes=1, every_steps=10, clock=clock) as ckpt:
        saved = []
        for step in range(1, 25):
            now[0] += 12.0
            if ckpt.step(step, state_at(step)) is not None:
                saved.append(step)
    assert saved == [5, 10, 15, 20]


def test_a_request_that_cannot_be_taken_away_is_served_once(tmp_path, monkeypatch):
    """A file that cannot be deleted causes one save, not one per step."""
    root = LocalStore(tmp_path)
    root.put("save-now", b"")
    real = LocalStore.delete

    def refuse(self, name):
        if name == "save-now":
            raise StorageError("read-only", errno=errno.EROFS)
        real(self, name)

    monkeypatch.setattr(LocalStore, "delete", refuse)
    with checkpointer(root) as ckpt:
        assert train(ckpt, range(1, 4)) == [1]
        os.unlink(tmp_path / "save-now")
        train(ckpt, range(4, 5))
        root.put("save-now", b"")
        assert train(ckpt, range(5, 7)) == [5]


def test_when_a_file_or_a_call_asks_for_it(tmp_path):
    with checkpointer(tmp_path, request_file="please") as ckpt:
        assert train(ckpt, range(1, 3)) == []
        (tmp_path / "please").touch()
        assert train(ckpt, range(3, 6)) == [3]
        assert not (tmp_path / "please").exists()
        thread = threading.Thread(target=ckpt.request_save)
        thread.start()
        thread.join()
        assert train(ckpt, range(6, 9)) == [6]
    with checkpointer(tmp_path, request_file=None) as ckpt, pytest.raises(sk.StateError, match="exchange requests"):
        ckpt.request_save()


# -- the last step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_step_is_saved_at_a_clean_end(tmp_path, asynchronous):
    """With the state and metrics that `step` was given; not a second time, if it was saved or restored."""
    for end in (25, 25, 30):
        with checkpointer(tmp_path, every_steps=10, asynchronous=asynchronous) as ckpt:
            state = empty_state()
            for step in range((ckpt.restore_latest(state) or 0) + 1, end + 1):
                state |= state_at(step)
                ckpt.step(step, state, metrics={"loss": 1 / step})
            state["w"] = None  # another tensor takes its place in the dict: the one that was given is saved
    entries = {entry.step: entry for entry in sk.Catalog(tmp_path)}
    assert sorted(entries) == [10, 20, 25, 30]
    assert entries[25].metrics == {"loss": 1 / 25}
    assert torch.equal(sk.open(tmp_path / "step-25")["w"][:], state_at(25)["w"])


class _Ends(Exception):
    pass


def _raise():
    raise _Ends


@pytest.mark.parametrize(
    ("ending", "saved"),
    [
        (lambda ckpt, model: None, [2, 3]),
        (lambda ckpt, model: _raise(), [2]),
        (lambda ckpt, model: ckpt.close(), [2]),
        (lambda ckpt, model: ckpt.restore_latest({}, strict=False), [2]),  # what is in memory is another step's now
        (lambda ckpt, model: model.clear(), [2]),
        (lambda ckpt, model: ckpt.save(4, state_at(4)), [2, 4]),
    ],
    ids=["clean", "an exception", "closed", "restored", "the model is gone", "saved"],
)
def test_when_the_last_step_is_not_saved(tmp_path, ending, saved, caplog):
    """If the block was left by an exception, or there is nothing to save; a model that was dropped is not kept alive."""
    model = []
    with contextlib.suppress(_Ends), checkpointer(tmp_path, every_steps=2) as ckpt:
        for step in range(1, 4):
            model[:] = [torch.nn.Linear(2, 2)]  # one that no save holds for a moment longer
            ckpt.step(step, {"model": model[0], "step": step, "rng": sk.RNG()})
        ending(ckpt, model)
    assert sorted(entry.step for entry in sk.Catalog(tmp_path)) == saved
    gone = "the last step, 3, is not saved: on rank 0, model of its state no longer exists"
    assert (gone in caplog.text) == (not model)
    with checkpointer(tmp_path / "b", save_last=False) as ckpt:
        train(ckpt, range(1, 4))
    assert not list(sk.Catalog(tmp_path / "b"))


def test_the_last_save_may_hold_the_weights_only(tmp_path):
    """The modules of the state, wherever they are in it; a state without any is refused at its first step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"nets": {"a": model, "step": 1}, "b": torch.nn.Linear(1, 1), "optim": optimizer, "w": torch.ones(3)}
    with checkpointer(tmp_path, every_steps=2, save_last="weights") as ckpt:
        for step in range(1, 4):
            ckpt.step(step, state)
        with pytest.raises(sk.StateError, match="the modules of the state"):
            ckpt.step(4, {"model": model.state_dict()})
    assert sorted(sk.open(tmp_path / "step-3").keys()) == ["b.bias", "b.weight", "nets.a.bias", "nets.a.weight"]
    assert "w" in sk.open(tmp_path / "step-2").keys()  # noqa: SIM118 - it is no dict
    for wrong in ("model", 2):
        with pytest.raises(sk.StateError, match="save_last"):
            checkpointer(tmp_path, save_last=wrong)


# -- asked before, deleted after


def test_it_says_in_advance_whether_a_step_is_saved(tmp_path):
    """By its number or by a request, once for each step; what was not saved then is due at the next step."""
    with checkpointer(tmp_path, every_steps=3, signals=("SIGUSR1",), save_last=False) as ckpt:
        due = [step for step in range(1, 8) if ckpt.should_save(step) and ckpt.step(step, state_at(step)) is not None]
        assert due == [3, 6]
        assert not ckpt.should_save(7)
        ckpt.request_save()
        assert [ckpt.should_save(step) for step in (8, 8, 9)] == [True, True, True]
        assert ckpt.step(9, state_at(9)) is not None
        assert not ckpt.should_save(9)
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.should_save(10)
        assert not ckpt.should_stop
        assert ckpt.save(10, state_at(10)) is not None
        assert ckpt.should_stop
        assert ckpt.all_steps() == [3, 6, 9, 10]
        with pytest.raises(sk.StateError, match="comes after"):
            ckpt.should_save(5)


def test_a_checkpoint_is_deleted(tmp_path):
    """In both roots, and `latest` names the newest that is left; not one that is pinned, or that another job may use."""
    near, far = tmp_path / "near", tmp_path / "far"
    with checkpointer(near, promote_to=far, every_steps=1) as ckpt:
        train(ckpt, range(1, 5))
        ckpt.pin(2)
        ckpt.delete(1)
        ckpt.delete(4)
        for root in (near, far):
            assert places(root) == {"step-2", "step-3"}
        assert (near / "latest").read_text() == "step-3\n"
        with pytest.raises(sk.StateError, match="pinned"):
            ckpt.delete(2)
        with pytest.raises(sk.CheckpointNotFound, match="step 4"):
            ckpt.delete(4)
        assert ckpt.step(4, state_at(4), force=True) is not None
        with checkpointer(near) as other, pytest.raises(sk.RootInUse):
            other.delete(3)
    assert places(near) == places(far) == {"step-2", "step-3", "step-4"}
    ckpt = checkpointer(near)
    for step in (2, 3, 4):
        ckpt.unpin(step)
        ckpt.delete(step)
    ckpt.close()
    assert not (near / "latest").exists()


def test_every_argument_is_documented():
    """And none is for tests."""
    text = sk.Checkpointer.__init__.__doc__ or ""
    for name in list(inspect.signature(sk.Checkpointer).parameters)[1:]:
        assert f"\n            {name}: " in text


# -- signals


def test_a_signal_saves_and_stops(tmp_path):
    """The checkpoint is durable when `step` returns; the previous handler is called, and reinstalled at the end."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        with checkpointer(tmp_path, signals=("SIGUSR1", signal.SIGUSR2)) as ckpt:
            assert train(ckpt, range(1, 3)) == []
            assert not ckpt.should_stop
            signal.raise_signal(signal.SIGUSR1)
            handle = ckpt.step(3, state_at(3))
            assert isinstance(handle, sk.SaveHandle)
            assert handle.done()
            assert ckpt.should_stop
            assert ckpt.all_steps() == [3]
            signal.raise_signal(signal.SIGUSR2)
            assert train(ckpt, range(4, 6)) == [4]
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_need_the_main_thread(tmp_path):
    found = []

    def make():
        try:
            checkpointer(tmp_path, signals=("SIGTERM",))
        except sk.StateError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    for wrong in ("SIGNOTHING", 12345, "SIGKILL"):
        with pytest.raises(sk.StateError, match="signals"):
            checkpointer(tmp_path, signals=(wrong,))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# -- resuming


def test_a_resumed_job_counts_from_what_it_restored(tmp_path):
    with checkpointer(tmp_path, every_steps=2) as ckpt:
        train(ckpt, range(1, 9))
    with checkpointer(tmp_path, every_steps=2) as ckpt:
        assert ckpt.restore(4, empty_state()) == 4
        assert train(ckpt, range(4, 7)) == [6]
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.all_steps() == [2, 4, 6, 8]
        assert ckpt.latest_step() == 6
        assert ckpt.restore_latest(empty_state()) == 6
        assert [entry.timeline for entry in sk.Catalog(tmp_path).entries()] == [1, 0, 0, 0]


def test_an_abandoned_checkpoint_is_restored_last(tmp_path):
    """Also if nothing else is left of the branch that the newest one came from by way of another."""
    with checkpointer(tmp_path, asynchronous=False) as ckpt:
        for back, step in ((None, 3), (None, 5), (3, 4), (None, 6), (4, 5)):
            if back is not None:
                ckpt.restore(back, empty_state())
            ckpt.save(step, state_at(step))
        ckpt.delete(4)
    damage(tmp_path / "step-5")
    assert [(entry.timeline, entry.step) for entry in sk.Catalog(tmp_path).entries()] == [(2, 5), (0, 3), (1, 6)]
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 3


def test_walks_back_past_what_is_torn_or_damaged(tmp_path):
    """With reasons; damaged checkpoints no longer count, and are not deleted."""
    heard = []
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 7))
    damage(tmp_path / "step-6")
    tear(tmp_path / "step-5")
    record = tmp_path / "step-4" / "shardkeep.json"
    record.write_bytes(record.read_bytes()[:100])
    os.unlink(next((tmp_path / "step-3").glob("*.safetensors")))
    state = empty_state()
    with checkpointer(tmp_path, keep_last=2, on_event=heard.append) as ckpt:
        assert ckpt.restore_latest(state) == 2
        assert torch.equal(state["w"], state_at(2)["w"])
        assert [each.step for each in ckpt.last_restore.skipped] == [6, 4, 3]
        reasons = [each.reason for each in ckpt.last_restore.skipped]
        assert "ChecksumMismatch" in reasons[0]
        assert "checksum" in reasons[1]
        assert [event.step for event in heard if isinstance(event, StepSkipped)] == [6, 4, 3]
        ckpt.save(10, state_at(10))
        ckpt.wait()
        assert ckpt.all_steps() == [2, 3, 6, 10]  # 3 and 6 have records, and may be repaired
        ckpt.save(11, state_at(11))
        ckpt.wait()
        assert {"step-10", "step-11", "step-6", "step-3"} <= places(tmp_path)
        assert "step-2" not in places(tmp_path)


def test_a_state_that_does_not_fit_is_an_error(tmp_path):
    """Nothing is skipped: an older checkpoint would not fit either, or would be the wrong one."""
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 3))
    with checkpointer(tmp_path) as ckpt:
        with pytest.raises(sk.StateMismatch):
            ckpt.restore_latest({"other": torch.zeros(3)})
        with pytest.raises(sk.CheckpointNotFound, match="step 9") as caught:
            ckpt.restore(9, empty_state())
        assert "there are: 1, 2" in str(caught.value)
        assert ckpt.restore_latest({"w": torch.zeros(64)}, strict=False) == 2


def test_a_store_that_fails_is_an_error(tmp_path, monkeypatch):
    """An outage of the network does not make an older checkpoint the right one."""
    with checkpointer(tmp_path, every_steps=1) as ckpt:
        train(ckpt, range(1, 3))
    monkeypatch.setattr(LocalStore, "place", lambda self, name: FaultyStore(
        LocalStore(f"{self.url}/{name}"), "error", at=0, verbs=("read_into",)))  # fmt: skip
    with checkpointer(tmp_path, retries=0) as ckpt, pytest.raises(StorageError):
        ckpt.restore_latest(empty_state())
    with checkpointer(tmp_path, retries=1) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_root_of_torchs_checkpoints_is_gone_on_with(tmp_path):
    import torch.distributed.checkpoint as torch_dcp

    torch_dcp.save({"w": state_at(1)["w"], "step": 1}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    torch_dcp.save({"w": state_at(2)["w"], "step": 2}, checkpoint_id=tmp_path / "step-2", no_dist=True)
    state = empty_state()
    with checkpointer(tmp_path, keep_last=2) as ckpt:
        assert ckpt.restore_latest(state) == 2
        assert torch.equal(state["w"], state_at(2)["w"])
        ckpt.save(3, state)
    assert places(tmp_path) == {"step-2", "step-3"}


# -- keeping


def test_a_metric_that_no_save_has_deletes_nothing(tmp_path, caplog):
    """It is probably misspelt: a warning at the first save without it suggests the near one, and all are kept."""
    losses = {1: 3.0, 2: 2.0, 3: 4.0, 4: 1.0}
    with checkpointer(tmp_path, every_steps=1, keep_last=1, keep_best=("val/loss", 1)) as ckpt:
        for step, loss in losses.items():
            ckpt.step(step, state_at(step), metrics={"val_loss": loss, "lr": 0.1})
        ckpt.wait()
        assert ckpt.all_steps() == [1, 2, 3, 4]
        with pytest.raises(sk.CheckpointNotFound, match="no checkpoint has the metric 'val/loss'") as caught:
            ckpt.restore_best(empty_state())
        assert "lr, val_loss" in str(caught.value)
        ckpt.step(5, state_at(5), metrics={"val/loss": 9.0})  # those without it are still kept
        ckpt.step(6, state_at(6), metrics={"val/loss": 8.0})
        ckpt.wait()
        assert ckpt.all_steps() == [1, 2, 3, 4, 6]
    [said] = [each.getMessage() for each in caplog.records if "no metric" in each.message]
    assert said.startswith("step 1 has no metric 'val/loss'")
    assert said.endswith("and is kept; it has 'val_loss', 'lr': is keep_best='val_loss' meant?")
    with checkpointer(tmp_path, every_steps=1, keep_best=sk.KeepBest("val_loss", 2, keep_missing=False)) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.step(7, state_at(7))
        ckpt.wait()
        assert ckpt.all_steps() == [2, 4, 7]


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("val/loss", "min"), ("evalLoss", "min"), ("test_perplexity", "min"), ("mean_squared_error", "min"),
     ("acc", "max"), ("top5_acc1", "max"), ("valAccuracy", "max"), ("macro-F1", "max"), ("bleu4", "max"),
     ("reward", "max"), ("score", ""), ("neg_mean_squared_error", ""), ("reward_loss", ""), ("lossless_ratio", "")],
)  # fmt: skip
def test_which_is_better_is_told_from_the_name_or_required(tmp_path, metric, mode):
    """A name that says nothing, or two things, needs a mode: a wrong guess would keep the worst."""
    if not mode:
        for make in (lambda: sk.Checkpointer(tmp_path, keep_best=(metric, 2)), lambda: sk.KeepBest(metric)):
            with pytest.raises(sk.StateError, match="lowest or the highest"):
                make()
        mode = "max"
    best = sk.KeepBest(metric, mode=mode)
    assert best.mode == mode
    with checkpointer(tmp_path, every_steps=1, keep_best=best) as ckpt:
        for step, value in enumerate([2.0, 1.0, 3.0], start=1):
            ckpt.step(step, state_at(step), metrics={metric: value})
        ckpt.wait()
        assert ckpt.best_step() == (2 if mode == "min" else 3)


def test_data_then_commit_then_pointer_then_prune(tmp_path):
    """In that order, and nothing is deleted before the new checkpoint is there."""
    root = FarRoot(inner=LocalStore(tmp_path))
    with checkpointer(root, keep_last=1) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
        root.seen.clear()
        ckpt.save(2, state_at(2))
        ckpt.wait()
    wanted = ["finish", "put index", "put shardkeep.json", "put latest", "remove step-1"]
    at = [next(row for row, seen in enumerate(root.seen) if seen.startswith(each)) for each in wanted]
    assert at == sorted(at), root.seen
    assert places(tmp_path) == {"step-2"}


class _Sticky(LocalStore):
    def remove(self, name):
        raise StorageError(f"{name} is busy", errno=errno.EBUSY)


def test_what_cannot_be_deleted_fails_no_save(tmp_path):
    heard = []
    with checkpointer(_Sticky(tmp_path), every_steps=1, keep_last=1, on_event=heard.append) as ckpt:
        train(ckpt, range(1, 4))
    failed = [event for event in heard if isinstance(event, PruneFailed)]
    assert sorted(event.step for event in failed) == [1, 1, 2]
    assert "busy" in failed[0].message
    assert len(places(tmp_path)) == 3
    with checkpointer(tmp_path, keep_last=1, on_event=heard.append) as ckpt:
        ckpt.save(4, state_at(4))
    assert places(tmp_path) == {"step-4"}
    assert sorted(event.step for event in heard if isinstance(event, Pruned)) == [1, 2, 3]


def killed_writer(place, *save_ids):
    """Leave the claims of a process that is gone, and a file of its last save."""
    script = (
        "import sys; from shardkeep.layouts import orphans as l; from shardkeep.storage.local import LocalStore as S\n"
        "s = S(sys.argv[1]); [l.make_claim(s, each) for each in sys.argv[2:]]\n"
        "s.put(f'model-00000-of-00001-{sys.argv[-1]}.safetensors', b'x')"
    )
    subprocess.run([sys.executable, "-c", script, str(place), *save_ids], check=True, timeout=60)


def test_dead_leftovers_are_swept_and_living_ones_never(tmp_path):
    """Files of a killed writer are removed; files of a live one, or of a checkpoint without its record, stay."""
    killed_writer(tmp_path / "step-1", "a" * 20)
    alive = "b" * 20
    root = LocalStore(tmp_path)
    root.place("step-3").put(f"claim-{'c' * 20}.json", json.dumps({"host": "far", "pid": 1, "started": "1"}).encode())
    root.place("step-4").put(f"model-00000-of-00001-{'d' * 20}.safetensors", b"x")
    root.place("step-5").put("shardkeep.removing", b"")
    root.place("step-5").put(f"model-00000-of-00001-{'e' * 20}.safetensors", b"x")
    (tmp_path / "step-6").mkdir()
    (tmp_path / "notes").mkdir()
    with orphans.holding_claim(alive), checkpointer(tmp_path) as ckpt:
        orphans.make_claim(root.place("step-2"), alive)
        ckpt.save(10, state_at(10))
    assert places(tmp_path) == {"step-2", "step-3", "step-4", "step-10", "notes"}


def test_a_listing_that_misses_the_record_costs_no_checkpoint(tmp_path):
    """Files of dead saves beside a checkpoint are removed by its record, which is read by name, not looked for in a list."""
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_at(1))
    killed_writer(tmp_path / "step-1", sk.Catalog(tmp_path).latest().save_id, "a" * 20)
    root = LocalStore(tmp_path)

    def place(name):
        inner = root.place(name)
        return Overriding(inner, list=lambda: [info for info in inner.list() if info.name != "shardkeep.json"])

    with checkpointer(Overriding(root, place=place)) as ckpt:
        ckpt.save(2, state_at(2))
    into = empty_state()
    sk.load(into, tmp_path / "step-1")
    assert into["step"] == 1
    assert not [each.name for each in (tmp_path / "step-1").iterdir() if "a" * 20 in each.name]


# -- what goes wrong


def _broken(tmp_path):
    return FarRoot(Broken("create", code=errno.ENOSPC), LocalStore(tmp_path))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_is_raised(tmp_path, asynchronous):
    """At once, or by a later call for an asynchronous save, with its cause; the save that is due is made."""
    root = _broken(tmp_path)
    ckpt = checkpointer(root, every_steps=2, asynchronous=asynchronous)
    if not asynchronous:
        with pytest.raises(sk.StorageFull):
            train(ckpt, range(1, 3))
        ckpt.close()
        return
    handle = ckpt.step(2, state_at(2))
    handle.exception()
    root.before = None
    with pytest.raises(sk.EarlierSaveFailed) as caught:
        ckpt.step(4, state_at(4))
    assert isinstance(caught.value.__cause__, sk.StorageFull)
    assert caught.value.__cause__.__traceback__ is not None
    assert isinstance(caught.value.response, sk.SaveHandle)
    ckpt.close()
    assert ckpt.all_steps() == [4]


def test_a_failure_is_raised_by_whatever_comes_next(tmp_path):
    """Once: by a step, due or not, by wait and by close."""
    ckpt = checkpointer(_broken(tmp_path))
    ckpt.save(1, state_at(1)).exception()
    with pytest.raises(sk.EarlierSaveFailed):
        ckpt.step(2, state_at(2))
    ckpt.step(3, state_at(3))
    for step, call in ((4, ckpt.wait), (5, ckpt.close)):
        ckpt.save(step, state_at(step))
        with pytest.raises(sk.EarlierSaveFailed):
            call()
    ckpt.close()
    with pytest.raises(sk.StateError, match="closed"):
        ckpt.step(6, state_at(6))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_is_a_warning_or_given_to_a_function(tmp_path, asynchronous, caplog):
    with checkpointer(_broken(tmp_path), on_error="warn", asynchronous=asynchronous) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.step(2, state_at(2))
    assert any("training goes on" in each.message for each in caplog.records)
    heard = []
    with checkpointer(_broken(tmp_path), on_error=heard.append, asynchronous=asynchronous) as ckpt:
        ckpt.save(1, state_at(1))
    assert [type(each) for each in heard] == [sk.StorageFull]


def test_what_is_raised_inside_is_not_masked(tmp_path):
    """The pending save is finished, and its failure is only logged."""
    for root in (tmp_path, _broken(tmp_path)):
        with pytest.raises(ZeroDivisionError):
            _save_and_fail(root)
    assert sk.Catalog(tmp_path).latest().step == 1


def _save_and_fail(root):
    with checkpointer(root) as ckpt:
        ckpt.save((ckpt.latest_step() or 0) + 1, state_at(1))
        raise ZeroDivisionError


def test_what_passes_is_tried_again(tmp_path):
    """An asynchronous save succeeds, and each retry emits an event."""
    heard = []
    root = FarRoot(Broken("write_at", code=errno.EIO, times=1), LocalStore(tmp_path))
    with checkpointer(root, on_event=heard.append) as ckpt:
        ckpt.save(1, state_at(1))
    retried = [event for event in heard if isinstance(event, Retried)]
    assert [(event.attempt, event.step) for event in retried] == [(1, 1)]
    assert any(isinstance(event, SaveCommitted) for event in heard)
    assert torch.equal(sk.open(tmp_path / "step-1")["w"][:], state_at(1)["w"])


def test_bad_input_is_an_error_that_loses_nothing(tmp_path):
    with checkpointer(tmp_path, asynchronous=False) as ckpt:
        assert isinstance(ckpt.save(1, state_at(1)), sk.SaveReport)
        for step in (-1, 1.5, True, None, 1 << 64):
            with pytest.raises(sk.StateError, match="step"):
                ckpt.step(step, state_at(2))
        with pytest.raises(sk.StateError, match="metrics"):
            ckpt.save(2, state_at(2), meta={"metrics": {}})
        with pytest.raises(sk.StateError, match="loss"):
            ckpt.save(2, state_at(2), metrics={"loss": "low"})
        ckpt.save(2, state_at(2), meta={"note": "x"}, metrics={"loss": torch.tensor(0.25)})
        entry = sk.Catalog(tmp_path).find(2)
        assert entry.metrics == {"loss": 0.25}
        assert sk.open(tmp_path / "step-2").meta["note"] == "x"
        assert ckpt.all_steps() == [1, 2]
        with pytest.raises(sk.StateError, match="metric"):
            ckpt.best_step()
    for wrong in ({"every_steps": 0}, {"keep_last": 0}, {"keep_best": ("a", 1, "x", 2)}, {"on_error": "ignore"},
                  {"template": "x"}, {"max_in_flight": 0}, {"retries": -1}, {"every_minutes": 0}, {"request_file": "a/b"},
                  {"every_steps": 1.5}, {"retries": "3"}, {"keep_hours": "x"}, {"keep_last": True}):  # fmt: skip
        with pytest.raises(sk.StateError, match=next(iter(wrong))):
            checkpointer(tmp_path, **wrong)


@pytest.fixture(autouse=True)
def _nothing_stays():
    """No thread of a Checkpointer outlives it."""
    yield
    names = [each.name for each in threading.enumerate()]
    assert not [name for name in names if name.startswith(("shardkeep-prune", "shardkeep-lease"))], names


def test_a_root_may_be_written_with_a_slash_at_its_end(tmp_path):
    """Events of its checkpoints are still its own."""
    heard = []
    with checkpointer(f"{tmp_path}/", on_event=heard.append) as ckpt:
        ckpt.save(1, state_at(1))
    assert any(isinstance(event, SaveCommitted) for event in heard)


def test_a_step_that_never_saves_says_so_once(tmp_path, caplog):
    """Without a rule nothing is due; whoever expects a save at each step learns that at the first."""
    with checkpointer(tmp_path) as ckpt:
        assert train(ckpt, range(1, 4)) == []
    [said] = [each.getMessage() for each in caplog.records if "without every_steps" in each.getMessage()]
    assert str(tmp_path) in said
    caplog.clear()
    with checkpointer(tmp_path / "forced") as ckpt:
        ckpt.step(1, state_at(1), force=True)
        with pytest.raises(sk.StateError, match=r"^step is ") as caught:
            ckpt.step({"w": list(range(1000))}, 1)
        assert len(str(caught.value)) < 200
    with checkpointer(tmp_path / "rule", at_steps=[5]) as ckpt:
        assert train(ckpt, range(1, 4)) == []
    assert caplog.messages == []


def test_a_step_that_is_there_is_not_saved_again(tmp_path):
    """Neither at the end of a job, nor by a signal just after a restore; a step whose save failed is."""
    with checkpointer(tmp_path, every_steps=2) as ckpt:
        assert train(ckpt, range(1, 5)) == [2, 4]
        assert ckpt.step(4, state_at(4), force=True) is None
        assert ckpt.all_steps() == [2, 4]
    with checkpointer(tmp_path, signals=("SIGUSR1",)) as ckpt:
        ckpt.restore_latest(empty_state())
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.step(4, state_at(4)) is None
        assert ckpt.should_stop
    root = _broken(tmp_path)
    with checkpointer(root, on_error="warn") as ckpt:
        ckpt.save(6, state_at(6)).exception()
        root.before = None
        assert ckpt.step(6, state_at(6), force=True) is not None
    assert sk.Catalog(tmp_path).latest().step == 6


def test_several_may_be_in_flight(tmp_path):
    with checkpointer(tmp_path, every_steps=1, max_in_flight=3, keep_last=3) as ckpt:
        train(ckpt, range(1, 9))
    assert sk.Catalog(tmp_path).latest().step == 8
    assert places(tmp_path) == {"step-6", "step-7", "step-8"}
