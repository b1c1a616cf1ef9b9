"""
Which safetensors files of a place count: what a reader sees of a model that is written, replaced, or was left half done.

A small note says what the listing cannot:

    pending     a save is under way, or died: only the files that the note names count, which were there before it
    otherwise   a save is complete: its files count, and those that it replaces do not, though some may still be there
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from shardkeep.errors import BlobNotFound, MalformedFile
from shardkeep.layout.safetensors_names import INDEX_NAME, SUFFIX
from shardkeep.store.files import storage_errors
from shardkeep.store.local import LocalStore
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import Gets, Opens, Store, Version, is_name

NOTE = "shardkeep-publish.json"
"""There only while files are being written to a store, or renamed."""
_MOST_NOTE_NBYTES = 256 << 20


class Reads(Opens, Gets, Protocol):
    """What reading the files needs."""


@dataclass(frozen=True)
class Note:
    """What stands in the note."""

    save_id: str
    files: list[str]
    """The files that count."""
    remove: list[str]
    """Files that count no more."""
    index: bool
    """Whether there is an index file."""
    pending: bool = False

    def encode(self) -> bytes:
        """Write it down."""
        said = {"save_id": self.save_id, "files": self.files, "remove": self.remove, "index": self.index}
        return json.dumps({**said, "pending": True} if self.pending else said).encode()


@dataclass(frozen=True)
class Folder:
    """What counts in a place: files by the names they have, or will have."""

    path: str
    files: dict[str, str]
    """What `opens` calls each safetensors file, by name: its path, or its name."""
    index: str | None
    """What it calls the index file."""
    opens: Reads
    """What opens them."""
    index_version: Version | None = None
    """Of the index file, where a save to a store is prepared."""


def look(store: Store) -> Folder:
    """
    Say what a place holds; writes nothing.

    Raises:
        BlobNotFound: it is a directory of this machine that does not exist.

    """
    if isinstance(store, LocalStore):
        path = store.url
        with storage_errors("cannot list", path):
            names = os.listdir(path)
        opens: Reads = PathStore(direct=False)
        # Asked for one by one: a file may be renamed after the listing.
        there = lambda name: os.path.exists(os.path.join(path, name))  # noqa: E731 - as short as its use
        return _seen(store, names, lambda name: os.path.join(path, name), opens, there)
    names = [info.name for info in store.list()]
    return _seen(store, names, str, store, set(names).__contains__)


def _seen(
    store: Store, names: Collection[str], place: Callable[[str], str], opens: Reads, there: Callable[[str], bool]
) -> Folder:
    counted = {name: name for name in sorted(names) if name.endswith(SUFFIX)}
    index = INDEX_NAME if INDEX_NAME in names else None
    note = read_note(store) if NOTE in names else None
    if note is not None and note.pending:
        counted = {name: name for name in note.files if name in counted}
        index = index if note.index else None
    elif note is not None:
        for name in note.files:
            counted[name] = _either(name, note.save_id, there)
        for name in note.remove:
            counted.pop(name, None)
        index = _either(INDEX_NAME, note.save_id, there) if note.index else None
    files = {name: place(now) for name, now in counted.items()}
    return Folder(store.url, files, None if index is None else place(index), opens)


def _either(name: str, save_id: str, there: Callable[[str], bool]) -> str:
    """Return what a file of a complete save is called: its temporary name, or its final one."""
    new = temporary(name, save_id)
    return new if there(new) else name


def temporary(name: str, save_id: str) -> str:
    """Return the name that a file has until it is published, where it can be given another one."""
    return f"{name}.new-{save_id}"


def read_note(store: Gets) -> Note | None:
    """
    Read the note of a place; None where there is none.

    Raises:
        MalformedFile: what has its name is none.

    """
    try:
        raw = store.get(NOTE, limit=_MOST_NOTE_NBYTES)
    except BlobNotFound:
        return None
    checks: dict[str, Callable[[Any], bool]] = {
        "save_id": lambda value: isinstance(value, str) and is_name(value),
        "files": _names,
        "remove": _names,
        "index": lambda value: isinstance(value, bool),
        "pending": lambda value: isinstance(value, bool),
    }
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict):
        said.setdefault("pending", False)
    if not isinstance(said, dict) or not all(key in said and check(said[key]) for key, check in checks.items()):
        where = os.path.join(str(getattr(store, "url", "")), NOTE)
        raise MalformedFile(f"{where}: this is no note of shardkeep's", hint="delete it", file=where)
    return Note(**{key: said[key] for key in checks})


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and is_name(name) and name.endswith(SUFFIX) for name in value
    )
