from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardkeep.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real ranks, as processes that are started when first needed and kept for all tests."""
    with RankPool(8) as pool:
        yield pool
