"""One job at a time saves to a root."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest

import shardkeep as sk
from shardkeep.manage.lease import LEASE_NAME, Lease
from shardkeep.manage.schedule import Clock
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from tests.manage.scene import Overriding, checkpointer, state_at, until

HOLDER = """
import sys
from shardkeep.manage import lease as module
from shardkeep.manage.schedule import Clock
from shardkeep.storage.local import LocalStore
if sys.argv[2]:
    module.host_identity = lambda: sys.argv[2]
lease = module.Lease(LocalStore(sys.argv[1]), Clock(lease_s=float(sys.argv[3])))
lease.acquire()
print("held", flush=True)
sys.stdin.readline()
"""


def held(lease):
    return lease._thread is not None and not lease._lost and not lease._ended.is_set()


@contextmanager
def holder(root, host="", lasts_s=300.0):
    """Another process that holds the lease of a root; with a host of its own, as if it ran on another machine."""
    command = [sys.executable, "-c", HOLDER, str(root), host, str(lasts_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


class SleepClock:
    """A clock that advances only during sleeps; `meanwhile` runs in each sleep."""

    def __init__(self, meanwhile=lambda _: None):
        self.now = 0.0
        self.meanwhile = meanwhile

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile(self.now)

    def lease(self, root, lasts_s=300.0, **more):
        return Lease(root, Clock(monotonic=lambda: self.now, sleep=self.sleep, lease_s=lasts_s), **more)


def of_elsewhere(beat=0, **more):
    said = {"id": "x", "machine": "node7", "host": "elsewhere", "pid": 1, "started": "1", "since": "then", "beat": beat}
    return json.dumps({**said, **more}).encode()


def test_a_second_job_is_refused_and_told_by_whom(tmp_path, monkeypatch):
    """A living process of this machine is named; when it ends by itself, the root is free."""
    with holder(tmp_path) as process:
        with checkpointer(tmp_path) as ckpt:
            assert ckpt.restore_latest({}) is None  # reading needs no lease
            with pytest.raises(sk.RootInUse, match=f"process {process.pid} on") as caught:
                ckpt.save(1, state_at(1))
            assert "takeover=True" in str(caught.value)
            monkeypatch.setenv("WORLD_SIZE", "2")  # another rank of one job, which has no process group
            with pytest.raises(sk.RootInUse, match=r"hint: .*call torch.distributed.init_process_group first$"):
                ckpt.save(1, state_at(1))
        process.communicate("end\n")
        assert not (tmp_path / LEASE_NAME).exists()
        with checkpointer(tmp_path) as ckpt:
            ckpt.save(1, state_at(1))


def test_what_a_killed_job_held_is_free(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / LEASE_NAME).exists()
        with checkpointer(tmp_path) as ckpt:
            ckpt.save(1, state_at(1))
    assert not (tmp_path / LEASE_NAME).exists()


def test_a_holder_elsewhere_that_moves_is_alive():
    root = MemoryStore()
    root.put(LEASE_NAME, of_elsewhere())
    clock = SleepClock(lambda now: now > 20 and root.put(LEASE_NAME, of_elsewhere(1), replace=True))
    with pytest.raises(sk.RootInUse, match="node7"):
        clock.lease(root).acquire()
    assert clock.now < 25
    assert root.get(LEASE_NAME, limit=999) == of_elsewhere(1)


@pytest.mark.parametrize("seen", [of_elsewhere(), b"{", b"x" * 5000])
def test_a_holder_elsewhere_that_does_not_move_has_lost_it(seen):
    root = MemoryStore()
    root.put(LEASE_NAME, seen)
    clock = SleepClock()
    lease = clock.lease(root, lasts_s=100.0)
    lease.acquire()
    assert 99 < clock.now < 105
    assert held(lease)
    lease.check()
    lease.release()
    later = clock.lease(root, lasts_s=100.0)  # begins at once
    later.acquire()
    assert clock.now < 105
    later.release()


@pytest.mark.parametrize(
    ("old_s", "says", "waits_s"),
    [
        (1e6, {"renewed_every_s": 4.0}, 6),
        (1e6, {"renewed_every_s": 0.0}, 5),  # as often as this job renews its own, or less
        (1e6, {}, 45),  # by a release that renewed each 30 s
        (150, {}, 50),  # one term is an allowance for clocks that differ
        (50, {}, 100),
        (-1e6, {}, 100),
    ],
)
def test_an_old_lease_is_still_watched_for_a_moment(tmp_path, old_s, says, waits_s):
    """By the store's clock it ran out long ago, but that clock may have jumped, and a living holder would renew it."""
    root = LocalStore(tmp_path)
    for beat in (0, 1):
        root.put(LEASE_NAME, of_elsewhere(beat, **says), replace=True)
        os.utime(tmp_path / LEASE_NAME, (time.time() - old_s,) * 2)
        alive = of_elsewhere(9, **says)
        clock = SleepClock(lambda now, alive=alive: root.put(LEASE_NAME, alive, replace=True) if beat else None)  # noqa: B023
        lease = clock.lease(root, lasts_s=100.0)
        if beat:
            with pytest.raises(sk.RootInUse, match="node7"):
                lease.acquire()
        else:
            lease.acquire()
            assert waits_s - 1 <= clock.now <= waits_s + 3
        lease.release()


