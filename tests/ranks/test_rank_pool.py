"""The processes that other tests use as ranks."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardkeep.errors import StateMismatch
from tests.support.rank_pool import RankPoolError


def add_ranks(extra, *, factor=1):
    total = torch.tensor(dist.get_rank() * factor + extra)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


@pytest.mark.parametrize("store_on", ["parent", "rank0"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_results_come_back_by_rank(rank_pool, size, store_on):
    total = sum(2 * rank + 5 for rank in range(size))

    assert rank_pool.run(size, add_ranks, 5, factor=2, store_on=store_on) == [(r, size, total) for r in range(size)]


def state_of_process():
    return os.getpid(), dist.is_initialized(), torch.get_num_threads()


def raise_on_odd_ranks():
    if dist.get_rank() % 2:
        raise StateMismatch("differs", missing=["a"]) from KeyError("a")
    return "fine"


def test_what_a_rank_raises_comes_back(rank_pool):
    fine, bad = rank_pool.outcomes(2, raise_on_odd_ranks)

    assert (fine.value, fine.error, fine.died) == ("fine", None, "")
    assert isinstance(bad.error, StateMismatch)
    assert bad.error.missing == ["a"]
    assert repr(bad.error.__cause__) == "KeyError('a')"
    assert "in raise_on_odd_ranks" in bad.trace


def die_on_rank_1(how):
    if dist.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        print("last words", flush=True)
        os._exit(3)
    return dist.get_rank()


@pytest.mark.parametrize(("how", "text"), [("kill", "killed by SIGKILL"), ("exit", "exited with 3\nlast words")])
def test_a_death_is_reported_and_made_good(rank_pool, how, text):
    with pytest.raises(RankPoolError, match=f"rank 1: {text}"):
        rank_pool.run(2, die_on_rank_1, how)

    assert rank_pool.run(2, die_on_rank_1, how, expect_death=[1]) == [0, None]
    assert rank_pool.run(2, add_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(60)


def test_a_hang_shows_where_and_is_made_good(rank_pool):
    pids = [pid for pid, _, _ in rank_pool.run(2, state_of_process)]

    with pytest.raises(RankPoolError) as caught:
        rank_pool.run(2, hang_on_rank_1, timeout_s=0.5)

    text = str(caught.value)
    assert text.startswith("ranks [1] of 2 did not finish within 0.5 s")
    assert "in hang_on_rank_1" in text
    after = [pid for pid, _, _ in rank_pool.run(2, state_of_process)]
    assert (after[0] == pids[0], after[1] == pids[1]) == (True, False)
