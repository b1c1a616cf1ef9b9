"""What a job that was away, or a store that fails for a while, must not do to the checkpoints of others."""

import errno
import os
import threading
from dataclasses import replace

import msgspec
import pytest
import torch

import shardkeep as sk
from shardkeep.errors import StorageError
from shardkeep.manage.lease import LEASE_NAME, Holder, Lease, running_holder
from shardkeep.manage.schedule import Clock
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from tests.manage.scene import QUICK, Broken, FarRoot, Hooked, Overriding, checkpointer, empty_state, state_at, until


def holder_of(root):
    return msgspec.json.decode(root.get(LEASE_NAME, limit=4096), type=Holder)


def test_a_job_that_was_taken_over_by_one_that_has_ended_saves_no_more(tmp_path):
    """What the other one has saved is as it was, and a third one begins at once; no job is said to be there."""
    with checkpointer(tmp_path, asynchronous=False) as first:
        first.save(10, state_at(10))
    away = checkpointer(tmp_path, asynchronous=False)
    away.restore_latest(empty_state())  # from then on it may overwrite later steps
    away.save(20, state_at(20))
    with checkpointer(tmp_path, asynchronous=False, takeover=True) as second:
        second.restore_latest(empty_state())
        second.save(30, state_at(1030))
        assert running_holder(LocalStore(tmp_path))
    assert not running_holder(LocalStore(tmp_path))
    for _ in range(2):
        with pytest.raises(sk.LeaseLost, match="another job has saved here since"):
            away.save(30, state_at(30))
    state = empty_state()
    with checkpointer(tmp_path, asynchronous=False) as third:
        assert third.restore_latest(state) == 30
        assert torch.equal(state["w"], state_at(1030)["w"])
        third.save(40, state_at(40))
    with pytest.raises(sk.LeaseLost):  # also after a job that found the lease free
        away.save(50, state_at(50))
    away.close()
    assert holder_of(LocalStore(tmp_path)).released


def test_that_it_was_taken_is_not_forgotten_when_the_next_one_dies():
    """The job that took it over was killed; when a third job acquires the lease, the first one still notices."""
    root = MemoryStore()
    away, second, third = Lease(root), Lease(root, takeover=True), Lease(root)
    away.acquire()
    second.acquire()
    root.put(
        LEASE_NAME, msgspec.json.encode(msgspec.structs.replace(holder_of(root), started="long ago")), replace=True
    )
    third.acquire()
    third.release()
    with pytest.raises(sk.LeaseLost):
        away.check()


def test_a_lease_that_vanished_is_put_back_only_while_it_lasts():
    """A live job writes a deleted lease again; a job that did not renew it in time must not."""
    root, now = MemoryStore(), [0.0]
    lease = Lease(root, Clock(lease_s=1000.0, monotonic=lambda: now[0]))
    lease.acquire()
    now[0] = 999.0
    root.delete(LEASE_NAME)
    lease.check()
    assert not holder_of(root).contested
    now[0] = 1998.0  # it was renewed meanwhile, by being put back
    root.delete(LEASE_NAME)
    lease.check()
    now[0] = 2998.0
    root.delete(LEASE_NAME)
    with pytest.raises(sk.LeaseLost, match="the lease is gone, and was not renewed for 1000 s"):
        lease.check()
    assert not list(root.list())
    lease.release()


def test_a_job_that_comes_and_goes_while_a_lease_is_put_back_is_noticed():
    """It held the lease when this job tried to write it, and was gone when this job read it."""
    inner = MemoryStore()

    busy = []

    def put(name, data, **how):
        if not busy:
            return inner.put(name, data, **how)
        other = Lease(inner)
        other.acquire()
        try:
            inner.put(name, data, **how)
        finally:
            other.release()

    root = Overriding(inner, put=put)
    lease = Lease(root)
    lease.acquire()
    inner.delete(LEASE_NAME)
    busy.append(True)
    with pytest.raises(sk.LeaseLost, match="came and went"):
        lease.check()
    lease.release()


