"""A store that goes wrong at the n-th operation of an overwriting save, for every n."""

import errno
import itertools
import os
import time

import pytest
import torch

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.base import Store
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.faults.scene import (
    RANKS_AND_FAULTS,
    DyingStore,
    InterruptedStore,
    assert_saved,
    bury_claims,
    checkpoint_at,
    files_of_checkpoint,
    names_in,
    no_leaks,
    save_all,
)

COMMIT = f"put {RECORD_NAME}"
DEADLINE_S = 15.0


def only(rank: int, store: FaultyStore) -> list[Store]:
    """Give one of three ranks this store, and the others the sound one below it."""
    return [store if each == rank else store.inner for each in range(3)]


def is_committed(store: FaultyStore, before: int) -> bool:
    """Whether the record was put by the operations before the given one."""
    return COMMIT in store.operations[:before]


@pytest.mark.parametrize(("ranks", "faults"), RANKS_AND_FAULTS)
def test_a_failed_operation_loses_nothing_and_leaves_nothing(place, ranks, faults):
    """
    Until the commit, every rank raises the same storage error, which names file, errno and rank; the earlier
    checkpoint is intact and not one file is added. After the commit, the save succeeds, and what it could not remove
    is removed by the next one.
    """
    save_all(ranks, place, 0)
    latest = 0
    for n in itertools.count():
        before = names_in(place)
        fault = faults[n % len(faults)]
        store = FaultyStore(LocalStore(place), fault, at=n)
        began = time.monotonic()
        with no_leaks():
            outcomes = save_all(ranks, store, n + 1, timeout_s=DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        if len(store.operations) <= n:
            assert_saved(outcomes)
            break
        struck = store.operations[n]
        if is_committed(store, n):
            assert_saved(outcomes, struck)
            assert checkpoint_at(place) == n + 1, struck
            latest = 1000 + n
            assert_saved(save_all(ranks, place, latest), struck)
        else:
            for outcome in outcomes:
                check_storage_error(outcome, fault, struck, ranks)
            assert names_in(place) == before, struck
        assert checkpoint_at(place) == latest, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 15


def check_storage_error(outcome, fault, struck, ranks):
    _, _, name = struck.partition(" ")
    assert type(outcome) is (sk.StorageFull if fault == "full" else sk.StorageError), (struck, outcome)
    assert outcome.errno == (errno.ENOSPC if fault == "full" else errno.EIO)
    assert outcome.details["name"] == name
    assert name in str(outcome)
    if ranks > 1:
        [(rank, failure)] = outcome.by_rank.items()
        assert str(outcome).startswith(f"rank {rank}: ")
        assert failure.details["errno"] == outcome.errno
        # A data file is named after the rank that writes it.
        assert "-of-" not in name or f"-{rank:05d}-of-" in name


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_slow_operation_is_waited_for(place, ranks):
    """Within the deadline, an operation that takes its time changes nothing: the save succeeds and is whole."""
    save_all(ranks, place, 0)
    for n in itertools.count():
        store = FaultyStore(LocalStore(place), "slow", at=n, delay_s=0.05)
        with no_leaks():
            outcomes = save_all(ranks, store, n + 1, timeout_s=DEADLINE_S)
        assert_saved(outcomes)
        assert checkpoint_at(place) == n + 1
        assert names_in(place) == files_of_checkpoint(place)
        if len(store.operations) <= n:
            break
    assert n >= 15


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_crash_loses_nothing_and_the_next_save_sweeps_it(place, ranks):
    """
    When the process dies at any operation, the earlier checkpoint is intact, or the new one if it was committed; no
    file descriptor stays open. Once its claim is that of a dead process, the next save removes whatever it left.
    """
    save_all(ranks, place, 0)
    for n in itertools.count():
        earlier = 2 * n
        store = FaultyStore(LocalStore(place), "crash", at=n)
        outcomes = save_all(ranks, store, earlier + 1, timeout_s=DEADLINE_S)
        if not store.crashed:
            assert_saved(outcomes)
            break
        struck = store.operations[n]
        committed = is_committed(store, n)
        died = [o for o in outcomes if isinstance(o, (InjectedCrash, sk.CheckpointError))]
        # In a real crash nobody is left to raise; the ranks that only wait may have been answered before it.
        assert died or not isinstance(outcomes[0], BaseException), struck
        assert len(died) == ranks or committed, struck
        assert checkpoint_at(place) == earlier + committed, struck
        assert committed or names_in(place) >= files_of_checkpoint(place)

        claims = bury_claims(place)
        assert claims == ("put claim" in " ".join(store.operations[:n]) and not was_released(store, n)), struck
        healthy = save_all(ranks, place, earlier + 2)
        assert_saved(healthy, struck)
        assert checkpoint_at(place) == earlier + 2, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 15


def was_released(store, before):
    return any(done.startswith("delete claim") for done in store.operations[:before])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_crash_of_one_rank_reaches_the_others(place, rank):
    """
    When one rank falls out at any of its operations, the others raise and name it; while rank 0 lives it removes
    what the dead rank left. With rank 0 gone, the next save does.
    """
    save_all(3, place, 0)
    for n in itertools.count():
        earlier = 2 * n
        before = names_in(place)
        dying = FaultyStore(LocalStore(place), "crash", at=n)
        with no_leaks(crashing=True):
            outcomes = save_all(3, only(rank, dying), earlier + 1, timeout_s=DEADLINE_S)
        if not dying.crashed:
            assert_saved(outcomes)
            break
        struck = dying.operations[n]
        if is_committed(dying, n):
            assert checkpoint_at(place) == earlier + 1, struck
        else:
            assert isinstance(outcomes[rank], InjectedCrash), struck
            for other in set(range(3)) - {rank}:
                assert isinstance(outcomes[other], sk.CheckpointError), struck
                assert f"rank {rank}: InjectedCrash" in str(outcomes[other])
                assert outcomes[other].by_rank[rank].kind == "InjectedCrash"
            assert checkpoint_at(place) == earlier, struck
            assert rank == 0 or names_in(place) == before, struck
        bury_claims(place)
        save_all(3, place, earlier + 2)
        assert checkpoint_at(place) == earlier + 2, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 4


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_disk_that_goes_away_loses_nothing(place, ranks):
    """
    When every operation fails from some point on, clean-up included, all ranks still raise the storage error, and the
    earlier checkpoint is intact, or the new one if it was committed. The same process can save there again, and that
    save removes what could not be removed before.
    """
    save_all(ranks, place, 0)
    for n in itertools.count():
        earlier = 2 * n
        store = DyingStore(LocalStore(place), since=n)
        with no_leaks():
            outcomes = save_all(ranks, store, earlier + 1, timeout_s=DEADLINE_S)
        if len(store.operations) <= n:
            assert_saved(outcomes)
            break
        struck = store.operations[n]
        committed = is_committed(store, n)
        for outcome in outcomes:
            assert committed or type(outcome) is sk.StorageError, struck
            assert not committed or not isinstance(outcome, BaseException), struck
        assert checkpoint_at(place) == earlier + committed, struck

        again = save_all(ranks, place, earlier + 2)
        assert_saved(again, struck)
        assert checkpoint_at(place) == earlier + 2, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 15


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_rank_reaches_the_others(place, rank):
    """
    Ctrl-C on one rank, at any of its operations, goes through on that rank, is named by the others, and leaves
    nothing of the save; after the commit the checkpoint stands.
    """
    save_all(3, place, 0)
    latest = 0
    for n in itertools.count():
        before = names_in(place)
        stopped = InterruptedStore(LocalStore(place), when=n)
        with no_leaks():
            outcomes = save_all(3, only(rank, stopped), n + 1, timeout_s=DEADLINE_S)
        if len(stopped.operations) <= n:
            assert_saved(outcomes)
            break
        struck = stopped.operations[n]
        assert isinstance(outcomes[rank], KeyboardInterrupt), struck
        others = [outcomes[other] for other in range(3) if other != rank]
        if is_committed(stopped, n):
            assert_saved(others, struck)
            assert checkpoint_at(place) == n + 1, struck
            latest = 1000 + n
            save_all(3, place, latest)
        else:
            for other in others:
                assert isinstance(other, sk.CheckpointError), struck
                assert f"rank {rank}: KeyboardInterrupt" in str(other), struck
            assert names_in(place) == before, struck
        assert checkpoint_at(place) == latest, struck
        assert names_in(place) == files_of_checkpoint(place), struck
    assert n >= 4


def test_trouble_after_the_commit_is_a_warning(place, caplog):
    """
    A claim or an old file that cannot be removed, or a listing that fails, does not fail a save that has committed:
    it is logged.
    """
    verbs = set()
    for n in itertools.count():
        save_all(1, place, 0)
        caplog.clear()
        store = FaultyStore(LocalStore(place), at=n)
        [report] = save_all(1, store, 1)
        if len(store.operations) <= n:
            break
        if is_committed(store, n):
            verbs.add(store.operations[n].split()[0])
            assert report.step == 1, store.operations[n]
            assert [record.levelname for record in caplog.records if "could not" in record.message] == ["WARNING"]
            assert "Input/output error" in caplog.text
            assert checkpoint_at(place) == 1
    assert verbs == {"delete", "get", "list"}


@pytest.mark.parametrize("verb", ["create", "write_at", "finish"])
def test_a_rank_past_the_deadline_is_named(place, verb):
    """
    When a rank takes longer than the deadline, all ranks raise RanksSilent and name it, in time; the earlier
    checkpoint is intact and the late rank, too, leaves nothing.
    """
    save_all(3, place, 0)
    before = names_in(place)
    slow = FaultyStore(LocalStore(place), "slow", at=0, verbs=[verb], delay_s=2.2)
    with no_leaks():
        outcomes = save_all(3, only(2, slow), 1, timeout_s=1.0)
    for outcome in outcomes:
        assert type(outcome) is sk.RanksSilent
        assert outcome.ranks == [2]
        assert "rank 2: did not answer within 1 s" in str(outcome)
    assert checkpoint_at(place) == 0
    assert names_in(place) == before


def test_rank_0_late_with_the_commit_does_not_tear_it(place):
    """When the other ranks give up on rank 0 while it commits, what is committed in the end is whole."""
    save_all(3, place, 0)
    slow = FaultyStore(LocalStore(place), "slow", at=2, verbs=["put"], delay_s=2.4)
    outcomes = save_all(3, only(0, slow), 1, timeout_s=0.8)
    assert slow.operations[-1 - slow.operations[::-1].index(COMMIT)] == COMMIT
    for outcome in outcomes[1:]:
        assert type(outcome) is sk.RanksSilent
        assert outcome.ranks == [0]
    assert checkpoint_at(place) in (0, 1)
    save_all(3, place, 2)
    assert checkpoint_at(place) == 2
    assert names_in(place) == files_of_checkpoint(place)


def test_a_first_save_that_fails_leaves_an_empty_place(place):
    """
    With no earlier checkpoint, a failed save leaves a place where nothing is, and the next save needs no overwrite.
    """
    for n in itertools.count():
        store = FaultyStore(LocalStore(place), at=n)
        [outcome] = save_all(1, store, n)
        if is_committed(store, n) or len(store.operations) <= n:
            break
        assert isinstance(outcome, sk.StorageError)
        assert not os.path.exists(place) or names_in(place) == set()
        with pytest.raises(sk.CheckpointNotFound):
            sk.open(place)
    assert n >= 10
    assert checkpoint_at(place) == n


class _Sticky(FaultyStore):
    """The commit fails, and then what was written cannot be deleted."""

    def begin(self, verb, name):
        if verb == "put" and name == RECORD_NAME:
            raise self.broken(verb, name)
        if verb == "delete" and name.endswith(".safetensors"):
            raise self.broken(verb, name)
        return super().begin(verb, name)


def test_what_a_failed_save_cannot_remove_is_known_for_dead(place):
    """
    Its claim stays with it, so that the next save sweeps it; without one it would be taken for a checkpoint that lost
    its record, and stay for ever.
    """
    with pytest.raises(sk.StorageError):
        sk.save({"w": torch.ones(4)}, _Sticky(LocalStore(place)))
    left = names_in(place)
    assert {name.partition("-")[0] for name in left} == {"state", "claim"}, left
    sk.save({"w": torch.ones(4)}, place)
    assert not left & set(names_in(place))
    assert names_in(place) == files_of_checkpoint(place)
