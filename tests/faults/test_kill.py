"""kill -9 of one process, of one rank and of all ranks, in the middle of overwriting saves."""

import contextlib
import os
import random
import time

import pytest
import torch.distributed as dist

import shardkeep as sk
from tests.faults.doomed import (
    TIMEOUT_S,
    level_at,
    save_for_ever,
    save_for_ever_as_rank,
    save_level,
    save_with_a_rank_killed,
)
from tests.faults.forks import Fork
from tests.faults.scene import files_of_checkpoint, names_in


def bytes_in(place):
    return sum(entry.stat().st_size for entry in os.scandir(place))


@pytest.mark.parametrize("medium", ["memory", "disk"])
def test_one_process_killed_at_random_moments(place, tmp_path, medium):
    """A whole checkpoint is there, never older than the last acknowledged one; leftovers of the dead never add up."""
    place = place if medium == "memory" else str(tmp_path / "ck")
    rng = random.Random(medium)
    save_level(place, 0)
    began = time.monotonic()
    save_level(place, 1)
    pace_s = time.monotonic() - began
    one = bytes_in(place)
    latest = 1
    torn = 0
    for _ in range(16):
        with Fork(save_for_ever, place, latest + 1) as fork:
            assert fork.pipe.recv() == "ready"
            if rng.random() < 0.7:
                fork.pipe.poll(30)  # until the first save; it takes much longer than the others
            time.sleep(rng.uniform(0, 4 * pace_s))
            fork.kill()
            acknowledged = fork.said()
        found = level_at(place)
        latest = max([latest, *acknowledged])
        assert found in (latest, latest + 1)
        latest = found
        torn += names_in(place) != files_of_checkpoint(place)
        # The checkpoint, the one it replaced, and the one under way: the last of them each time.
        assert bytes_in(place) < 3.1 * one
    assert torn >= 2, "the kills missed the saves"
    save_level(place, latest + 1)
    assert names_in(place) == files_of_checkpoint(place)


@contextlib.contextmanager
def ranks_saving(size, place, k, *, host):
    """Ranks that save over and over, until killed; `host` is the rank, or the parent, with the group's store."""
    with contextlib.ExitStack() as stack:
        if host == "parent":
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
            forks = []
        else:
            forks = [stack.enter_context(Fork(save_for_ever_as_rank, 0, size, 0, place, k))]
            port = forks[0].pipe.recv()
        for rank in range(len(forks), size):
            forks.append(stack.enter_context(Fork(save_for_ever_as_rank, rank, size, port, place, k)))
            assert forks[rank].pipe.recv() == port
        for fork in forks:
            assert fork.pipe.recv() == "ready"
        yield forks


def check_what_is_left(place, heard, earlier):
    """The checkpoint is whole and no older than any rank was told; return which one it is."""
    told = [k for said in heard for k in said if isinstance(k, int)]
    latest = max([earlier, *told])
    found = level_at(place)
    assert found in (latest, latest + 1)
    return found


@pytest.mark.parametrize(
    ("victim", "host", "times"), [(0, "parent", 2), (0, "rank 0", 4), (1, "parent", 2), (2, "rank 0", 2)]
)
def test_one_rank_killed(place, victim, host, times):
    """The others name it before the deadline; the checkpoint is whole. Rank 0, or the next save, removes all that is left."""
    rng = random.Random(f"{victim} {host}")
    latest = 0
    save_level(place, 0)
    for _ in range(times):
        with ranks_saving(3, place, latest + 1, host=host) as forks:
            first = forks[0].pipe.recv()
            time.sleep(rng.uniform(0, 0.15))
            forks[victim].kill()
            others = [fork for rank, fork in enumerate(forks) if rank != victim]
            assert [fork.join(4 * TIMEOUT_S + 20) for fork in others] == [0, 0]
            heard = [[first] * (fork is forks[0]) + fork.said() for fork in forks]
        for rank, said in enumerate(heard):
            if rank != victim:
                kind, message, silent, waited_s = said[-1]
                assert kind == "RanksSilent", message
                assert silent == [victim]
                assert f"rank {victim}: " in message
                assert waited_s < 2 * TIMEOUT_S + 10
        latest = check_what_is_left(place, heard, latest)
        if victim != 0:
            assert names_in(place) == files_of_checkpoint(place)
        latest += 1
        save_level(place, latest)
        assert names_in(place) == files_of_checkpoint(place)


def test_all_ranks_killed(place):
    """When the whole job is killed, at any moment, the checkpoint on disk is whole and the next job saves over it."""
    rng = random.Random(0)
    latest = 0
    save_level(place, 0)
    for _ in range(6):
        with ranks_saving(4, place, latest + 1, host="rank 0") as forks:
            time.sleep(rng.uniform(0, 0.3))
            for fork in rng.sample(forks, len(forks)):
                fork.kill()
            heard = [fork.said() for fork in forks]
        latest = check_what_is_left(place, heard, latest) + 1
        save_level(place, latest)
        assert names_in(place) == files_of_checkpoint(place)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_of_a_pool_killed_at_one_operation(rank_pool, place, victim):
    """The same with a rank that is killed between two operations on its own data file, on the ranks other tests use."""
    save_level(place, 0)
    before = names_in(place)
    outcomes = rank_pool.outcomes(3, save_with_a_rank_killed, place, 1, victim, 5 if victim == 0 else 2)
    assert outcomes[victim].died == "killed by SIGKILL"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, sk.RanksSilent), outcome.trace
            assert outcome.error.ranks == [victim]
    assert level_at(place) == 0
    if victim != 0:
        assert names_in(place) == before
    save_level(place, 2)
    assert names_in(place) == files_of_checkpoint(place)