@pytest.mark.parametrize("fate", ["killed", "alive"])
def test_a_restore_counts_as_waiting_for_the_lease(tmp_path, caplog, fate):
    """A killed job of another machine is not waited for again in the first save; a living one keeps its root."""
    clock = Clock(lease_s=2.0)
    with holder(tmp_path, "another machine", clock.lease_s) as process, checkpointer(tmp_path, clock=clock) as ckpt:
        if fate == "killed":
            process.kill()
            process.wait()
        else:
            os.utime(tmp_path / LEASE_NAME, (1, 1))  # a clock that has jumped
        assert ckpt.restore_latest({}) is None
        if fate == "alive":
            with pytest.raises(sk.RootInUse, match=f"process {process.pid} on"):
                ckpt.save(1, state_at(1))
            return
        until(lambda: not [each for each in threading.enumerate() if each.name == "shardkeep-lease-watch"])
        ckpt.save(1, state_at(1))
        assert "taken over from process" in caplog.text
        assert "waiting" not in caplog.text


def test_waiting_for_a_lease_is_said_every_ten_seconds(caplog):
    """For what, how long still, and how to skip it."""
    root = MemoryStore()
    root.put(LEASE_NAME, of_elsewhere())
    clock = SleepClock()
    lease = clock.lease(root)
    lease.acquire()
    lease.release()
    said = [each.getMessage() for each in caplog.records if "waiting for the lease" in each.message]
    assert len(said) == 30
    assert "of process 1 on node7, since then, which was not renewed for 290 s: it is free in 10 s" in said[29]
    assert all("takeover=True" in each for each in said)


RELEASED = json.dumps({**json.loads(of_elsewhere()), "contested": True, "released": True}).encode()


@pytest.mark.parametrize(
    ("meanwhile", "takeover", "stays"),
    [
        (lambda root: root.delete(LEASE_NAME), False, False),
        (lambda root: root.put(LEASE_NAME, RELEASED, replace=True), False, True),
        (lambda root: None, True, True),
    ],
    ids=["ended", "released", "takeover"],
)
def test_a_lease_that_ends_while_it_is_watched_is_free(meanwhile, takeover, stays):
    """The other job has ended well, or is not waited for; one that may come back finds a released lease at the end."""
    root = MemoryStore()
    root.put(LEASE_NAME, of_elsewhere())  # as an earlier release wrote it
    clock = SleepClock(lambda now: meanwhile(root))
    lease = clock.lease(root, takeover=takeover)
    lease.acquire()
    assert clock.now == 0 if takeover else clock.now < 10
    lease.release()
    assert [json.loads(root.get(info.name, limit=999))["released"] for info in root.list()] == [True] * stays


def test_it_is_renewed_while_it_is_held():
    """A thread renews it, notices when it is lost, and writes it again when it was deleted by hand."""
    root = MemoryStore()
    lease = Lease(root, Clock(lease_s=2.0))
    lease.acquire()
    lease.acquire()

    def beat():
        return int(json.loads(root.get(LEASE_NAME, limit=999))["beat"])

    until(lambda: beat() >= 2)
    root.delete(LEASE_NAME)
    until(lambda: any(info.name == LEASE_NAME for info in root.list()))
    lease.check()
    root.put(LEASE_NAME, of_elsewhere(), replace=True)
    until(lambda: not held(lease))
    with pytest.raises(sk.LeaseLost, match="node7"):
        lease.check()
    lease.release()
    assert root.get(LEASE_NAME, limit=999) == of_elsewhere()


class _Undeletable(MemoryStore):
    def delete(self, name):
        raise sk.StorageError(f"{name} cannot be deleted", name=name)


