"""Roots: places below one place, and how they go away."""

import errno
import os

import pytest

from shardkeep.errors import CheckpointError, MalformedFile, StorageError
from shardkeep.format.record import RECORD_NAME
from shardkeep.storage import local as local_root
from shardkeep.storage.base import REMOVING_NAME, delete_contents, free_nbytes
from shardkeep.storage.local import LocalStore
from shardkeep.storage.memory import MemoryStore
from shardkeep.storage.resolve import open_root
from shardkeep.testing.faulty_store import FaultyStore
from shardkeep.testing.store_contract import raises_errno


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return LocalStore(tmp_path / "made" / "later") if request.param == "local" else MemoryStore()


def fill(root, name, *blobs):
    for blob in blobs:
        root.place(name).put(blob, b"x")


def test_a_root_that_does_not_exist_has_no_places(root):
    assert list(root.places()) == [] == list(root.list())
    root.remove("step-1")
    root.drop_empty("step-1")
    assert list(root.places()) == []


def test_places_are_named_and_blobs_of_the_root_are_none(root):
    fill(root, "step-1", "a")
    fill(root, "step-2", "a", "b")
    root.put("latest", b"step-2")
    assert sorted(root.places()) == ["step-1", "step-2"]
    assert [info.name for info in root.list()] == ["latest"]
    assert [info.name for info in root.place("step-2").list()] == ["a", "b"]
    assert root.place("step-1").url == f"{root.url}/step-1"


def test_other_programs_name_places_as_they_like(root):
    """Directories named by a logger or by hand are listed, read and removed, though no blob can have such a name."""
    for name in ("epoch=3-step=300.ckpt", "best model (v2)", "2026-01-02T10:11:12"):
        fill(root, name, "a")
        assert list(root.places()) == [name]
        assert [info.name for info in root.place(name).list()] == ["a"]
        root.remove(name)
        assert list(root.places()) == []
        with pytest.raises(MalformedFile):
            root.put(name, b"x")


def test_a_removed_place_is_gone(root):
    fill(root, "step-1", RECORD_NAME, "data")
    fill(root, "step-2", RECORD_NAME)
    root.remove("step-1")
    root.remove("step-1")
    assert list(root.places()) == ["step-2"]
    fill(root, "step-1", RECORD_NAME)
    assert sorted(root.places()) == ["step-1", "step-2"]


@pytest.mark.parametrize("name", ["..", "a/b", "", ".tmp-1", "-x"])
def test_names_that_lead_elsewhere_are_refused(root, name):
    for verb in (root.place, root.remove, root.drop_empty):
        with pytest.raises(MalformedFile):
            verb(name)


def test_only_an_empty_place_is_dropped(root):
    fill(root, "step-1", "data")
    root.drop_empty("step-1")
    assert list(root.places()) == ["step-1"]
    root.place("step-1").delete("data")
    root.drop_empty("step-1")
    assert list(root.places()) == []


@pytest.mark.parametrize("commit", [RECORD_NAME, ".metadata", "__3.metadata"])
def test_what_makes_a_checkpoint_goes_first(root, commit):
    """Wherever a removal is cut short: once one file is gone, no commit is there, and the mark says what happened."""
    names = {"a", "z", commit}
    for at in range(5):
        fill(root, f"step-{at}", *names)
        store = FaultyStore(root.place(f"step-{at}"), "error", at=at, verbs=("put", "delete"))
        left = set()
        try:
            delete_contents(store)
        except StorageError:
            left = {info.name for info in root.place(f"step-{at}").list()}
            assert left
        if left and left - {REMOVING_NAME} != names:
            assert commit not in left
            assert REMOVING_NAME in left
        delete_contents(root.place(f"step-{at}"))
        assert not list(root.place(f"step-{at}").list())


def test_a_directory_is_removed_with_one_sync(tmp_path, monkeypatch):
    """When the first file is gone, it is durable that the checkpoint is."""
    fill(LocalStore(tmp_path), "step-1", RECORD_NAME, "a", "b")
    seen = []
    monkeypatch.setattr(local_root, "sync_directory", lambda path: seen.append({*os.listdir(path)}))
    LocalStore(tmp_path).remove("step-1")
    assert seen == [{"a", "b", REMOVING_NAME}]


def test_a_full_disk_does_not_keep_a_place(root):
    """The mark may fail to be made: room is what removing is for."""
    fill(root, "step-1", RECORD_NAME, "data")
    store = FaultyStore(root.place("step-1"), "full", at=0, verbs=("put",))
    delete_contents(store)
    assert not list(root.place("step-1").list())


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / RECORD_NAME).write_bytes(b"x")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-1").symlink_to(elsewhere)
    root = LocalStore(tmp_path / "root")
    assert list(root.places()) == ["step-1"]
    root.remove("step-1")
    assert list(root.places()) == []
    assert (elsewhere / RECORD_NAME).exists()


