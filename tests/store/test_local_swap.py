"""Swaps of local files: alone in a directory, for a moment, where the system can."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shardkeep.errors import StorageError
from shardkeep.storage import system
from shardkeep.storage.local import LocalStore


def test_a_lock_that_is_never_let_go_is_an_error_that_passes(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped in the middle of a swap holds nobody up for ever, and nothing is replaced meanwhile."""
    store.put("a", b"old")
    monkeypatch.setattr(system, "_LOCK_TIMEOUT_S", 0.05)
    other = os.open(tmp_path / "store", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.put("b", b"new names need no lock")
        with pytest.raises(StorageError, match="held the lock on the directory") as caught:
            store.put("a", b"new", replace=True)
        assert caught.value.errno == errno.EBUSY
    finally:
        os.close(other)
    assert sorted(os.listdir(tmp_path / "store")) == ["a", "b"]
    store.put("a", b"new", over=store.version("a"))
    assert store.get("a", limit=9) == b"new"


def test_a_file_system_without_locks_still_swaps(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are compared all the same; any other failure to lock is told."""

    def refuse(code: int) -> None:
        def flock(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(system.fcntl, "flock", flock)

    store.put("a", b"old")
    seen = store.version("a")
    refuse(errno.EOPNOTSUPP)
    store.put("a", b"new", over=seen)
    with pytest.raises(StorageError) as caught:
        store.put("a", b"newer", over=seen)
    assert caught.value.errno == errno.EEXIST
    refuse(errno.EIO)
    with pytest.raises(StorageError) as caught:
        store.put("a", b"newer", replace=True)
    assert caught.value.errno == errno.EIO
    assert store.get("a", limit=9) == b"new"


def test_a_version_is_of_bytes_and_of_when(store: LocalStore, tmp_path: Path) -> None:
    """Bytes that change in place, or are put anew a while later, are of another version; to look changes nothing."""
    store.put("a", b"one")
    first = store.version("a")
    os.utime(tmp_path / "store" / "a", ns=(1, 1))
    assert store.version("a") != first
    second = store.version("a")
    (tmp_path / "store" / "a").write_bytes(b"two")
    os.utime(tmp_path / "store" / "a", ns=(1, 1))
    assert store.version("a") != second
