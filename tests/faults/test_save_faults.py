"""A store that goes wrong at the n-th operation of an overwriting save, for every n."""

import errno
import itertools
import os
import time
from typing import Any, NamedTuple

import pytest
import torch

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
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
from tests.support.stores import BeforeStore

COMMIT = f"put {RECORD_NAME}"
DEADLINE_S = 15.0


def only(rank, store):
    return [store if each == rank else store.inner for each in range(3)]


def is_committed(store, before):
    return COMMIT in store.operations[:before]


class Strike(NamedTuple):
    """A save over checkpoint `earlier`, as number `earlier + 1`, and the operation at which something happened to it."""

    store: FaultyStore
    at: int
    outcomes: list[Any]
    struck: str
    committed: bool
    earlier: int
    before: set[str]


def strikes(ranks, place, make, *, rank=None, crashing=False, least=15):
    """
    Save with a store that goes wrong at the n-th operation, for every n; on all ranks, or on one of them.

    When the test has looked at what it left, the next save must work, and leave nothing of the one that failed.
    """
    save_all(ranks, place, 0)
    earlier = 0
    for n in itertools.count():
        before = names_in(place)
        store = make(LocalStore(place), n)
        with no_leaks(crashing=crashing):
            wheres = store if rank is None else only(rank, store)
            outcomes = save_all(ranks, wheres, earlier + 1, timeout_s=DEADLINE_S)
        if len(store.operations) <= n:
            assert_saved(outcomes)
            break
        committed = is_committed(store, n)
        yield Strike(store, n, outcomes, store.operations[n], committed, earlier, before)
        if names_in(place) != before:
            earlier += 2
            assert_saved(save_all(ranks, place, earlier), store.operations[n])
        assert checkpoint_at(place) == earlier, store.operations[n]
        assert names_in(place) == files_of_checkpoint(place), store.operations[n]
    assert n >= least


@pytest.mark.parametrize(("ranks", "faults"), RANKS_AND_FAULTS)
def test_a_failed_operation_loses_nothing_and_leaves_nothing(place, ranks, faults):
    """Before the commit every rank raises the error and all is as it was; after it the save succeeds, and the next one cleans up."""
    began = time.monotonic()
    for each in strikes(ranks, place, lambda disk, n: FaultyStore(disk, faults[n % len(faults)], at=n)):
        assert time.monotonic() - began < DEADLINE_S
        if each.committed:
            assert_saved(each.outcomes, each.struck)
            assert checkpoint_at(place) == each.earlier + 1, each.struck
        else:
            for outcome in each.outcomes:
                check_storage_error(outcome, faults[each.at % len(faults)], each.struck, ranks)
            assert names_in(place) == each.before, each.struck
        began = time.monotonic()


def check_storage_error(outcome, fault, struck, ranks):
    _, _, name = struck.partition(" ")
    assert type(outcome) is (sk.StorageFull if fault == "full" else sk.StorageError), (struck, outcome)
    assert outcome.errno == (errno.ENOSPC if fault == "full" else errno.EIO)
    assert outcome.details["name"] == name
    # A place that takes no file is named itself: users do not know of claims, which are written first.
    assert name in str(outcome) or struck.startswith("put claim")
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
    """A process that dies at any operation leaves the old or the committed checkpoint; the next save removes what it left."""
    for each in strikes(ranks, place, lambda disk, n: FaultyStore(disk, "crash", at=n), crashing=True):
        operations, struck = each.store.operations[: each.at], each.struck
        died = [o for o in each.outcomes if isinstance(o, (InjectedCrash, sk.CheckpointError))]
        # In a real crash nobody is left to raise; the ranks that only wait may have been answered before it.
        assert died or not isinstance(each.outcomes[0], BaseException), struck
        assert len(died) == ranks or each.committed, struck
        assert checkpoint_at(place) == each.earlier + each.committed, struck
        assert each.committed or names_in(place) >= files_of_checkpoint(place)
        released = any(done.startswith("delete claim") for done in operations)
        assert bury_claims(place) == ("put claim" in " ".join(operations) and not released), struck


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_crash_of_one_rank_reaches_the_others(place, rank):
    """The others raise and name it; rank 0 removes what the dead rank left, or the next save does."""
    crash = strikes(3, place, lambda disk, n: FaultyStore(disk, "crash", at=n), rank=rank, crashing=True, least=4)
    for each in crash:
        assert checkpoint_at(place) == each.earlier + each.committed, each.struck
        if not each.committed:
            assert isinstance(each.outcomes[rank], InjectedCrash), each.struck
            for other in set(range(3)) - {rank}:
                assert isinstance(each.outcomes[other], sk.CheckpointError), each.struck
                assert f"rank {rank}: InjectedCrash" in str(each.outcomes[other])
                assert each.outcomes[other].by_rank[rank].kind == "InjectedCrash"
            assert rank == 0 or names_in(place) == each.before, each.struck
        bury_claims(place)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_disk_that_goes_away_loses_nothing(place, ranks):
    """Every operation fails from one on, clean-up included: all raise, a checkpoint is whole, and the next save cleans up."""
    for each in strikes(ranks, place, lambda disk, n: DyingStore(disk, since=n)):
        for outcome in each.outcomes:
            assert each.committed or type(outcome) is sk.StorageError, each.struck
            assert not each.committed or not isinstance(outcome, BaseException), each.struck
        assert checkpoint_at(place) == each.earlier + each.committed, each.struck


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_on_one_rank_reaches_the_others(place, rank):
    """Ctrl-C at any operation goes through, is named by the others, and leaves nothing unless it was committed."""
    for each in strikes(3, place, lambda disk, n: InterruptedStore(disk, when=n), rank=rank, least=4):
        assert isinstance(each.outcomes[rank], KeyboardInterrupt), each.struck
        others = [each.outcomes[other] for other in range(3) if other != rank]
        assert checkpoint_at(place) == each.earlier + each.committed, each.struck
        if each.committed:
            assert_saved(others, each.struck)
            continue
        for other in others:
            assert isinstance(other, sk.CheckpointError), each.struck
            assert f"rank {rank}: KeyboardInterrupt" in str(other), each.struck
        assert names_in(place) == each.before, each.struck


def test_trouble_after_the_commit_is_a_warning(place, caplog):
    """A claim or old file that cannot be removed, or a failed listing, is logged and does not fail the save."""
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
    """All ranks raise RanksSilent in time and name it; the old checkpoint is intact; the late rank leaves nothing."""
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
    """With no earlier checkpoint, a failed save leaves an empty place, and the next save needs no overwrite."""
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


def test_what_a_failed_save_cannot_remove_is_known_for_dead(place):
    """Its claim stays with it, so that the next save sweeps it: without a claim it would stay for ever."""

    def refuse(verb, name):
        if (verb, name) == ("put", RECORD_NAME) or (verb == "delete" and name.endswith(".safetensors")):
            raise sk.StorageError(f"{verb} {name}: injected", name=name)

    with pytest.raises(sk.StorageError):
        sk.save({"w": torch.ones(4)}, BeforeStore(LocalStore(place), refuse))
    left = names_in(place)
    assert {name.partition("-")[0] for name in left} == {"state", "claim"}, left
    sk.save({"w": torch.ones(4)}, place)
    assert not left & set(names_in(place))
    assert names_in(place) == files_of_checkpoint(place)
