"""One flipped bit, anywhere: an error that says where, from every door; never another tensor, value or exception."""

import random

import pytest

import shardkeep as sk
from shardkeep.engine.reader import open_checked
from shardkeep.format.data_file import MIN_BLOCK_NBYTES
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.local import LocalStore
from tests.damage import doors
from tests.damage.subjects import QUICK, SUBJECTS, blank_for, flipped, one_rank, store_of


@pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__)
def subject(request):
    return request.param()


def test_undamaged_checkpoints_pass_every_door(subject):
    """The yardstick: without damage, all doors give exactly what was saved, also from several files and blocks."""
    answers = doors.try_all(store_of(subject.blobs), subject, "undamaged")
    assert answers.all == [None, None, None]
    assert len(subject.record.files) >= 3
    if subject.name == "one rank":
        assert max(file.nbytes - file.header_nbytes for file in subject.record.files) > MIN_BLOCK_NBYTES


@pytest.mark.parametrize("which", ["record", "index"])
def test_every_byte_of_record_and_index(subject, which):
    """
    A flip in any byte of the commit record or the index is refused by load, to_dict and verify, naming the file.

    All three open both files in one and the same way: every door is tried on every fourth byte, and one in turn on each
    of the others.
    """
    name = RECORD_NAME if which == "record" else subject.index_name
    data = subject.blobs[name]
    for at in range(len(data)):
        what = f"bit {at % 8} of byte {at} of {name}"
        store = subject.with_blob(name, flipped(data, at, at % 8))
        if at % 4 == 0:
            doors.assert_refused(store, subject, what, naming=name)
        else:
            error = (doors.load, doors.to_dict, doors.verify)[at % 3](store, subject)
            assert error is not None, what
            assert name in str(error), what


def test_every_bit_of_a_record():
    subject = one_rank()
    data = subject.blobs[RECORD_NAME]
    for at in range(len(data)):
        for bit in range(8):
            error = doors.verify(subject.with_blob(RECORD_NAME, flipped(data, at, bit)), subject)
            assert error is not None, (at, bit)


def test_every_byte_of_every_header_at_the_gate(subject):
    """No data file is read before its header is whole: a flip in any byte of it is refused where files are opened."""
    for entry in subject.record.files:
        data = subject.blobs[entry.name]
        for at in range(entry.header_nbytes):
            store = store_of({entry.name: flipped(data, at, at % 8)})
            with pytest.raises(sk.ChecksumMismatch) as caught:
                open_checked(store, entry)
            assert caught.value.details["file"] == entry.name


