"""Azure and Google keep the contract of stores, by their own conditions."""

import itertools
from typing import ClassVar

import pytest

from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_place
from shardkeep.testing.store_contract import StoreContract
from tests.support.azure_server import AzureServer
from tests.support.google_server import GoogleServer


class TestAzure(StoreContract):
    numbers: ClassVar = itertools.count()

    @pytest.fixture(autouse=True)
    def _server(self, azure_server: AzureServer) -> None:
        self.server: AzureServer | GoogleServer = azure_server

    def make_store(self) -> Store:
        return open_place(self.server.url(f"contract/{next(self.numbers)}"), **self.server.options)


class TestGoogle(TestAzure):
    @pytest.fixture(autouse=True)
    def _server(self, google_server: GoogleServer) -> None:  # type: ignore[override]
        self.server = google_server
