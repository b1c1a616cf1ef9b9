"""From what a user writes to a store."""

from pathlib import Path

import pytest

from shardkeep.errors import CheckpointError
from shardkeep.store.local import LocalStore
from shardkeep.store.memory import MemoryStore
from shardkeep.store.place import open_store


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
def test_paths_and_file_urls_are_local(where: str | Path, path: str) -> None:
    """Paths and file:// URLs become local stores of that path."""
    store = open_store(where, direct=False)

    assert isinstance(store, LocalStore)
    assert path == store.url


def test_opening_touches_nothing(tmp_path: Path) -> None:
    """A place that does not exist is not made by naming it, nor by looking."""
    store = open_store(tmp_path / "new", direct=True)

    assert list(store.list()) == []
    store.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_a_store_passes_through() -> None:
    """An object with the verbs of a store is used as it is."""
    store = MemoryStore()

    assert store is open_store(store, direct=True)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere://bucket/run", r"(?s)no store for nowhere:// places: .*\n  hint: give a path, a URL"),
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
def test_other_places_are_refused(where: str, message: str) -> None:
    """The error names the scheme, and what would be understood."""
    with pytest.raises(CheckpointError, match=message):
        open_store(where, direct=True)
