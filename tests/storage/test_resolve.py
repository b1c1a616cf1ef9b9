"""From what a user writes to a store."""

import traceback
from functools import partial
from pathlib import Path

import pytest
import torch

import shardkeep as sk
from shardkeep.errors import CheckpointError, StorageError
from shardkeep.storage.fsspec import fs_errors
from shardkeep.storage.local import LocalStore
from shardkeep.storage.resolve import open_store


@pytest.mark.parametrize(
    ("where", "path"),
    [
        ("runs/a", "runs/a"),
        (Path("runs/a"), "runs/a"),
        ("/runs/a", "/runs/a"),
        ("file:///runs/a", "/runs/a"),
        ("file://localhost/runs/a%20b", "/runs/a b"),
        ("FILE:///runs/a", "/runs/a"),
        ("odd:name", "odd:name"),
    ],
)
def test_paths_and_file_urls_are_local(where, path):
    store = open_store(where, direct=False)
    assert isinstance(store, LocalStore)
    assert path == store.url


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("s3://AKIA:hunter2@bucket/run", "^s3://bucket/run: a URL must not contain keys"),
        ("s3://AKIA:hun/ter2@bucket//run", "^s3://bucket//run: a URL must not contain keys"),
        ("s3://ter2@bucket/run", "^s3://bucket/run: a URL must not"),
        ("gs://bob:hunter2@bucket/run", "^gs://bucket/run: a URL must not"),
        ("abfss://bob:hunter2@account/run", "^abfss://account/run: a URL must not"),
        ("ftp://bob:hunter2@127.0.0.1:1/run", "^ftp://127.0.0.1:1/run: cannot open: Connection refused"),
        ("nowhere://bob:hunter2@host/run", "^nowhere://host/run: no store"),
        ("file://bob:hunter2@host/run", r"^file://host/run: .* \(host\)"),
    ],
)
def test_what_stands_before_the_host_is_never_shown(where, message):
    """Neither by the error nor by what led to it; what cannot be reached is an error of ours."""
    with pytest.raises(CheckpointError, match=message) as caught:
        open_store(where, direct=True)
    assert "ter2" not in "".join(traceback.format_exception(caught.value))


def test_a_store_does_not_tell_its_password():
    """Nor do its errors, when a file system repeats it."""
    store = open_store("webhdfs://bob:hunter2@127.0.0.1:1/run/", direct=True)
    assert store.url == "webhdfs://127.0.0.1:1/run"
    for said in (
        FileNotFoundError("ftp://bob:hunter2@h/x"),
        OSError(5, "ftp://bob:hunter2@h"),
        KeyError("a://b:hunter2@h"),
    ):
        with pytest.raises(StorageError, match="//h") as caught, fs_errors("cannot get", store.url, "a"):
            raise said
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (Path("s3://bucket/run"), "begins with s3:/ is a URL that lost a slash"),
        ("file:/bob:hunter2/run", "begins with file:/ is a URL that lost a slash"),
        ("~/run", "only a shell replaces ~"),
        ({"w": torch.zeros(2)}, "^a dict is not a place"),
    ],
)
def test_what_is_probably_no_path_makes_no_directory(where, says, tmp_path, monkeypatch):
    """A URL in a pathlib.Path, `~`, and a state in the place of the path are refused in few words; ./ leads there."""
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.zeros(2)}
    for call in (partial(sk.save, state), partial(sk.load, state), sk.open, sk.Checkpointer, sk.Catalog):
        with pytest.raises(CheckpointError, match=says) as caught:
            call(where)
        assert "hunter2" not in str(caught.value)
        assert "tensor" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if isinstance(where, str):
        sk.save(state, f"./{where}")
        assert sk.open(f"./{where}")["w"][:].tolist() == [0, 0]


@pytest.mark.parametrize(
    "where", ["abfss://box@account.dfs.core.windows.net/run", "s3://bucket/run@2", "memory://a@b/c"]
)
def test_an_at_sign_that_means_something(where):
    """Azure's container@account, and names with one, are places as they were."""
    assert open_store(where, direct=True).url == where


def test_opening_touches_nothing(tmp_path):
    store = open_store(tmp_path / "new", direct=True)
    assert store is open_store(store, direct=True)
    assert list(store.list()) == []
    store.delete("a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere://bucket/run", r"(?s)no store for nowhere:// URLs: .*\n  hint: pass a path, a URL"),
        ("s3://bucket//run", r"(?s)not a place to keep a checkpoint\n  hint: write scheme://name/path"),
        ("s3://bucket/../run", "not a place"),
        ("memory://", "not a place"),
        ("memory://a/./b", "not a place"),
        ("file://other/run", r"another machine \(other\)"),
        ("", "not a place"),
        ("file://", "not a place"),
        ("a\0b", "not a place"),
    ],
)
def test_other_places_are_refused(where, message):
    with pytest.raises(CheckpointError, match=message):
        open_store(where, direct=True)