def test_every_meaningful_byte_of_every_header(subject):
    """A flip in the text of a header, and in a sample of its padding, is refused by every door, naming the file."""
    pick = random.Random(0)
    stride = 1 if subject.name == "one rank" else 16  # the gate, above, sees them all
    for entry in subject.record.files:
        data = subject.blobs[entry.name]
        text = len(data[: entry.header_nbytes].rstrip(b" "))
        padding = range(text, entry.header_nbytes)
        # Every door for some, then one door for each: together they see every byte.
        for at in [0, 8, text - 1, *pick.sample(range(text), 2), *pick.sample(padding, 2), entry.header_nbytes - 1]:
            store = subject.with_blob(entry.name, flipped(data, at, at % 8))
            answers = doors.assert_refused(store, subject, f"byte {at} of the header", naming=entry.name)
            assert answers.to_dict.details["file"] == entry.name
        for at in range(0, text, stride):
            door = (doors.load, doors.to_dict, doors.verify)[at // stride % 3]
            if doors.is_of_other_ranks(entry.name):
                door = doors.verify
            error = door(subject.with_blob(entry.name, flipped(data, at, at % 8)), subject)
            assert error is not None, (entry.name, at)
            assert entry.name in str(error), (entry.name, at)


def data_bytes(entry, seed):
    blocks = range(entry.header_nbytes, entry.nbytes, entry.block_nbytes)
    ends = [min(block + entry.block_nbytes, entry.nbytes) - 1 for block in blocks]
    anywhere = range(entry.header_nbytes, entry.nbytes)
    return sorted({*blocks, *ends, *random.Random(seed).sample(anywhere, min(8, len(anywhere)))})


def keys_of(index, file, low, high):
    found = set()
    for row, key in enumerate(index.keys.all()):
        rows = index.chunk_rows(row)
        if int(index.tensors.alias[row]) != row:
            continue
        for chunk in range(rows.start, rows.stop):
            start = int(index.chunks.start[chunk])
            nbytes = int(index.chunks.boxes.volumes()[chunk]) * index.dtype(row).itemsize
            if int(index.chunks.file[chunk]) == file and start < high and start + nbytes > low:
                found.add(key.decode())
    return found


def test_data_bytes(subject):
    """A flip in data is refused by every door; the error has file and offset of the block and names what lies in it."""
    index = sk.open(store_of(subject.blobs)).index
    for number, entry in enumerate(subject.record.files):
        data = subject.blobs[entry.name]
        for at in data_bytes(entry, number):
            store = subject.with_blob(entry.name, flipped(data, at, at % 8))
            answers = doors.assert_refused(store, subject, f"byte {at}", naming=entry.name)
            for error in filter(None, (answers.load, answers.to_dict)):
                assert isinstance(error, sk.ChecksumMismatch)
                offset = error.details["offset"]
                assert error.details["file"] == entry.name
                assert offset <= at < offset + entry.block_nbytes
                assert str(offset) in str(error)
                low = offset - entry.header_nbytes
                keys = keys_of(index, number, low, low + entry.block_nbytes)
                assert keys
                assert all(repr(key) in error.details["key"] for key in sorted(keys)[:4])
            [problem] = answers.verify.details["problems"]
            assert entry.name in problem
            assert any(repr(key) in problem for key in keys)


def test_verify_lists_every_damaged_file(subject):
    blobs = dict(subject.blobs)
    for entry in subject.record.files:
        blobs[entry.name] = flipped(blobs[entry.name], entry.nbytes - 1, 3)
    error = doors.verify(store_of(blobs), subject)
    assert len(error.details["problems"]) == len(subject.record.files)
    assert all(entry.name in str(error) for entry in subject.record.files)


def test_what_is_not_damaged_still_loads():
    """With one file damaged, the tensors of the others load when the damaged ones are excluded, as the hint says."""
    subject = one_rank()
    entry = next(file for file in subject.record.files if file.name.startswith("optim"))
    store = subject.with_blob(entry.name, flipped(subject.blobs[entry.name], entry.nbytes - 1, 0))
    state = blank_for(subject)
    sk.load(state, store, exclude="optim", options=QUICK)
    whole = blank_for(subject)
    sk.load(whole, store_of(subject.blobs), options=QUICK)
    assert doors.bits(state["model"]) == doors.bits(whole["model"])
    assert doors.bits(state["optim"]) == doors.bits(blank_for(subject)["optim"])


@pytest.mark.parametrize("direct", [True, False])
def test_flips_on_disk(tmp_path, direct):
    """The same with real files, through direct and buffered reads: a sample of every kind of byte."""
    subject = one_rank()
    for name, data in subject.blobs.items():
        (tmp_path / name).write_bytes(data)
    store = LocalStore(tmp_path, direct=direct)
    assert doors.try_all(store, subject, "undamaged").all == [None, None, None]
    pick = random.Random(direct)
    for name, data in subject.blobs.items():
        for at in [0, len(data) - 1, *pick.sample(range(len(data)), 6)]:
            (tmp_path / name).write_bytes(flipped(data, at, at % 8))
            doors.assert_refused(store, subject, f"byte {at} on disk", naming=name)
        (tmp_path / name).write_bytes(data)
