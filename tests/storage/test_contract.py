"""Every store of ours keeps the contract, also on systems that lack what Linux has."""

import os
import sys
from pathlib import Path

import pytest

from shardkeep.storage import buffers as aligned
from shardkeep.storage import local as files
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.store_contract import StoreContract


class InDirectory(StoreContract):
    MANY = 20  # a disk lists without pages

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "made" / "when-needed"

    def make_store(self):
        return LocalStore(self.path)


class TestLocalDirect(InDirectory):
    """As it is by default."""


class TestRetrying(InDirectory):
    def make_store(self):
        return RetryingStore(LocalStore(self.path), RetryPolicy(3, sleep=lambda _: None))


class TestLocalBuffered(InDirectory):
    def make_store(self):
        return LocalStore(self.path, direct=False)


class TestLocalOnABareSystem(InDirectory):
    """As on Windows: no O_DIRECT, no positioned reads or writes, no fdatasync, no directory handles."""

    @pytest.fixture(autouse=True)
    def _bare(self, monkeypatch):
        for name in ("preadv", "pread", "pwrite", "pwritev", "fdatasync", "O_DIRECTORY", "O_DIRECT", "RWF_NOWAIT"):
            monkeypatch.delattr(os, name, raising=False)
        for name in ("MAP_ANONYMOUS", "MADV_HUGEPAGE"):
            monkeypatch.delattr(aligned.mmap, name, raising=False)
        monkeypatch.setattr(files, "_O_DIRECT", 0)
        monkeypatch.setattr(sys, "platform", "win32")


class TestMemory(StoreContract):
    def make_store(self):
        return MemoryStore()


class TestFaultyWithoutFault(StoreContract):
    def make_store(self):
        return FaultyStore(MemoryStore())


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
class TestOnTmpfs(InDirectory):
    """Shared memory is a place like any other."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = Path("/dev/shm") / f"shardkeep-{os.getpid()}-{tmp_path.name}"
        yield
        for file in self.path.glob("*"):
            file.unlink()
        if self.path.exists():
            self.path.rmdir()
