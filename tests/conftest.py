from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from shardkeep.testing.rank_pool import RankPool
from shardkeep.testing.s3_server import S3Server

with contextlib.suppress(ModuleNotFoundError):  # the environment of tests/frameworks has none
    from hypothesis import settings

    # Two cores that run other tests besides: how long an example takes says nothing.
    settings.register_profile("shardkeep", deadline=None)
    settings.load_profile("shardkeep")

# A shell starts what it puts in the background with Ctrl-C ignored, and Python then never raises KeyboardInterrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real ranks, as processes that are started when first needed and kept for all tests."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[S3Server]:
    """A real S3 server on this machine, one for all workers, which ends with the last of them."""
    base = tmp_path_factory.getbasetemp()
    with S3Server((base if worker_id == "master" else base.parent) / "s3") as server:
        yield server
