"""Object stores and what fsspec opens keep the contract of stores."""

import secrets

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardkeep.storage.fsspec import FsspecStore
from shardkeep.storage.retry import RetryingStore, RetryPolicy
from shardkeep.testing.store_contract import PutContract, StoreContract


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3_place):
        self.opened = s3_place

    def make_store(self):
        return self.opened()


class TestS3WithoutConditions(PutContract):
    """Where the service is said to ignore conditions: by looking, and looking again. All else is as above."""

    @pytest.fixture(autouse=True)
    def _server(self, s3_place, recwarn):
        self.opened = s3_place

    def make_store(self):
        return RetryingStore(self.opened(conditional_puts=False, settle_s=0.01), RetryPolicy(1))


class TestFsspec(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, recwarn):
        self.path = f"/{secrets.token_hex(4)}"
        yield
        fs = MemoryFileSystem()
        if fs.exists(self.path):
            fs.rm(self.path, recursive=True)

    def make_store(self):
        return FsspecStore(MemoryFileSystem(), self.path, f"mem:/{self.path}", settle_s=0.01)