def test_a_lease_that_could_not_be_deleted_is_given_up_all_the_same():
    """A later Checkpointer of this process takes the root, and one that still holds it is not taken for such a one."""
    root = _Undeletable()
    first = Lease(root)
    first.acquire()
    with pytest.raises(sk.RootInUse, match="this process itself"):
        Lease(root).acquire()
    first.release()
    assert LEASE_NAME in [info.name for info in root.list()]
    second = Lease(root)
    second.acquire()
    second.check()
    second.release()


class _Flipping(MemoryStore):
    """Changes a bit of its next answer, after some text in it, so that it makes sense still."""

    after = b""

    def get(self, name, *, limit):
        data = bytearray(super().get(name, limit=limit))
        if self.after:
            data[data.index(self.after) + len(self.after)] ^= 1
            self.after = b""
        return bytes(data)


def test_a_flipped_bit_is_no_other_job():
    """One answer that names another holder loses no lease, and one that names another process frees none."""
    root = _Flipping()
    lease = Lease(root)
    lease.acquire()
    for after in (b"{", b'"id":"'):  # nonsense, and another holder
        root.after = after
        lease.check()
        assert held(lease)
    root.after = b'"started":"'
    with pytest.raises(sk.RootInUse, match="this process itself"):
        Lease(root).acquire()
    lease.check()
    root.put(LEASE_NAME, b"no lease", replace=True)
    with pytest.raises(sk.LeaseLost, match="unreadable"):
        lease.check()
    lease.release()


# Two jobs that write the lease or `latest` of one root at the same moment: the store lets one through.


def leave_dead_lease(root):
    """Leave the lease of a process of this machine that is gone."""
    lease = Lease(root)
    lease.acquire()
    holder = json.loads(root.get("lease.json", limit=4096))
    lease.release()
    root.put("lease.json", json.dumps({**holder, "started": "long ago"}).encode())


def together(inner, writers):
    """Make a root in whose conditional `put` all writers wait for each other, once."""
    met = []
    barrier = Barrier(writers, action=lambda: met.append(True))

    def put(name, data, **how):
        if how.get("over") is not None and not met:
            barrier.wait(20)
        inner.put(name, data, **how)

    return Overriding(inner, put=put)


@pytest.mark.parametrize("kind", ["files", "memory", "of another machine"])
def test_one_of_many_takes_over_a_dead_lease(tmp_path, kind):
    """All have seen that its holder is gone, or that it was not renewed for a whole term, and write in one moment."""
    inner = LocalStore(tmp_path) if kind == "files" else MemoryStore()
    root = together(inner, 4)
    leases = [Lease(root, Clock(lease_s=1.0 if "another" in kind else 300.0)) for _ in range(4)]
    if "another" in kind:
        inner.put(LEASE_NAME, of_elsewhere())
        for lease in leases:
            lease.watch()
        until(lambda: all(lease._watching and lease._watching.done() for lease in leases))
    else:
        leave_dead_lease(inner)

    def take(lease):
        try:
            lease.acquire()
        except sk.RootInUse as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as threads:
        said = sorted(threads.map(take, leases))
    assert said[0] == ""
    assert all("another Checkpointer saves here" in each for each in said[1:])
    assert [held(lease) for lease in leases].count(True) == 1
    for lease in leases:
        lease.release()
    left = [json.loads(inner.get(info.name, limit=999))["released"] for info in inner.list()]
    assert left == [True] * ("another" in kind)  # its holder may come back


def test_a_renewal_does_not_undo_a_takeover():
    """The renewing job has read the lease, and another job takes it before the write."""
    inner = MemoryStore()

    others = []

    def put(name, data, **how):
        while others:  # another job acquires the lease between the look and the write
            others.pop().acquire()
        inner.put(name, data, **how)

    late = Overriding(inner, put=put)
    first, second = Lease(late, Clock(lease_s=0.2)), Lease(inner, takeover=True)
    first.acquire()
    others.append(second)
    until(lambda: not held(first))
    with pytest.raises(sk.LeaseLost, match="another job saves here now"):
        first.check()
    second.check()
    second.release()
    first.release()


def test_latest_of_a_job_that_took_over_stays(tmp_path):
    """The job that had the root looked at the lease, and points to its own checkpoint too late."""
    inner = LocalStore(tmp_path)

    def put(name, data, **how):
        if name == "latest":
            inner.put(name, b"step-9\n", replace=True)
        inner.put(name, data, **how)

    root = Overriding(inner, put=put)
    with checkpointer(root, keep_last=1) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
    assert (tmp_path / "latest").read_text() == "step-9\n"
