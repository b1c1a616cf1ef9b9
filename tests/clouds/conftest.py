"""
Azure and Google on this machine, and places there, each with a name of its own.

Azurite is Microsoft's own emulator, and is not there everywhere: `npm install azurite` in some folder, then set
SHARDKEEP_AZURITE to its node_modules/.bin/azurite-blob. For Google there is a server of ours, which is always there.
"""

import itertools
import os
import threading
from contextlib import contextmanager

import pytest

from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.support.azure_server import AzureServer, azurite
from tests.support.google_server import GoogleServer

_numbers = itertools.count()


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _only_what_a_test_says(monkeypatch):
    """Have no keys and no endpoints around."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "STORAGE_EMULATOR_")):
            monkeypatch.delenv(name)
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):  # nor a role of this machine
        monkeypatch.setenv(name, "127.0.0.1:1")


@pytest.fixture(scope="session")
def azure_server():
    """Azurite, where it is installed."""
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install azurite, and set SHARDKEEP_AZURITE")
    with AzureServer() as server:
        yield server


@pytest.fixture(scope="session")
def google_server():
    """What stands for Google here."""
    with GoogleServer() as server:
        yield server


@pytest.fixture(params=["azure", "google"])
def cloud(request):
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def cloud_place(cloud):
    def opened(**options):
        url = cloud.url(f"clouds/{os.getpid()}-{next(_numbers)}")
        place = open_place(url, **{**cloud.options, **options})
        assert isinstance(place, ObjectStore)
        return place

    return opened