def test_all_that_others_put_into_a_place_goes_with_it(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    place = tmp_path / "root" / "step-1"
    (place / "tokenizer").mkdir(parents=True)
    (place / "tokenizer" / "a b").write_bytes(b"x")
    (place / "link").symlink_to(outside)
    LocalStore(tmp_path / "root").remove("step-1")
    assert not place.exists()
    assert (outside / "kept").exists()


def test_an_error_of_the_system_is_ours(tmp_path, monkeypatch):
    root = LocalStore(tmp_path)
    fill(root, "step-1", "a")

    def refuse(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(local_root.shutil, "rmtree", refuse)
    with raises_errno(errno.EBUSY, match=r"step-1.*EBUSY"):
        root.remove("step-1")


def test_roots_are_found_by_path_url_or_object(tmp_path):
    memory = MemoryStore()
    assert open_root(memory, direct=True) is memory
    assert open_root(tmp_path, direct=True).url == str(tmp_path)
    assert open_root(f"file://{tmp_path}", direct=True).url == str(tmp_path)
    for wrong in ("", "nowhere://bucket/runs", 3):
        with pytest.raises(CheckpointError):
            open_root(wrong, direct=True)


def test_free_space_is_that_of_the_file_system(tmp_path):
    """Also of a directory that is not made yet; a store that cannot say says None."""
    room = os.statvfs(tmp_path)
    said = free_nbytes(LocalStore(tmp_path / "not" / "yet").place("step-1"))
    assert said is not None
    assert abs(said - room.f_bavail * room.f_frsize) < 1 << 30
    assert free_nbytes(MemoryStore()) is None


class _Listing(MemoryStore):
    def list(self):
        raise StorageError("injected", errno=errno.EIO)


def test_a_place_that_cannot_be_listed_is_not_removed():
    """Nothing is deleted that was not seen."""
    store = _Listing()
    store.put(RECORD_NAME, b"x")
    with pytest.raises(StorageError):
        delete_contents(store)
    assert store.get(RECORD_NAME, limit=9) == b"x"


class _Full(FaultyStore):
    """A disk on which nothing can be put until something is deleted, and one blob never can be."""

    def begin(self, verb, name):
        deleted = any(each.startswith("delete") for each in self.operations)
        if verb == "put" and not deleted:
            raise self.broken(verb, name)
        if name == "z":
            raise self.broken(verb, name)
        return super().begin(verb, name)


def test_a_removal_that_could_not_be_marked_at_first_is_marked_as_soon_as_it_can_be(root):
    """What it leaves when it fails is known for what it is, and can be removed later."""
    fill(root, "step-1", RECORD_NAME, "a", "z")
    with pytest.raises(StorageError):
        delete_contents(_Full(root.place("step-1")))
    assert {info.name for info in root.place("step-1").list()} == {REMOVING_NAME, "z"}


MANY = 100
"""So many names that a listing of them is kept."""


def crowd(path):
    """Make a root with many places, the listing of which is kept by now, and return its store."""
    for number in range(MANY):
        (path / f"step-{number}").mkdir()
    store = LocalStore(path)
    while store.all_names() is not store.all_names():  # until the clock has ticked
        assert len(list(store.places())) == MANY
    return store


@pytest.mark.parametrize(
    ("change", "left", "blobs"),
    [
        (lambda root: (root / "step-0").rmdir(), MANY - 1, []),
        (lambda root: (root / "new").mkdir(), MANY + 1, []),
        (lambda root: (root / "step-0").rename(root / "step-x"), MANY, []),
        (lambda root: [(root / "step-0").rmdir(), (root / "step-0").write_text("")], MANY - 1, ["step-0"]),
        (lambda root: (root / "latest").write_text(""), MANY, ["latest"]),
        (lambda root: (root / "link").symlink_to(root / "step-0"), MANY + 1, []),
        (lambda root: [root.rename(root.with_name("moved")), root.mkdir()], 0, []),
    ],
)
def test_what_another_program_changes_is_seen_in_a_listing_that_was_kept(tmp_path, change, left, blobs):
    """Even if it sets the time of the directory back to what it was, as a copy of a backup does."""
    path = tmp_path / "root"
    path.mkdir()
    store, before = crowd(path), path.stat()
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(list(store.places())) == left
    assert [info.name for info in store.list()] == blobs


def test_changes_within_one_tick_of_the_clock_are_seen(tmp_path):
    """A listing between two changes at the same time is not kept: the directory's time does not show the second one."""
    store = crowd(tmp_path)
    for number in range(100):
        (tmp_path / f"before-{number}").mkdir()
        assert len(list(store.places())) == MANY + 2 * number + 1
        (tmp_path / f"after-{number}").mkdir()
        assert len(list(store.places())) == MANY + 2 * number + 2


def test_a_listing_of_a_directory_that_has_just_changed_is_not_kept(tmp_path, monkeypatch):
    store = crowd(tmp_path)
    assert store.all_names() is store.all_names()
    monkeypatch.setattr(local_root, "has_settled", lambda *_: False)
    (tmp_path / "new").mkdir()
    assert store.all_names() is not store.all_names()


S, MS = 10**9, 10**6


@pytest.mark.parametrize(
    ("changed", "now", "settled"),
    [
        ((9 * S + 1, 9 * S + 1), 9 * S + 1, False),
        ((9 * S + 1, 9 * S + 1), 9 * S + MS, False),
        ((9 * S + 1, 9 * S + 1), 9 * S + MS + 1, True),
        ((8 * S + 1, 9 * S + 1), 9 * S + MS, False),  # the permissions changed
        ((9 * S, 9 * S), 11 * S - 1, False),  # perhaps by a clock that ticks every two seconds
        ((9 * S, 9 * S), 11 * S, True),
        ((9 * S + 1, 9 * S + 1), 0, False),  # not known
    ],
)
def test_a_listing_is_kept_only_if_the_next_change_has_another_time(changed, now, settled):
    assert local_root.has_settled(changed, now) == settled


def test_a_link_to_a_place_is_looked_at_each_time(tmp_path, monkeypatch):
    """Where it leads may change, and the directory does not show that."""
    monkeypatch.setattr(local_root, "has_settled", lambda *_: True)
    target = tmp_path / "target"
    (tmp_path / "root").mkdir()
    store = crowd(tmp_path / "root")
    (tmp_path / "root" / "link").symlink_to(target)
    for exists in (False, True, False):
        target.mkdir() if exists else target.exists() and target.rmdir()
        assert ("link" in store.places()) == exists
