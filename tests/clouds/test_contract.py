"""Azure and Google keep the contract of stores, by their own conditions."""

import itertools

import pytest

from shardkeep.storage.resolve import open_place
from shardkeep.testing.store_contract import StoreContract


class TestAzure(StoreContract):
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _server(self, azure_server):
        self.server = azure_server

    def make_store(self):
        return open_place(self.server.url(f"contract/{next(self.numbers)}"), **self.server.options)


class TestGoogle(TestAzure):
    @pytest.fixture(autouse=True)
    def _server(self, google_server):
        self.server = google_server
