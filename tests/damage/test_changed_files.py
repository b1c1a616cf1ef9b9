"""Files cut, grown, gone, swapped, emptied, or taken from another save: an error that names the file, or no harm."""

import random

import pytest

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.local import LocalStore
from tests.damage import doors
from tests.damage.subjects import SUBJECTS, one_rank, store_of


@pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__)
def subject(request):
    return request.param()


def lengths(data, seed):
    """All lengths of a short file; of a long one those around its header and blocks, and some others."""
    if len(data) <= 4096:
        return list(range(len(data)))
    edges = {0, 1, 7, 8, 9, len(data) - 1}
    edges |= {begin + d for begin in (4096, 4096 + (64 << 10)) for d in (-1, 0, 1)}
    edges |= set(random.Random(seed).sample(range(len(data)), 3))
    return sorted(n for n in edges if 0 <= n < len(data))


@pytest.mark.parametrize("which", ["record", "index"])
def test_every_truncation_of_record_and_index(subject, which):
    name = RECORD_NAME if which == "record" else subject.index_name
    data = subject.blobs[name]
    for length in lengths(data, 0):
        doors.assert_refused(subject.with_blob(name, data[:length]), subject, f"cut to {length}", naming=name)


def test_truncations_of_data_files(subject):
    for number, entry in enumerate(subject.record.files):
        data = subject.blobs[entry.name]
        for length in lengths(data, number):
            store = subject.with_blob(entry.name, data[:length])
            answers = doors.assert_refused(store, subject, f"cut to {length}", naming=entry.name)
            assert isinstance(answers.to_dict, sk.WrongSize)
            assert str(length) in str(answers.to_dict)
            assert str(entry.nbytes) in str(answers.to_dict)


@pytest.mark.parametrize("tail", [b"\0", b"\n", b" ", b"}", b"\xff" * 4096])
def test_bytes_appended(subject, tail):
    for name, data in subject.blobs.items():
        doors.assert_refused(subject.with_blob(name, data + tail), subject, f"{tail[:4]!r} appended", naming=name)


def test_files_missing(subject):
    for name in subject.blobs:
        if name == RECORD_NAME:
            answers = doors.try_all(subject.with_blob(name, None), subject, f"{name} missing")
            assert all(isinstance(error, sk.CheckpointNotFound) for error in answers.all)
            assert "did not finish" in str(answers.load)
        else:
            answers = doors.assert_refused(subject.with_blob(name, None), subject, "missing", naming=name)
            assert isinstance(answers.to_dict, sk.WrongSize)
            assert "missing" in str(answers.to_dict)


def test_nothing_there():
    answers = doors.try_all(store_of({}), one_rank(), "empty")
    assert all(isinstance(error, sk.CheckpointNotFound) for error in answers.all)


def test_files_swapped(subject):
    names = sorted(subject.blobs)
    for at, first in enumerate(names):
        for second in names[at + 1 :]:
            swapped = {**subject.blobs, first: subject.blobs[second], second: subject.blobs[first]}
            what = f"{first} and {second} swapped"
            answers = doors.try_all(store_of(swapped), subject, what)
            harmless = doors.is_of_other_ranks(first) and doors.is_of_other_ranks(second)
            for error in answers.all[harmless:]:
                assert error is not None, what
                assert first in str(error) or second in str(error), what


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b" ", b"{"])
def test_files_overwritten_with_one_byte(subject, fill):
    """A file of the right size that holds nothing but zeros, as after a crash of a file system, is refused."""
    for name, data in subject.blobs.items():
        doors.assert_refused(subject.with_blob(name, fill * len(data)), subject, f"full of {fill!r}", naming=name)


def test_zeros_at_the_end():
    """A file whose last pages never reached the disk and read as zeros is refused."""
    subject = one_rank()
    for name, data in subject.blobs.items():
        for kept in {len(data) * part // 4 for part in range(4)}:
            if data[kept:].strip(b"\0"):
                store = subject.with_blob(name, data[:kept] + bytes(len(data) - kept))
                doors.assert_refused(store, subject, f"zero from {kept}", naming=name)


def test_stale_shards():
    """A data file of another save of the same shapes, in the place of ours, has the right size and is refused."""
    subject, other = one_rank(), one_rank(1)
    for ours, theirs in zip(subject.record.files, other.record.files, strict=True):
        assert ours.nbytes == theirs.nbytes
        store = subject.with_blob(ours.name, other.blobs[theirs.name])
        answers = doors.assert_refused(store, subject, "from another save", naming=ours.name)
        assert isinstance(answers.load, sk.ChecksumMismatch)


def test_stale_blocks():
    """The right header on the data of another save, all of it or one block, is refused at the first wrong byte."""
    subject, other = one_rank(), one_rank(1)
    for ours, theirs in zip(subject.record.files, other.record.files, strict=True):
        header = ours.header_nbytes
        mine, stale = subject.blobs[ours.name], other.blobs[theirs.name]
        for start in range(header, ours.nbytes, ours.block_nbytes):
            stop = start + ours.block_nbytes
            patched = mine[:start] + stale[start:stop] + mine[stop:]
            if patched == mine:
                continue
            store = subject.with_blob(ours.name, patched)
            answers = doors.assert_refused(store, subject, f"another block at {start}", naming=ours.name)
            assert answers.load.details["offset"] == start


def test_record_and_index_of_another_save():
    """A record or index of another save beside our files is refused: each names files that carry their save's id."""
    subject, other = one_rank(), one_rank(1)
    record = subject.with_blob(RECORD_NAME, other.blobs[RECORD_NAME])
    doors.assert_refused(record, subject, "foreign record", naming=other.index_name)
    index = subject.with_blob(subject.index_name, other.blobs[other.index_name])
    doors.assert_refused(index, subject, "foreign index", naming=subject.index_name)
    both = {**subject.blobs, RECORD_NAME: other.blobs[RECORD_NAME], other.index_name: other.blobs[other.index_name]}
    answers = doors.try_all(store_of(both), subject, "foreign record and index")
    for error in answers.all:
        assert isinstance(error, sk.DamagedCheckpoint)
        assert any(file.name in str(error) for file in other.record.files)


def test_files_nobody_names_are_harmless(subject):
    extra = {"notes.txt": b"x", "index-0123456789abcdef0123.skindex": b"", "claim-0123456789abcdef0123.json": b"{"}
    answers = doors.try_all(store_of({**subject.blobs, **extra}), subject, "leftovers")
    assert answers.all == [None, None, None]


@pytest.mark.parametrize("direct", [True, False])
def test_on_disk(tmp_path, direct):
    """The same with real files: cut, grown, gone, stale, and a directory, a pipe or a link where a file should be."""
    subject, other = one_rank(), one_rank(1)
    for name, data in subject.blobs.items():
        (tmp_path / name).write_bytes(data)
    store = LocalStore(tmp_path, direct=direct)
    stale = dict(zip(sorted(subject.blobs), [other.blobs[name] for name in sorted(other.blobs)], strict=True))
    for name, data in subject.blobs.items():
        path = tmp_path / name
        for changed in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", bytes(len(data)), stale[name]):
            path.write_bytes(changed)
            expected = other.index_name if changed == other.blobs[RECORD_NAME] else name
            doors.assert_refused(store, subject, f"{name} with {len(changed)} other bytes", naming=expected)
        path.unlink()
        answers = doors.try_all(store, subject, f"{name} gone")
        assert None not in answers.all
        path.mkdir()
        doors.assert_refused(store, subject, f"{name} a directory", naming=name)
        path.rmdir()
        path.write_bytes(data)
    assert doors.try_all(store, subject, "restored").all == [None, None, None]
