from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from shardkeep.testing.rank_pool import RankPool

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
