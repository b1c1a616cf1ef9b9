"""Storage and ranks that fail while a save is in flight."""

import itertools
import os

import pytest
import torch.distributed as dist

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.asynchronous.scene import PATIENCE_S
from tests.faults import doomed
from tests.faults.scene import IN_ORDER, checkpoint_at, files_of_checkpoint, names_in, state_of
from tests.support.rank_pool import RankPool
from tests.support.stores import BeforeStore


def save(where, k, **options):
    return sk.async_save(
        state_of(k), where, step=k, overwrite=True, group=World(0, 1), options=IN_ORDER, **options
    ).exception(PATIENCE_S)


@pytest.mark.parametrize("fault", ["error", "full", "crash"])
def test_every_operation_that_can_fail(place, fault):
    """The handle raises the failure, the old or new checkpoint is whole, and the next save leaves no trace of it."""
    assert save(place, 0) is None
    latest, failed = 0, 0
    for n in itertools.count():
        store = FaultyStore(LocalStore(place), fault, at=n)
        error = save(store, n + 1)
        if len(store.operations) <= n:
            assert error is None
            break
        struck = store.operations[n]
        # After the commit nothing is lost, and an error is only logged.
        latest = n + 1 if error is None or "put commit" in " ".join(store.operations[:n]) else latest
        assert checkpoint_at(place) in {latest, n + 1} if fault == "crash" else checkpoint_at(place) == latest, struck
        if error is not None:
            failed += 1
            assert isinstance(error, InjectedCrash if fault == "crash" else sk.StorageError), struck
            assert not isinstance(error, sk.StorageFull) or fault == "full"
        if fault == "crash" or n % 5 == 0:
            latest = 1000 + n
            assert save(place, latest) is None, struck
            assert checkpoint_at(place) == latest
            assert names_in(place) == files_of_checkpoint(place), struck
    assert failed >= 8


def test_a_failure_that_is_not_ours():
    def divide(verb, name):
        if verb == "create":
            raise ZeroDivisionError(name)

    handle = sk.async_save(state_of(1), BeforeStore(sk.MemoryStore(), divide), group=World(0, 1))
    with pytest.raises(ZeroDivisionError):
        handle.result(PATIENCE_S)


def save_as_rank(place, k, victim, at):
    """Save as a rank of the default group; one of them is killed at an operation on its files."""
    rank, size = dist.get_rank(), dist.get_world_size()
    where = doomed.SelfDestruct(LocalStore(place), at=at) if rank == victim else place
    handle = sk.async_save(doomed.level_state(k, rank, size), where, step=k, overwrite=True, options=doomed.OPTIONS)
    return handle.result(PATIENCE_S).step


@pytest.fixture(scope="module")
def mortal_ranks():
    """Ranks that other tests do not use."""
    with RankPool(3) as pool:
        yield pool


@pytest.mark.parametrize(("victim", "at"), [(0, 5), (2, 2)])
def test_a_rank_killed_in_flight(mortal_ranks, place, victim, at):
    """The others raise RanksSilent in time and name the dead rank; the next save removes what it left."""
    assert mortal_ranks.run(3, save_as_rank, place, 0, -1, 0) == [0, 0, 0]
    outcomes = mortal_ranks.outcomes(3, save_as_rank, place, 1, victim, at)
    assert outcomes[victim].died == "killed by SIGKILL"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, sk.RanksSilent), outcome.trace
            assert outcome.error.ranks == [victim]
    assert doomed.level_at(place) == 0
    assert mortal_ranks.run(3, save_as_rank, place, 2, -1, 0) == [2, 2, 2]
    assert doomed.level_at(place) == 2
    assert set(os.listdir(place)) == files_of_checkpoint(place)
