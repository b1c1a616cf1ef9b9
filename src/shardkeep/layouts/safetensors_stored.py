"""
Which safetensors files of a place count: what a reader sees of a model that is written, replaced, or was left half done.

A small note says what the listing cannot:

    pending     a save is under way, or died: only the files that the note names count, which were there before it
    otherwise   a save is complete: its files count, and those that it replaces do not, though some may still be there
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, MalformedFile, StorageError
from shardkeep.layouts.safetensors import INDEX_NAME, SUFFIX, marked_name
from shardkeep.storage.base import Gets, Opens, Store, Version, is_name, local_path
from shardkeep.storage.local import PathStore
from shardkeep.storage.system import storage_errors

NOTE_NAME = "shardkeep-publish.json"
"""There only while files are being written to a store, or renamed."""
_MOST_NOTE_NBYTES = 256 << 20


class OpensAndGets(Opens, Gets, Protocol):
    """What reading the files needs."""


@dataclass(frozen=True)
class PublishNote:
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
class ModelDirectory:
    """What counts in a place: files by the names they have, or will have."""

    path: str
    files: dict[str, str]
    """What `opens` calls each safetensors file, by name: its path, or its name."""
    index: str | None
    """What it calls the index file."""
    opens: OpensAndGets
    """What opens them."""
    index_version: Version | None = None
    """Of the index file, where a save to a store is prepared."""


def list_model(store: Store) -> ModelDirectory:
    """
    Say what a place holds; writes nothing.

    Raises:
        BlobNotFound: it is a directory of this machine that does not exist.

    """
    path = local_path(store)
    if path is not None:
        with storage_errors("cannot list", path):
            names = os.listdir(path)
        opens: OpensAndGets = PathStore(direct=False)
        # Asked for one by one: a file may be renamed after the listing.
        there = lambda name: os.path.exists(os.path.join(path, name))  # noqa: E731 - as short as its use
        return _seen(store, names, lambda name: os.path.join(path, name), opens, there)
    names = [info.name for info in store.list()]
    return _seen(store, names, str, store, set(names).__contains__)


def _seen(
    store: Store, names: Collection[str], place: Callable[[str], str], opens: OpensAndGets, there: Callable[[str], bool]
) -> ModelDirectory:
    counted = {name: name for name in sorted(names) if name.endswith(SUFFIX)}
    index = INDEX_NAME if INDEX_NAME in names else None
    note = read_note(store) if NOTE_NAME in names else None
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
    return ModelDirectory(store.url, files, None if index is None else place(index), opens)


def _either(name: str, save_id: str, there: Callable[[str], bool]) -> str:
    """Return what a file of a complete save is called: its temporary name, or its final one."""
    new = temporary_name(name, save_id)
    return new if there(new) else name


def temporary_name(name: str, save_id: str) -> str:
    """Return the name that a file has until it is published, where it can be given another one."""
    return f"{name}.new-{save_id}"


def read_note(store: Gets) -> PublishNote | None:
    """
    Read the note of a place; None where there is none.

    Raises:
        MalformedFile: what has its name is none.

    """
    try:
        raw = store.get(NOTE_NAME, limit=_MOST_NOTE_NBYTES)
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
        where = os.path.join(str(getattr(store, "url", "")), NOTE_NAME)
        raise MalformedFile(f"{where}: this is no note of shardkeep's", hint="delete it", file=where)
    return PublishNote(**{key: said[key] for key in checks})


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and is_name(name) and name.endswith(SUFFIX) for name in value
    )


# Models in stores, where nothing can be renamed: files are written under the names they keep.
#
#     pin         a note says which files count: those that are there now, whatever else a listing shows
#     write       new files, under names that no other save gives to any
#     publish     the note says that the new files count, and those that they replace do not: from here on it is the
# new
#                 model that our readers see, whatever happens to this process
#     carry out   the index file is put, what was replaced is deleted, then the note
#
# A note that says that a save is under way may be of one that died or of one that hangs: nobody can tell. Whoever
# comes next
# puts a note of its own over it, and only then removes files; the other save, if it wakes, finds that the note is not
# its
# own any more and is not published.
#
# Other programs know nothing of notes. They go by the index file, or by `model.safetensors`: for them, too, the old
# model
# is whole until the new one is. Shards that have no index are an exception: while they replace others, and after a
# save
# that died, other programs see both.

_MOST_INDEX_NBYTES = 256 << 20
_WRITTEN = re.compile(r"((shard-\d+-)?model-\d+-of-\d+(-[0-9a-f]{8})?|model)\.safetensors")
"""What files are called that are written here."""


def pin_current(store: Store, save_id: str, folder: ModelDirectory) -> None:
    """
    Say that only what is there now counts, until the save is published.

    Raises:
        CheckpointExists: another save has begun here.

    """
    _swap_note(store, PublishNote(save_id, list(folder.files), [], folder.index is not None, pending=True), over=None)


def prepare_store(store: Store) -> ModelDirectory:
    """
    Complete what was interrupted, and remove what never will be.

    Raises:
        CheckpointExists: another save began here, or was published, at the same time.

    """
    # Listed before the note is read: what a save writes that begins from here on is not among what is removed.
    names = [info.name for info in store.list()]
    seen = store.version(NOTE_NAME)
    note = read_note(store)
    if note is not None and note.pending:
        claim = PublishNote(str(uuid.uuid4()), note.files, [], note.index, pending=True)
        _swap_note(store, claim, over=seen)  # from here on, whose note it was cannot publish
        for name in names:
            if _WRITTEN.fullmatch(name) and name not in note.files:
                store.delete(name)
        note = claim
    elif note is not None:
        finish_in_store(store, note)
    for name in names:
        if name.startswith(temporary_name(INDEX_NAME, "")):
            store.delete(name)
    index_version = store.version(INDEX_NAME)
    found = replace(list_model(store), index_version=index_version)  # while the note still says what counts
    if note is not None and note.pending:
        drop_note(store, note.save_id)
    return found


def check_unchanged(store: Store, save_id: str, folder: ModelDirectory) -> None:
    """
    Make sure that no model was published between `prepare` and `pin`.

    Raises:
        CheckpointExists: one was; the note is gone.

    """
    if store.version(INDEX_NAME) != folder.index_version:
        drop_note(store, save_id)
        raise _meanwhile(store)


def check_present(store: Store, names: Sequence[str]) -> None:
    """Make sure that files are there."""
    there = {info.name for info in store.list()}
    if missing := [name for name in names if name not in there]:
        raise BlobNotFound(
            f"{store.url}/{missing[0]}: a rank says that it wrote this file, but it is not there",
            hint="does another job save into the same place?",
            file=missing[0],
        )


def commit_note(store: Store, note: PublishNote) -> None:
    """
    Say that a save is complete, unless another one has begun here since.

    Raises:
        CheckpointExists: one has.

    """
    seen = store.version(NOTE_NAME)
    now = read_note(store)
    if seen is None or now is None or now.save_id != note.save_id:
        with suppress(CheckpointError):
            remove_written(store, note.save_id)
        raise _meanwhile(store)
    _swap_note(store, note, over=seen)


def _swap_note(store: Store, note: PublishNote, *, over: Version | None) -> None:
    """Put a note over the one of that version, or where there is none."""
    try:
        store.put(NOTE_NAME, note.encode(), over=over)
    except StorageError as exc:
        if exc.errno != errno.EEXIST:
            raise
        raise _meanwhile(store) from exc


def _meanwhile(store: Store) -> CheckpointExists:
    return CheckpointExists(
        f"{store.url}: another save began to write here meanwhile, and this one was not committed",
        hint="let one job at a time write models to a place",
    )


def remove_written(store: Store, save_id: str) -> None:
    """Remove the files of a save, which will not be published, and no others."""
    mark = marked_name("", save_id)
    for info in store.list():
        if _WRITTEN.fullmatch(info.name) and info.name.endswith(mark):
            store.delete(info.name)
    store.delete(temporary_name(INDEX_NAME, save_id))


def drop_note(store: Store, save_id: str) -> None:
    """Delete the note, if it still is that of this save."""
    note = read_note(store)
    if note is not None and note.save_id == save_id:
        store.delete(NOTE_NAME)


def finish_in_store(store: Store, note: PublishNote) -> None:
    """Do what a note says is to be done; whoever writes to the place next completes it."""
    index = temporary_name(INDEX_NAME, note.save_id)
    if note.index:
        there = store.version(INDEX_NAME)  # asked for first: one that is put later may be of a later save
        try:
            store.put(INDEX_NAME, store.get(index, limit=_MOST_INDEX_NBYTES), over=there)
        except BlobNotFound:
            pass  # done already, by whoever was interrupted
        except StorageError as exc:
            if exc.errno != errno.EEXIST:  # else somebody has just done it
                raise
    else:
        store.delete(INDEX_NAME)
    for name in note.remove:
        store.delete(name)
    drop_note(store, note.save_id)
    store.delete(index)
