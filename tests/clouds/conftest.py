"""
Azure and Google on this machine, and places there, each with a name of its own.

Azurite is Microsoft's own emulator, and is not there everywhere: `npm install azurite` in some folder, then set
SHARDKEEP_AZURITE to its node_modules/.bin/azurite-blob. For Google there is a server of ours, which is always there.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.support.azure_server import AzureServer, azurite
from tests.support.google_server import GoogleServer
from tests.support.s3_server import S3Server

_numbers = itertools.count()
Cloud = AzureServer | GoogleServer | S3Server


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Let a server answer inside."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _only_what_a_test_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no keys and no endpoints around."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "STORAGE_EMULATOR_")):
            monkeypatch.delenv(name)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):  # nor a role of this machine
        monkeypatch.setenv(name, "127.0.0.1:1")


@pytest.fixture(scope="session")
def azure_server() -> Iterator[AzureServer]:
    """Azurite, where it is installed."""
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install azurite, and set SHARDKEEP_AZURITE")
    with AzureServer() as server:
        yield server


@pytest.fixture(scope="session")
def google_server() -> Iterator[GoogleServer]:
    """What stands for Google here."""
    with GoogleServer() as server:
        yield server


@pytest.fixture(params=["azure", "google"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    """One after the other."""
    found: Cloud = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def cloud_place(cloud: Cloud) -> Callable[..., ObjectStore]:
    """Open a place of its own."""

    def opened(**options: Any) -> ObjectStore:
        url = cloud.url(f"clouds/{os.getpid()}-{next(_numbers)}")
        place = open_place(url, **{**cloud.options, **options})
        assert isinstance(place, ObjectStore)
        return place

    return opened
