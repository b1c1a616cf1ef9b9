"""Places on a real S3 server, each with a name of its own."""

import itertools
import os

import obstore
import pytest

from shardkeep.storage.object_store import ObjectStore
from shardkeep.storage.resolve import open_place
from tests.object_store.proxy import Proxy

_numbers = itertools.count()

# Older ones, which are the newest for Python 3.10, leave an upload of which the service refused a part to the next sweep.
TAKES_BACK = tuple(map(int, obstore.__version__.split(".")[:2])) >= (0, 12)
"""Whether the library takes an upload back that failed."""


@pytest.fixture(scope="session")
def s3_place(s3_server):
    def opened(**options):
        path = options.pop("path", None) or f"tests/{os.getpid()}-{next(_numbers)}"
        place = open_place(s3_server.url(path), **{**s3_server.options, **options})
        assert isinstance(place, ObjectStore)
        return place

    return opened


@pytest.fixture(scope="module")
def proxy(s3_server):
    with Proxy(s3_server.port, seed=7) as proxy:
        yield proxy
