"""
Models in stores, where nothing can be renamed: files are written under the names they keep.

    pin         a note says which files count: those that are there now, whatever else a listing shows
    write       new files, under names that none of these has
    publish     the note says that the new files count, and those that they replace do not: from here on it is the new
                model that our readers see, whatever happens to this process
    carry out   the index file is put, what was replaced is deleted, then the note

Other programs know nothing of notes. They go by the index file, or by `model.safetensors`: for them, too, the old model
is whole until the new one is. Shards that have no index are an exception: while they replace others, and after a save
that died, other programs see both.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from contextlib import suppress

from shardkeep.errors import BlobNotFound, CheckpointExists, StorageError
from shardkeep.layout.safetensors_folder import NOTE, Folder, Note, look, read_note, temporary
from shardkeep.layout.safetensors_names import INDEX_NAME
from shardkeep.store.protocol import Store

_MOST_INDEX_NBYTES = 256 << 20
_WRITTEN = re.compile(r"((shard-\d+-)?model-\d+-of-\d+(-[0-9a-f]{8})?|model)\.safetensors")
"""What files are called that are written here."""


def pin(store: Store, save_id: str, folder: Folder) -> None:
    """Say that only what is there now counts, until the save is published."""
    note = Note(save_id, list(folder.files), [], folder.index is not None, pending=True)
    store.put(NOTE, note.encode(), replace=True)


def prepare(store: Store) -> Folder:
    """Complete what was interrupted, and remove what never will be."""
    note = read_note(store)
    if note is not None and note.pending:
        take_back(store, note, last=True)
    elif note is not None:
        carry_out(store, note)
    for info in store.list():
        if info.name.startswith(temporary(INDEX_NAME, "")):
            store.delete(info.name)
    return look(store)


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
    try:
        if now is not None and now.save_id != note.save_id:
            raise StorageError(f"save {now.save_id} has begun", errno=errno.EEXIST)
        store.put(NOTE, note.encode(), over=seen)
    except StorageError as exc:
        if exc.errno != errno.EEXIST:
            raise
        raise CheckpointExists(
            f"{store.url}: another save began to write here meanwhile, and this one was not committed",
            hint="let one job at a time write models to a place",
        ) from exc


def take_back(store: Store, note: Note, *, last: bool) -> None:
    """Remove what was written since a save began; the note stays if others may still write files of it."""
    for info in store.list():
        if _WRITTEN.fullmatch(info.name) and info.name not in note.files:
            store.delete(info.name)
    store.delete(temporary(INDEX_NAME, note.save_id))
    if last:
        store.delete(NOTE)


def carry_out(store: Store, note: Note) -> None:
    """Do what a note says is to be done; whoever writes to the place next completes it."""
    index = temporary(INDEX_NAME, note.save_id)
    if note.index:
        with suppress(BlobNotFound):  # done already, by whoever was interrupted
            store.put(INDEX_NAME, store.get(index, limit=_MOST_INDEX_NBYTES), replace=True)
    else:
        store.delete(INDEX_NAME)
    for name in note.remove:
        store.delete(name)
    store.delete(NOTE)
    store.delete(index)