class Away(Hooked):
    """A root that fails to give the record of one checkpoint while `away` is set."""

    def __init__(self, inner, name):
        super().__init__(inner, self._look)
        self.away, self._name = True, name

    def _look(self, where, verb, *args):
        if self.away and (where, verb, *args) == (self._name, "get", "shardkeep.json"):
            raise StorageError("503 slow down", errno=5)


def gone_back():
    """Steps 100 and 200, then 150 of a job that went back to 100: the newest, whose record is not given."""
    root = MemoryStore()
    with checkpointer(root, asynchronous=False) as ckpt:
        ckpt.save(100, state_at(100), metrics={"loss": 2.0})
        ckpt.save(200, state_at(200), metrics={"loss": 1.0})
        ckpt.restore(100, empty_state())
        ckpt.save(150, state_at(150), metrics={"loss": 0.5})
    return Away(root, "step-150")


@pytest.mark.parametrize(
    "look",
    [
        lambda ckpt: ckpt.restore_latest(empty_state()),
        lambda ckpt: ckpt.restore_best(empty_state(), "loss"),
        lambda ckpt: ckpt.latest_step(),
        lambda ckpt: ckpt.best_step("loss"),
    ],
    ids=["restore_latest", "restore_best", "latest_step", "best_step"],
)
def test_what_may_be_the_newest_or_the_best_is_not_passed_over(look):
    """Its record cannot be read for the moment: that is raised, however low its step; another one can be asked for."""
    root = gone_back()
    with checkpointer(root, retries=0) as ckpt:
        with pytest.raises(StorageError, match=r"step-150 cannot be read at the moment.*503 slow down") as caught:
            look(ckpt)
        assert caught.value.errno == 5
        assert ckpt.all_steps() == [100, 200]
        assert ckpt.restore(200, empty_state()) == 200
        root.away = False
        assert look(ckpt) == 150


def test_no_timeline_is_numbered_twice():
    """A job whose first save cannot see the newest timeline saves nothing; the next try is newer than all there is."""
    root = gone_back()
    with checkpointer(root, retries=0, asynchronous=False) as ckpt:
        ckpt.restore(100, empty_state())
        with pytest.raises(StorageError, match="503 slow down"):
            ckpt.save(110, state_at(110))
        root.away = False
        ckpt.save(120, state_at(120))
        assert ckpt.all_steps() == [100, 120, 150, 200]
    with checkpointer(root) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 120


def test_the_way_to_go_on_without_a_record_that_is_not_given(tmp_path):
    """The error says which place it is and to move it away; that done, the one before is restored, and saves go on."""
    root = tmp_path / "run"
    with checkpointer(root, asynchronous=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_at(step))
    state, failing = empty_state(), Away(LocalStore(root), "step-2")
    with checkpointer(failing, asynchronous=False, retries=0) as ckpt:
        with pytest.raises(StorageError, match=f"^{root}/step-2 cannot be read at the moment") as caught:
            ckpt.restore_latest(state)
        assert f"to go on without this checkpoint, move {root}/step-2 out of the root" in caught.value.hint
        assert "promote_to" not in caught.value.hint
        os.rename(root / "step-2", tmp_path / "away")
        failing.away = False  # of what is not there, a disk says so
        assert ckpt.restore_latest(state) == 1
        ckpt.save(2, state_at(2))
        assert ckpt.all_steps() == [1, 2]


def test_the_way_to_go_on_without_a_far_root_that_gives_no_record(tmp_path):
    """The error names the far place, and says that promote_to can be left out, which is so."""
    far = FarRoot()
    with checkpointer(tmp_path, promote_to=far) as ckpt:
        ckpt.save(1, state_at(1))
    far.before = Broken("get", "shardkeep")
    with checkpointer(tmp_path, promote_to=far, retries=0) as ckpt:
        with pytest.raises(StorageError, match=f"^{far.url}/step-1 cannot be read at the moment") as caught:
            ckpt.restore_latest(empty_state())
        assert "leave promote_to out" in caught.value.hint
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.restore_latest(empty_state()) == 1


