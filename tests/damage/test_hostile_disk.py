"""On a real disk: names and links that lead outside, files that are no files, and sizes nobody has memory for."""

import os
import shutil
import socket
import threading

import pytest

import shardkeep as sk
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage.local import LocalStore
from tests.damage import doors
from tests.damage.bounds import bounded, watched
from tests.damage.forge import json_text, seal_record
from tests.damage.subjects import one_rank

pytestmark = pytest.mark.timeout(60)
SPARSE = 10 << 30


@pytest.fixture
def place(tmp_path):
    """A checkpoint on disk, and a directory beside it with the same files."""
    for folder in ("ck", "outside"):
        (tmp_path / folder).mkdir()
        for name, data in one_rank().blobs.items():
            (tmp_path / folder / name).write_bytes(data)
    return tmp_path


def outside(paths, place):
    """Of the paths that were touched, those in the temporary directory but not in the checkpoint."""
    inside = str(place / "ck")
    touched = [os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path) for path in paths]
    return [path for path in touched if path.startswith(str(place)) and not path.startswith(inside)]


def all_names():
    return sorted(one_rank().blobs)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("number", range(5))
def test_links_are_not_followed(place, number, direct):
    """A symbolic link in the place of any file is refused, even to a sound copy, and its target is not opened."""
    name = all_names()[number]
    (place / "ck" / name).unlink()
    (place / "ck" / name).symlink_to(place / "outside" / name)
    store = LocalStore(place / "ck", direct=direct)
    with watched() as paths:
        answers = doors.try_all(store, one_rank(), f"{name} a link")
    for error in answers.all:
        assert isinstance(error, sk.DamagedCheckpoint)
        assert name in str(error)
        assert "symbolic link" in str(error)
    assert paths
    assert outside(paths, place) == []


def test_the_watch_sees_a_file_outside(place):
    """The yardstick: reading beside the checkpoint is noticed."""
    with watched() as paths:
        (place / "outside" / RECORD_NAME).read_bytes()
        os.close(os.open(place / "outside" / RECORD_NAME, os.O_RDONLY))
    assert len(outside(paths, place)) == 2


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "/proc/self/mem", "nowhere", "."])
def test_links_to_odd_things(place, target):
    for name in all_names():
        shutil.copy(place / "outside" / name, place / "ck" / name)
        (place / "ck" / name).unlink()
        (place / "ck" / name).symlink_to(target)
        doors.assert_refused(LocalStore(place / "ck"), one_rank(), f"{name} a link to {target}", naming=name)
        (place / "ck" / name).unlink()
        shutil.copy(place / "outside" / name, place / "ck" / name)


def test_things_that_are_no_files(place, monkeypatch):
    """A pipe, a socket or a directory in the place of any file is refused at once, and never waited for."""
    monkeypatch.chdir(place / "ck")  # the name of a socket is short
    for name in all_names():
        path = place / "ck" / name
        for make in (os.mkfifo, os.mkdir, _make_socket):
            path.unlink()
            make(name)
            doors.assert_refused(
                LocalStore(place / "ck"), one_rank(), f"{name} by {make.__name__}", may=ODD, naming=name
            )
            (path.rmdir if path.is_dir() else path.unlink)()
            shutil.copy(place / "outside" / name, path)


ODD = (*doors.DAMAGE, sk.StorageError)
"""A socket cannot even be opened: that is the store's failure, with its errno."""


def _make_socket(name):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name[-20:])
    os.rename(name[-20:], name)


NAMES = ["../outside/{}", "./{}", "sub/../{}", "{}/", "../../{}", "{}/../../outside/{}"]


@pytest.mark.parametrize("which", ["index", "file", "absolute"])
def test_names_that_lead_outside(place, forgery, which):
    forgery.keep_index(one_rank())
    entry = forgery.record["index"] if which == "index" else forgery.record["files"][0]
    real = entry["name"]
    names = [str(place / "outside" / real)] if which == "absolute" else [name.format(real, real) for name in NAMES]
    (place / "ck" / "sub").mkdir()
    for name in names:
        entry["name"] = name
        (place / "ck" / RECORD_NAME).write_bytes(seal_record(json_text(forgery.record)))
        with watched() as paths:
            answers = doors.try_all(LocalStore(place / "ck"), one_rank(), name)
        assert all(isinstance(error, sk.MalformedFile) for error in answers.all)
        assert outside(paths, place) == []
        assert {os.path.basename(path) for path in paths if path.startswith(str(place))} <= {RECORD_NAME, "ck"}


def _sparse(path, nbytes=SPARSE):
    with open(path, "r+b") as file:
        file.truncate(nbytes)


def _assert_refused_unread(place, what, naming):
    store = LocalStore(place / "ck")
    bounded(lambda: doors.assert_refused(store, one_rank(), what, naming=naming), seconds=10)


def test_ten_gigabytes_of_nothing(place):
    for name in all_names():
        path = place / "ck" / name
        _sparse(path)
        _assert_refused_unread(place, f"{name} of 10 GB", name)
        shutil.copy(place / "outside" / name, path)


def test_an_index_of_ten_gigabytes_that_the_record_agrees_with(place, forgery):
    """The same where the record has been forged to give that size: an index is too large whoever says so."""
    forgery.record["index"] |= {"nbytes": SPARSE, "checksum": "xxh3_128:" + "0" * 32}
    (place / "ck" / RECORD_NAME).write_bytes(seal_record(json_text(forgery.record)))
    _sparse(place / "ck" / forgery.index_name)
    _assert_refused_unread(place, "index of 10 GB", forgery.index_name)


@pytest.mark.parametrize(("group", "header_nbytes"), [("model", SPARSE - 4096), ("optim", None)])
def test_a_data_file_of_ten_gigabytes_that_the_record_agrees_with(place, forgery, group, header_nbytes):
    """A header of 10 GB is too large; a header that has digests for none of 10 GB of holes is refused, data unread."""
    forgery.keep_index(one_rank())
    entry = forgery.file(group)
    entry |= {"nbytes": SPARSE} | ({"header_nbytes": header_nbytes} if header_nbytes else {})
    (place / "ck" / RECORD_NAME).write_bytes(seal_record(json_text(forgery.record)))
    _sparse(place / "ck" / entry["name"])
    _assert_refused_unread(place, "10 GB", RECORD_NAME if header_nbytes else entry["name"])


def test_a_file_that_shrinks_while_it_is_read(place):
    """A file cut after it was opened is an error of ours, or what was saved; the reader does not hang or crash."""
    subject = one_rank()
    name = next(file.name for file in subject.record.files if file.name.startswith("optim"))
    path = place / "ck" / name
    stop = threading.Event()

    def shrink():
        while not stop.is_set():
            os.truncate(path, 5000)
            path.write_bytes(subject.blobs[name])

    worker = threading.Thread(target=shrink)
    worker.start()
    try:
        for _ in range(30):
            doors.try_all(LocalStore(place / "ck"), subject, "a file that changes", may=ODD)
    finally:
        stop.set()
        worker.join()
    assert doors.try_all(LocalStore(place / "ck"), subject, "a file that was restored").all == [None] * 3


def test_a_place_that_is_a_link_is_a_place(place):
    """Links in the path to a checkpoint are the user's own, and are followed."""
    (place / "latest").symlink_to(place / "ck")
    assert doors.try_all(LocalStore(place / "latest"), one_rank(), "through a link").all == [None, None, None]
