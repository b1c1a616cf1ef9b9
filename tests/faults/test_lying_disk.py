"""A disk that says all is well and keeps something else, at the n-th operation of a save, for every n."""

import itertools

import pytest

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.local import LocalStore
from shardkeep.testing.faulty_store import FaultyStore
from tests.faults.scene import (
    OPTIONS,
    assert_saved,
    bury_claims,
    checkpoint_at,
    files_of_checkpoint,
    load_all,
    names_in,
    no_leaks,
    save_all,
)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_what_was_not_kept_is_noticed(place, fault, ranks):
    """A flipped or half-dropped write is found by verify and load on every rank, or was harmless."""
    writes = {("write_at", "model"), ("write_at", "optim"), ("put", "index"), ("put", RECORD_NAME)}
    noticed = set()
    for n in itertools.count():
        # Whatever is damaged there, it can be replaced.
        assert_saved(save_all(ranks, place, 0))
        store = FaultyStore(LocalStore(place), fault, at=n)
        with no_leaks():
            outcomes = save_all(ranks, store, 1)
        if len(store.operations) <= n:
            break
        verb, _, name = store.operations[n].partition(" ")
        kind = (verb, name if name == RECORD_NAME else name.split("-")[0])
        # Nothing is read back before the commit, so the save cannot know.
        assert_saved(outcomes, store.operations[n])
        if kind in writes:
            noticed.add(kind)
            check_every_way_in(place, ranks)
        else:
            assert checkpoint_at(place) == 1, store.operations[n]
        bury_claims(place)
    # Three ranks take turns as they like, so that a place in their order is not the same write every time.
    assert noticed == writes or ranks == 3
    save_all(ranks, place, 2)
    assert checkpoint_at(place) == 2
    assert names_in(place) == files_of_checkpoint(place)


def check_every_way_in(place, ranks):
    with pytest.raises(sk.DamagedCheckpoint):
        sk.open(place, options=OPTIONS).verify()
    outcomes, _ = load_all(ranks, place)
    for outcome in outcomes:
        assert isinstance(outcome, sk.DamagedCheckpoint)


def test_a_lie_about_the_record_keeps_the_files_it_replaced(place):
    """A save reads its record back before it removes the files of the earlier checkpoint."""
    save_all(1, place, 0)
    earlier = names_in(place)
    store = FaultyStore(LocalStore(place), "flip", at=2, verbs=["put"])
    save_all(1, store, 1)
    with pytest.raises(sk.MalformedFile, match="commit record is damaged"):
        sk.open(place)
    assert names_in(place) >= earlier
