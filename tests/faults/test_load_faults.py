"""A store that goes wrong at the n-th operation of a load, for every n."""

import errno
import itertools
import time

import pytest

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.engine.samples import bits
from tests.faults.scene import (
    OPTIONS,
    RANKS_AND_FAULTS,
    InterruptedStore,
    checkpoint_at,
    facts,
    load_all,
    names_in,
    no_leaks,
    save_all,
    state_of,
)

DEADLINE_S = 15.0
READS = ("get", "read_into")


def assert_loaded(outcomes, states, k):
    assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
    size = len(states)
    for rank, state in enumerate(states):
        assert facts(state) == facts(state_of(k, World(rank, size, object())))


def strikes(ranks, place, make, *, rank=None, least=None):
    """Load by a store that goes wrong at the n-th operation, for every n, on all ranks or on one; yield what came of it."""
    for n in itertools.count():
        store, began = make(LocalStore(place), n), time.monotonic()
        wheres = store if rank is None else [store if each == rank else LocalStore(place) for each in range(ranks)]
        with no_leaks():
            outcomes, states = load_all(ranks, wheres, timeout_s=DEADLINE_S)
        assert time.monotonic() - began < DEADLINE_S
        if len(store.operations) <= n:
            assert_loaded(outcomes, states, 1)
            break
        yield store.operations[n], outcomes, states
    assert n >= (least or (10 if ranks == 1 else 20))


def assert_healed(caplog, name):
    [said] = [record.getMessage() for record in caplog.records if "were damaged when first read" in record.getMessage()]
    assert name in said


@pytest.mark.parametrize(("ranks", "faults"), RANKS_AND_FAULTS)
def test_a_failed_operation_reaches_every_rank(place, ranks, faults):
    """Every rank raises the same storage error with file and errno; nothing stays open, and the next load is whole."""
    save_all(ranks, place, 1)
    before = names_in(place)
    turns = itertools.cycle(faults)
    for operation, outcomes, _ in strikes(
        ranks, place, lambda inner, n: FaultyStore(inner, faults[n % len(faults)], at=n)
    ):
        fault, name = next(turns), operation.partition(" ")[2]
        for outcome in outcomes:
            assert type(outcome) is (sk.StorageFull if fault == "full" else sk.StorageError), operation
            assert outcome.errno == (errno.ENOSPC if fault == "full" else errno.EIO)
            assert outcome.details["name"] == name
            assert name in str(outcome)
            assert ranks == 1 or list(outcome.by_rank) == list(outcomes[0].by_rank)
    assert names_in(place) == before


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "each time"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_flipped_bit_is_never_loaded(place, caplog, ranks, lasting):
    """A bit that flips once is read again, with a warning that names the file; one that flips each time is an error of every rank."""
    save_all(ranks, place, 1)

    def flipping(inner, n):
        caplog.clear()
        return FaultyStore(inner, "flip", at=n, lasting=lasting)

    for operation, outcomes, states in strikes(ranks, place, flipping):
        verb, _, name = operation.partition(" ")
        if verb == "open":  # no data moves
            assert_loaded(outcomes, states, 1)
        elif not lasting:
            assert_loaded(outcomes, states, 1)
            assert_healed(caplog, name)
        else:
            for outcome in outcomes:
                kind = sk.ChecksumMismatch if verb == "read_into" else sk.DamagedCheckpoint
                assert isinstance(outcome, kind), operation
                assert name in str(outcome)
    assert checkpoint_at(place) == 1


def test_every_flipped_read_is_caught_by_open(place, caplog):
    """`verify` and `to_dict` read again what flips once, with a warning; what flips each time is an error."""
    save_all(3, place, 1)

    def verify(store):
        return bool(sk.open(store, options=OPTIONS).verify())

    def read(store):
        return bits(sk.open(store, options=OPTIONS).to_dict())

    for look in (verify, read):
        right = look(LocalStore(place))
        for n in itertools.count():
            once, each_time = (
                FaultyStore(LocalStore(place), "flip", at=n, verbs=READS, lasting=lasting) for lasting in (False, True)
            )
            caplog.clear()
            with no_leaks():
                assert look(once) == right
            reads = [done for done in once.operations if done.startswith(READS)]
            if len(reads) <= n:
                break
            assert_healed(caplog, reads[n].partition(" ")[2])
            with no_leaks(), pytest.raises(sk.DamagedCheckpoint):
                look(each_time)
        assert n >= 10


@pytest.mark.parametrize(("fault", "kind"), [("error", sk.CheckpointError), ("crash", InjectedCrash)])
def test_open_and_verify_end_cleanly(place, fault, kind):
    """When a store fails under `open`, `verify` or a slice, the error is ours and nothing stays open."""
    save_all(3, place, 1)

    def look(store):
        ck = sk.open(store, options=OPTIONS)
        ck.verify()
        return ck["model.w"][3:5], ck.to_dict()

    for n in itertools.count():
        store = FaultyStore(LocalStore(place), fault, at=n)
        with no_leaks():
            try:
                look(store)
            except kind:
                continue
        assert len(store.operations) == n
        break
    assert n >= 20


@pytest.mark.parametrize("fault", ["crash", "interrupt"])
def test_one_rank_falls_out_of_a_load(place, fault):
    """A rank that dies or is interrupted at any of its operations is named by the others; nothing stays open."""
    save_all(3, place, 1)

    def breaking(inner, n):
        return FaultyStore(inner, "crash", at=n) if fault == "crash" else InterruptedStore(inner, when=n)

    kind = InjectedCrash if fault == "crash" else KeyboardInterrupt
    for operation, outcomes, _ in strikes(3, place, breaking, rank=1, least=5):
        assert isinstance(outcomes[1], kind), operation
        for other in (outcomes[0], outcomes[2]):
            assert isinstance(other, sk.CheckpointError), operation
            assert f"rank 1: {kind.__name__}" in str(other)


def test_slow_reads_are_waited_for_and_late_ones_named(place):
    """Within the deadline a slow read changes nothing; beyond it all ranks raise RanksSilent and name the rank."""
    save_all(3, place, 1)
    inner = LocalStore(place)
    slow = FaultyStore(inner, "slow", at=1, verbs=["read_into"], delay_s=0.3)
    outcomes, states = load_all(3, slow, timeout_s=DEADLINE_S)
    assert_loaded(outcomes, states, 1)
    late = FaultyStore(inner, "slow", at=1, verbs=["read_into"], delay_s=2.2)
    with no_leaks():
        outcomes, _ = load_all(3, [inner, inner, late], timeout_s=1.0)
    for outcome in outcomes:
        assert type(outcome) is sk.RanksSilent
        assert outcome.ranks == [2]