# Roots that are far away: what killed jobs left there, stores that do not answer, and keys that change meanwhile.


def steps(root):
    return sorted(entry.step for entry in sk.Catalog(root).entries() if entry.committed)


class Silent:
    """Lets nothing through, from when it is closed to when it is opened: a far store that does not answer."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()

    def __call__(self, verb, name):
        self.asked.set()
        self.open.wait(60)


def silent_root():
    """Make a root that can stop answering, with all of its places."""
    silent = Silent()
    root = FarRoot(silent)

    def waiting(verb):
        work = getattr(root.inner, verb)
        return lambda *args, **more: (silent(verb, ""), work(*args, **more))[1]

    for verb in ("get", "put", "delete", "version", "list", "places", "open"):
        setattr(root, verb, waiting(verb))
    return root, silent


def test_close_does_not_wait_for_a_far_root_that_is_silent(tmp_path, monkeypatch):
    """The near root is free when it returns, what was under way commits nothing later, and the next job goes on."""
    monkeypatch.setattr("shardkeep.manage.replicate.GRACE_S", 0.2)
    far, silent = silent_root()
    ckpt = checkpointer(tmp_path, asynchronous=False, promote_to=far, keep_last=1, promote_required=False)
    ckpt.save(1, state_at(1))
    ckpt.wait()
    silent.open.clear()
    silent.asked.clear()
    ckpt.save(2, state_at(2))
    assert silent.asked.wait(30)
    ckpt.close(timeout_s=0.1)
    assert not silent.open.is_set()
    assert not (tmp_path / "lease.json").exists()
    silent.open.set()
    until(lambda: not {"shardkeep-promote", "shardkeep-release"} & {each.name for each in threading.enumerate()})
    assert "shardkeep.json" not in far.names("step-2")
    with checkpointer(tmp_path, asynchronous=False, promote_to=far) as ckpt:
        ckpt.restore_latest(empty_state())
        ckpt.save(3, state_at(3))
    assert steps(far.inner) == [1, 2, 3]


def test_what_is_cancelled_is_not_tried_again(tmp_path):
    """A promotion whose far root fails in passing ends between two attempts, as cancelled and not as failed."""
    broken, seen, waited = Broken("create", "", errno.EIO), list[sk.events.Event](), list[float]()

    def sleep(seconds):
        waited.append(seconds)
        ckpt.cancel_promotions()

    ckpt = checkpointer(
        tmp_path,
        asynchronous=False,
        promote_to=FarRoot(broken),
        retries=1000,
        clock=replace(QUICK, sleep=sleep),
        on_event=seen.append,
    )
    ckpt.save(1, state_at(1))
    ckpt.wait()
    assert len(waited) == 1
    assert [each.cancelled for each in seen if isinstance(each, sk.events.PromotionFailed)] == [True]
    broken.verb = ""
    ckpt.close()


def test_keys_that_are_rotated_while_it_is_copied_are_promoted(tmp_path):
    """The far checkpoint opens with the new key alone, as the near one does."""
    old, new = sk.new_key(), sk.new_key()
    near, far = tmp_path / "near", tmp_path / "far"

    def rotate(event):
        if isinstance(event, sk.events.PromotionBegan):
            assert sk.rotate_keys(near / "step-1", options=sk.Options(keys=sk.KeyRing.from_text(f"{new}\n{old}")))

    keys = sk.Options(keys=sk.KeyRing.from_text(old))
    with checkpointer(near, asynchronous=False, promote_to=far, codecs=["aes"], options=keys, on_event=rotate) as ckpt:
        ckpt.save(1, state_at(1))
    for root in (near, far):
        assert sk.open(root / "step-1", options=sk.Options(keys=sk.KeyRing.from_text(new)))["step"] == 1
