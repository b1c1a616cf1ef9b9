"""Two jobs that write the lease or `latest` of one root at the same moment: the store lets one through."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import shardkeep as sk
from shardkeep.manage.lease import Lease
from shardkeep.storage.base import Root
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from tests.manage.scene import checkpointer, state_at, until


def leave_dead_lease(root: Root) -> None:
    """Leave the lease of a process of this machine that is gone."""
    lease = Lease(root)
    lease.acquire()
    holder = json.loads(root.get("lease.json", limit=4096))
    lease.release()
    root.put("lease.json", json.dumps({**holder, "started": "long ago"}).encode())


class Together:
    """A root in whose `put` over a version all writers wait for each other, once."""

    def __init__(self, inner: Root, writers: int) -> None:
        self._inner, self._barrier, self.url = inner, Barrier(writers), inner.url

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    def put(self, name: str, data: bytes, **how: Any) -> None:
        if how.get("over") is not None:
            self._barrier.wait(20)
        self._inner.put(name, data, **how)


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_one_of_many_takes_over_a_dead_lease(tmp_path: Path, kind: str) -> None:
    """All have seen that its holder is gone, and write in one moment."""
    inner = LocalStore(tmp_path) if kind == "files" else MemoryStore()
    leave_dead_lease(inner)
    root: Any = Together(inner, 4)
    leases = [Lease(root) for _ in range(4)]

    def take(lease: Lease) -> str:
        try:
            lease.acquire()
        except sk.RootInUse as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as threads:
        said = sorted(threads.map(take, leases))
    assert said[0] == ""
    assert all("another Checkpointer saves here" in each for each in said[1:])
    assert [lease.held for lease in leases].count(True) == 1
    for lease in leases:
        lease.release()
    assert not list(inner.list())


def test_a_renewal_does_not_undo_a_takeover() -> None:
    """Whoever renews has looked, and is overtaken before it writes."""
    inner = MemoryStore()

    class Late:
        """Lets another job take the lease between the look and the write."""

        url = inner.url
        other: Lease | None = None

        def __getattr__(self, verb: str) -> Any:
            return getattr(inner, verb)

        def put(self, name: str, data: bytes, **how: Any) -> None:
            if self.other is not None:
                other, self.other = self.other, None
                other.acquire()
            inner.put(name, data, **how)

    late: Any = Late()
    first, second = Lease(late, lasts_s=0.2), Lease(inner, takeover=True)
    first.acquire()
    late.other = second
    until(lambda: not first.held)
    with pytest.raises(sk.LeaseLost, match="another job saves here now"):
        first.check()
    second.check()
    second.release()
    first.release()


def test_latest_of_a_job_that_took_over_stays(tmp_path: Path) -> None:
    """The job that had the root looked at the lease, and points to its own checkpoint too late."""
    inner = LocalStore(tmp_path)

    class Late:
        url = inner.url

        def __getattr__(self, verb: str) -> Any:
            return getattr(inner, verb)

        def put(self, name: str, data: bytes, **how: Any) -> None:
            if name == "latest":
                inner.put(name, b"step-9\n", replace=True)
            inner.put(name, data, **how)

    root: Any = Late()
    with checkpointer(root, keep_last=1) as ckpt:
        ckpt.save(1, state_at(1))
        ckpt.wait()
    assert (tmp_path / "latest").read_text() == "step-9\n"
