"""
Models in stores, where nothing can be renamed: files are written under the names they keep.

    pin         a note says which files count: those that are there now, whatever else a listing shows
    write       new files, under names that no other save gives to any
    publish     the note says that the new files count, and those that they replace do not: from here on it is the new
                model that our readers see, whatever happens to this process
    carry out   the index file is put, what was replaced is deleted, then the note

A note that says that a save is under way may be of one that died or of one that hangs: nobody can tell. Whoever comes next
puts a note of its own over it, and only then removes files; the other save, if it wakes, finds that the note is not its
own any more and is not published.

Other programs know nothing of notes. They go by the index file, or by `model.safetensors`: for them, too, the old model
is whole until the new one is. Shards that have no index are an exception: while they replace others, and after a save
that died, other programs see both.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, StorageError
from shardkeep.layout.safetensors_folder import NOTE, Folder, Note, look, read_note, temporary
from shardkeep.layout.safetensors_names import INDEX_NAME, marked
from shardkeep.store.protocol import Store, Version

_MOST_INDEX_NBYTES = 256 << 20
_WRITTEN = re.compile(r"((shard-\d+-)?model-\d+-of-\d+(-[0-9a-f]{8})?|model)\.safetensors")
"""What files are called that are written here."""


def pin(store: Store, save_id: str, folder: Folder) -> None:
    """
    Say that only what is there now counts, until the save is published.

    Raises:
        CheckpointExists: another save has begun here.

    """
    _put_note(store, Note(save_id, list(folder.files), [], folder.index is not None, pending=True), over=None)


def prepare(store: Store) -> Folder:
    """
    Complete what was interrupted, and remove what never will be.

    Raises:
        CheckpointExists: another save began here, or was published, at the same time.

    """
    # Listed before the note is read: what a save writes that begins from here on is not among what is removed.
    names = [info.name for info in store.list()]
    seen = store.version(NOTE)
    note = read_note(store)
    if note is not None and note.pending:
        claim = Note(str(uuid.uuid4()), note.files, [], note.index, pending=True)
        _put_note(store, claim, over=seen)  # from here on, whose note it was cannot publish
        for name in names:
            if _WRITTEN.fullmatch(name) and name not in note.files:
                store.delete(name)
        note = claim
    elif note is not None:
        carry_out(store, note)
    for name in names:
        if name.startswith(temporary(INDEX_NAME, "")):
            store.delete(name)
    index_version = store.version(INDEX_NAME)
    found = replace(look(store), index_version=index_version)  # while the note still says what counts
    if note is not None and note.pending:
        drop_note(store, note.save_id)
    return found


def check_unchanged(store: Store, save_id: str, folder: Folder) -> None:
    """
    Make sure that no model was published between `prepare` and `pin`.

    Raises:
        CheckpointExists: one was; the note is gone.

    """
    if store.version(INDEX_NAME) != folder.index_version:
        drop_note(store, save_id)
        raise _meanwhile(store)


def check_written(store: Store, names: Sequence[str]) -> None:
    """Make sure that files are there."""
    there = {info.name for info in store.list()}
    if missing := [name for name in names if name not in there]:
        raise BlobNotFound(
            f"{store.url}/{missing[0]}: a rank says that it wrote this file, but it is not there",
            hint="does another job save into the same place?",
            file=missing[0],
        )


def commit(store: Store, note: Note) -> None:
    """
    Say that a save is complete, unless another one has begun here since.

    Raises:
        CheckpointExists: one has.

    """
    seen = store.version(NOTE)
    now = read_note(store)
    if seen is None or now is None or now.save_id != note.save_id:
        with suppress(CheckpointError):
            remove_written(store, note.save_id)
        raise _meanwhile(store)
    _put_note(store, note, over=seen)


def _put_note(store: Store, note: Note, *, over: Version | None) -> None:
    """Put a note over the one of that version, or where there is none."""
    try:
        store.put(NOTE, note.encode(), over=over)
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
    mark = marked("", save_id)
    for info in store.list():
        if _WRITTEN.fullmatch(info.name) and info.name.endswith(mark):
            store.delete(info.name)
    store.delete(temporary(INDEX_NAME, save_id))


def drop_note(store: Store, save_id: str) -> None:
    """Delete the note, if it still is that of this save."""
    note = read_note(store)
    if note is not None and note.save_id == save_id:
        store.delete(NOTE)


def carry_out(store: Store, note: Note) -> None:
    """Do what a note says is to be done; whoever writes to the place next completes it."""
    index = temporary(INDEX_NAME, note.save_id)
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
