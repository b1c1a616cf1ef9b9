"""The ranks of these tests spread their messages over several logs, as a job of more ranks does."""

import pytest

from shardkeep.dist import rendezvous


def in_small_logs(function, *arguments):
    """Call `function` on a rank whose logs are those of two ranks, and have only short messages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "LOG_RANKS", 2)
        patch.setattr(rendezvous, "LOGGED_BYTES", 80)
        return function(*arguments)


class RanksWithSmallLogs:
    def __init__(self, pool):
        self._pool = pool

    def run(self, size, function, *arguments, **how):
        return self._pool.run(size, in_small_logs, function, *arguments, **how)


@pytest.fixture
def rank_pool(rank_pool):
    return RanksWithSmallLogs(rank_pool)
