"""Values that break the rules, and pickles that would run: an error of ours that names the key, and nothing happens."""

import pickle
from contextlib import suppress

import pytest

import shardkeep as sk
from tests.damage import doors
from tests.damage.bounds import bounded
from tests.damage.forge import take_apart
from tests.damage.subjects import QUICK, blank_for, one_rank, store_of
from tests.engine.samples import Trap, bits
from tests.format.test_values import ext, raw_ext

pytestmark = pytest.mark.timeout(60)


def is_untouched(state):
    """Say whether nothing was loaded into a poisoned state; what is on meta still is."""
    blank = blank_for(one_rank())
    for each in (state, blank):
        assert each["model"].pop("weight").is_meta
    return bits(state) == bits(blank)


# A few of what `tests/format/test_values_hostile.py` refuses, in a checkpoint.
VALUES = {
    "nothing": b"",
    "a string that declares 4 GB": b"\xdb\xff\xff\xff\xffa",
    "a string that is no text": b"\xa2\xff\xfe",
    "a million arrays in each other": b"\x91" * 1_000_000 + b"\x01",
    "a dtype that is a function of torch": ext(24, "load"),
    "a zone outside of the zone files": ext(18, "../../etc/passwd"),
    "an array of objects": ext(32, "|O", [1], False, bytes(8)),
    "an array larger than its bytes": ext(32, "<f8", [2**40], False, bytes(8)),
}


@pytest.mark.parametrize("data", VALUES.values(), ids=VALUES)
def test_a_malformed_value_is_refused(subject, forgery, data):
    """A value that breaks the rules is refused by its key, by `load` before a tensor is touched, and by `open`."""
    forgery.set_value("name", data)
    store = store_of(forgery.blobs())
    state = blank_for(subject)
    with pytest.raises(sk.DamagedCheckpoint, match="'name'"):
        sk.load(state, store, options=QUICK)
    loaded, read, _ = bounded(lambda: [door(store, subject) for door in (doors.load, doors.to_dict, doors.verify)])
    assert is_untouched(state)
    assert isinstance(loaded, sk.MalformedFile)
    assert isinstance(read, sk.MalformedFile)
    with pytest.raises(sk.MalformedFile, match="'name'"):
        sk.open(store)["name"]
    assert sk.open(store)["step"] == 12


def _pickles(path):
    bomb = raw_ext(127, pickle.dumps(Trap(path)))
    return {
        "bare": bomb,
        "in a list": b"\x92\x01" + bomb,
        "in a tuple": raw_ext(4, b"\x91" + bomb),
        "as a key": raw_ext(7, b"\x92" + bomb + b"\x01"),
        "in a set": raw_ext(5, b"\x91" + bomb),
        "as a part of a number": raw_ext(9, b"\x92" + bomb + bomb),
        "as a dtype": raw_ext(31, b"\x91" + bomb),
    }


@pytest.mark.parametrize("where", _pickles(""))
def test_a_pickle_does_not_run(subject, forgery, tmp_path, where):
    """A pickle that would make a directory makes none, wherever it sits, unless `allow_pickle` is given."""
    path = tmp_path / "boom"
    forgery.set_value("name", _pickles(str(path))[where])
    store = store_of(forgery.blobs())
    state = blank_for(subject)

    with pytest.raises(sk.PickleRefused, match="'name'") as caught:
        sk.load(state, store, options=QUICK)
    with pytest.raises(sk.PickleRefused):
        sk.open(store).to_dict()
    with pytest.raises(sk.PickleRefused):
        sk.open(store)["name"]
    sk.open(store).verify()

    assert "allow_pickle=True" in str(caught.value)
    assert is_untouched(state)
    assert not path.exists()
    with suppress(sk.MalformedFile, sk.StateMismatch):  # what os.mkdir returns is no number, no dtype and no name
        sk.load(blank_for(subject), store, allow_pickle=True, options=QUICK)
    assert path.exists()


def test_a_pickle_in_the_tree_does_not_run(subject, tmp_path):
    path = tmp_path / "boom"
    for data in _pickles(str(path)).values():
        forgery = take_apart(subject)
        forgery.set_tree(data)
        store = store_of(forgery.blobs())
        for door in (doors.load, doors.to_dict, doors.verify, doors.look):
            door(store, subject, doors.FORGED)
        assert doors.to_dict(store, subject, doors.FORGED) is not None
        with pytest.raises(sk.CheckpointError):
            sk.open(store).to_dict(allow_pickle=True)
    assert not path.exists()
