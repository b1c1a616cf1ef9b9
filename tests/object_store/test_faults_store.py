"""Every operation of a save on S3 fails once, or is the last: the engine's fault tests, over a real object store."""

import itertools

import pytest
import torch

import shardkeep as sk
from shardkeep.dist.world import World
from shardkeep.format.record import RECORD_NAME
from shardkeep.testing.faulty_store import FaultyStore, InjectedCrash
from tests.faults.scene import no_leaks

COMMIT = f"put {RECORD_NAME}"
IN_ORDER = sk.Options(io_threads=1, host_budget_bytes=16 << 20)
PARTS = 3 << 20
"""Elements, of more than one part of an upload."""


@pytest.fixture
def place(s3_place):
    return s3_place(part_bytes=5 << 20)


def save(where, k, elements):
    state = {"w": torch.full((elements,), k, dtype=torch.int16), "b": torch.full((9,), k), "k": k}
    return sk.save(state, where, step=k, overwrite=True, group=World(0, 1), options=IN_ORDER)


def saved_at(place):
    """Read all that is there; say which `k` every element of it is."""
    tree = sk.open(place).to_dict()
    assert tree["w"].numel() > 99
    assert tree["w"].eq(tree["k"]).all()
    assert tree["b"].eq(tree["k"]).all()
    return tree["k"]


def litter(place):
    """Name what is there and belongs to no checkpoint."""
    return {info.name for info in place.list()} - {RECORD_NAME, *sk.open(place).record.names}


def struck(place, fault, elements, step=1):
    """Save, with a fault at operation 0, 1, 2, … or every so many, until there is none of that number."""
    for n in itertools.count(0, step):
        store = FaultyStore(place, fault, at=n)
        raised = None
        try:
            with no_leaks(crashing=fault == "crash"):
                save(store, n + 1, elements)
        except (sk.CheckpointError, InjectedCrash) as exc:
            raised = exc
        if len(store.operations) <= n:
            assert raised is None
            assert n >= 15
            return
        yield n, store, raised


def test_a_failed_operation_loses_nothing_and_leaves_nothing(place):
    """Until the commit the save raises the store's error and nothing is added; after it, it succeeds."""
    save(place, 0, PARTS)
    latest = 0
    for n, store, raised in struck(place, "error", PARTS):
        what = store.operations[n]
        if COMMIT in store.operations[:n]:
            assert raised is None, what
            latest = n + 1
            save(place, latest, 100)  # takes away what could not be removed
        else:
            assert isinstance(raised, sk.StorageError), what
            assert raised.details["name"] == what.partition(" ")[2]
        assert saved_at(place) == latest, what
        assert litter(place) == set(), what


def test_a_crash_loses_nothing_and_is_swept(place):
    """Wherever the process dies, there is the old checkpoint or the new one; the next save removes the rest."""
    save(place, 0, 100)
    latest = 0
    for n, store, raised in struck(place, "crash", 100, step=3):
        what = store.operations[n]
        latest = n + 1 if COMMIT in store.operations[:n] else latest
        assert raised is None or isinstance(raised, InjectedCrash), what
        assert saved_at(place) == latest, what
        # Its process is this one, which lives; its save is over all the same, and that is known.
        latest = 1000 + n
        save(place, latest, 100)
        assert saved_at(place) == latest, what
        assert litter(place) == set(), what


@pytest.mark.parametrize("way", ["fails", "flips once", "flips each time"])
def test_a_load_that_fails_or_is_lied_to(place, caplog, way):
    """Each operation of a load fails or flips a bit: an error, never other numbers; a single flip is read again."""
    save(place, 3, PARTS)
    verbs = ("open", "get", "read_into") if way == "fails" else ("get", "read_into")
    kind = sk.StorageError if way == "fails" else sk.DamagedCheckpoint
    for n in itertools.count():
        fault = "error" if way == "fails" else "flip"
        store = FaultyStore(place, fault, at=n, verbs=verbs, lasting=way == "flips each time")
        into = {"w": torch.zeros(PARTS, dtype=torch.int16), "b": torch.zeros(9, dtype=torch.int64), "k": 0}
        caplog.clear()
        raised = None
        try:
            sk.load(into, store, group=World(0, 1), options=IN_ORDER)
        except kind as exc:
            raised = exc
        asked = [done for done in store.operations if done.startswith(verbs)]
        strikes = len(asked) > n
        assert (raised is not None) == (strikes and way != "flips once"), asked
        if raised is None:
            assert into["w"].eq(3).all()
            assert into["b"].eq(3).all()
            assert into["k"] == 3
        healed = [each.getMessage() for each in caplog.records if "were damaged when first read" in each.getMessage()]
        if strikes and way == "flips once":
            assert len(healed) == 1
            assert asked[n].partition(" ")[2] in healed[0]
        if not strikes:
            break
    assert n >= 4
