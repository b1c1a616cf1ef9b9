"""
Publishes safetensors files: a set of new files becomes the model of a place in one step, in place of what was there.

A small note, `shardkeep-publish.json`, says which files count while a listing cannot:

    pending     a save is under way, or died: only the files that the note names count, those that were there before
    complete    the files of the save count, and those it replaces do not, although some may still be there

In a local directory files are written as `NAME.new-SAVE`. When all are durable, the complete note is put, and from then on
readers of shardkeep see the new model. The files are renamed, data first and the index file last, and the note is
deleted. One process of a machine at a time does this, under the directory's lock, because a file that one process
removes by its name may be the new file of another by then.

A store cannot rename, so files are written under names that carry the mark of their save:

    pin         a pending note names what is there now
    write       the new files
    commit      a complete note takes the place of the pending one, by compare-and-swap
    finish      the index file is put, what was replaced is deleted, then the note

A pending note in a store may belong to a save that died or to one that hangs. The next save puts its own note over it
before it removes files; a save that hung then finds that the note is not its own, and fails.

The next save to a place finishes what an interrupted one left. Other programs do not know the note: they go by the index
file or by `model.safetensors`. Where several files replace old ones by name, the old index file is removed first, so
they find no model rather than files of both. Shards without an index file are an exception: while they replace others in
a store, and after a save that died there, other programs see both.

Files are removed only if their header shows that a checkpoint writer made them, or if the caller names them.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, MalformedFile
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY, INDEX_NAME, SAVE_ID_KEY, SUFFIX, marked_name, read_header
from shardkeep.storage.base import ReadableStore, Store, Version, is_name, local_path, put_if_unchanged, with_any_names
from shardkeep.storage.local import directory_lock, make_directory, storage_errors, sync_directory

NOTE_NAME = "shardkeep-publish.json"
_MOST_SMALL_NBYTES = 256 << 20
"""Of a note or an index file."""
_MODEL_FILE = re.compile(r"(shard-\d+-)?model-\d+-of-\d+(-[0-9a-f]{8})?\.safetensors")
_WRITTEN_TO_STORES = re.compile(rf"{_MODEL_FILE.pattern}|model\.safetensors")
_TEMPORARY = re.compile(
    r"((shard-\d+-)?model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?|"
    + re.escape(NOTE_NAME)
    + r")\.new-[0-9a-f-]+"
)


class PublishNote(msgspec.Struct, frozen=True, omit_defaults=True):
    save_id: str
    files: list[str]
    """Those that count."""
    remove: list[str]
    """Files that do not count any more."""
    index: bool
    pending: bool = False


@dataclass(frozen=True)
class ModelDirectory:
    """The safetensors files of a place that count, by the names they have or will have."""

    path: str
    files: dict[str, str]
    """For each name, the one that the file has now: in a local directory it may still be a temporary one."""
    index: str | None
    """The name that the index file has now."""
    opens: ReadableStore
    index_version: Version | None = None
    """Of the index file, when a save to a store was prepared."""


@dataclass(frozen=True)
class SaveNames:
    save_id: str
    renames: bool
    """Files are written under temporary names. Else names carry the mark of the save, even in an empty place: no other save
    uses them, not even one that hung and goes on."""

    def final(self, name: str) -> str:
        return name if self.renames else marked_name(name, self.save_id)

    def written(self, name: str) -> str:
        return unpublished_name(name, self.save_id) if self.renames else self.final(name)


def unpublished_name(name: str, save_id: str) -> str:
    """Return the name of a file before it is published in a local directory."""
    return f"{name}.new-{save_id}"


def can_rename(store: Store) -> bool:
    """Say whether files of a place can be renamed: it is a local directory."""
    return local_path(store) is not None


def list_model(store: Store) -> ModelDirectory:
    """Find the safetensors files of a place that count; `BlobNotFound` for a local directory that does not exist."""
    if local := can_rename(store):
        with storage_errors("cannot list", store.url):
            names = os.listdir(store.url)  # links included
    else:
        names = [info.name for info in store.list()]

    def now(name: str, save_id: str) -> str:
        """Return the name of a file of a complete save, which may not be renamed yet, or may be since the listing."""
        new = unpublished_name(name, save_id)
        return new if (os.path.exists(os.path.join(store.url, new)) if local else new in names) else name

    files = {name: name for name in sorted(names) if name.endswith(SUFFIX)}
    index = INDEX_NAME if INDEX_NAME in names else None
    note = read_note(store) if NOTE_NAME in names else None
    if note is not None and note.pending:
        files = {name: name for name in note.files if name in files}
        index = index if note.index else None
    elif note is not None:
        files |= {name: now(name, note.save_id) for name in note.files}
        for name in note.remove:
            files.pop(name, None)
        index = now(INDEX_NAME, note.save_id) if note.index else None
    return ModelDirectory(store.url, files, index, with_any_names(store))


def read_note(store: ReadableStore) -> PublishNote | None:
    try:
        raw = store.get(NOTE_NAME, limit=_MOST_SMALL_NBYTES)
    except BlobNotFound:
        return None
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        note = msgspec.json.decode(raw, type=PublishNote)
        names = [*note.files, *note.remove]
        if is_name(note.save_id) and all(is_name(name) and name.endswith(SUFFIX) for name in names):
            return note
    where = os.path.join(str(getattr(store, "url", "")), NOTE_NAME)
    raise MalformedFile(f"{where}: this is not a note that shardkeep wrote", hint="delete it", file=where)


def made_by_writer(folder: ModelDirectory, name: str) -> bool:
    """Whether a checkpoint writer made a file; a model from elsewhere is not to be removed."""
    if not _MODEL_FILE.fullmatch(name):
        return False
    try:
        return CUSTOM_METADATA_KEY in read_header(folder.files[name], folder.opens).metadata
    except CheckpointError:
        return False  # a file that cannot be read is left for its owner to look at


def prepare_directory(store: Store) -> ModelDirectory:
    """Finish what was interrupted in a place, and remove what will never be published; raises as `begin_save` does."""
    if not can_rename(store):
        return _prepare_store(store)
    path = store.url
    with storage_errors("cannot make", path):
        make_directory(os.path.abspath(path))
    with storage_errors("cannot lock", path), directory_lock(path):
        _finish_interrupted(store)
        _clear(path)
        return list_model(store)


def begin_save(store: Store, save_id: str, folder: ModelDirectory) -> SaveNames:
    """Begin to write beside what was found, which alone counts for now; `CheckpointExists` if another save has begun."""
    names = SaveNames(save_id, renames=can_rename(store))
    if names.renames:
        return names
    # Only what is there now counts.
    pin = PublishNote(save_id, list(folder.files), [], folder.index is not None, pending=True)
    _swap_note(store, pin, over=None)
    if store.version(INDEX_NAME) != folder.index_version:  # published after `prepare_directory`
        _drop_note(store, save_id)
        raise _taken_over(store)
    return names


def publish_model(
    store: Store,
    names: SaveNames,
    files: Sequence[str],
    *,
    weights: Mapping[str, str] | None,
    total_nbytes: int = 0,
    replaces_saves: bool,
    removes: Sequence[str] = (),
) -> None:
    """
    Make files, given without marks, that are durable the contents of a place.

    `weights` are the file of each tensor, for the index file, and `total_nbytes` the bytes of all tensors; None for a place
    without index file. `removes` are safetensors files to remove, besides those of earlier saves if `replaces_saves`. If a
    file is missing (`BlobNotFound`), or another save to the same store began (`CheckpointExists`), nothing changes.
    """
    final = list(map(names.final, files))
    index = b""
    if weights is not None:
        by_tensor = {key: names.final(name) for key, name in weights.items()}
        index = json.dumps({"metadata": {"total_size": total_nbytes}, "weight_map": by_tensor}, indent=2).encode()

    def note_for(folder: ModelDirectory) -> PublishNote:
        stale = [name for name in removes if name not in set(final)]
        if replaces_saves:
            stale += [name for name in folder.files if name not in set(final) and made_by_writer(folder, name)]
        return PublishNote(names.save_id, final, list(dict.fromkeys(stale)), weights is not None)

    if can_rename(store):
        _publish_local(store, names.save_id, files, index, note_for)
        return
    present = {info.name for info in store.list()}
    if missing := [name for name in final if name not in present]:
        raise _missing(f"{store.url}/{missing[0]}", missing[0])
    note = note_for(list_model(store))
    if index:
        store.put(unpublished_name(INDEX_NAME, names.save_id), index, replace=True)
    # Over the pending note, unless another save has taken over.
    seen, now = store.version(NOTE_NAME), read_note(store)
    if seen is None or now is None or now.save_id != note.save_id:
        with suppress(CheckpointError):
            _remove_written(store, note.save_id)
        raise _taken_over(store)
    _swap_note(store, note, over=seen)
    _finish_in_store(store, note)


def discard_save(store: Store, save_id: str, *, last: bool = True, unpublished: bool = False) -> bool:
    """
    Remove the files of a save that will not be published; return False if a note says that it was published.

    `last` says that no rank writes files of it any more; `unpublished` that `publish_model` was not called, so that files
    may be removed even if another save has taken over.
    """
    note = read_note(store)
    began = note is not None and note.save_id == save_id
    if note is not None and began and not note.pending:
        return False
    if can_rename(store):
        _clear(store.url, save_id)
        return True
    if began or unpublished:
        _remove_written(store, save_id)
    if began and last:
        _drop_note(store, save_id)
    return True


def _missing(where: str, name: str) -> BlobNotFound:
    return BlobNotFound(
        f"{where}: a rank says that it wrote this file, but it is not there",
        hint="do all ranks see the same place, and did no other export or save to it begin meanwhile?",
        file=name,
    )


def _finish_interrupted(store: Store) -> str | None:
    note = read_note(store)
    if note is None or note.pending:
        return None
    _finish_renames(store.url, note)
    return note.save_id


def _publish_local(
    store: Store, save_id: str, files: Sequence[str], index: bytes, note_for: Callable[[ModelDirectory], PublishNote]
) -> None:
    """`index` is empty where there is no index file."""
    path = store.url
    if index:
        store.put(unpublished_name(INDEX_NAME, save_id), index, replace=True)
    with storage_errors("cannot lock", path), directory_lock(path):
        if _finish_interrupted(store) == save_id:  # another process has just done it
            return
        _check_durable(store, files, save_id)  # another process may have cleared them
        if index and not os.path.exists(os.path.join(path, unpublished_name(INDEX_NAME, save_id))):
            raise _missing(os.path.join(path, INDEX_NAME), INDEX_NAME)
        note = note_for(list_model(store))
        # In one step, also over a pending note.
        written = unpublished_name(NOTE_NAME, save_id)
        with storage_errors("cannot publish in", path):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, written))
            store.put(written, msgspec.json.encode(note))
            os.replace(os.path.join(path, written), os.path.join(path, NOTE_NAME))
            sync_directory(path)
        _finish_renames(path, note)


def _check_durable(store: Store, files: Sequence[str], save_id: str) -> None:
    """Make sure that the data files of a save exist: under temporary names, or renamed already."""
    for name in files:
        final = os.path.join(store.url, name)
        if not os.path.exists(unpublished_name(final, save_id)) and (
            not os.path.exists(final) or read_header(name, with_any_names(store)).metadata.get(SAVE_ID_KEY) != save_id
        ):
            raise _missing(final, name)


def _finish_renames(path: str, note: PublishNote) -> None:
    """Do what a complete note says; a process that was interrupted may have done a part of it."""
    with storage_errors("cannot publish in", path):
        # Not the new index file, which is there already if the interrupted process came so far.
        is_old = not note.index or os.path.lexists(os.path.join(path, unpublished_name(INDEX_NAME, note.save_id)))
        replaces = any(os.path.lexists(os.path.join(path, name)) for name in note.files)
        if is_old and replaces and len(note.files) > 1:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, INDEX_NAME))
        for name in [*note.files, *([INDEX_NAME] if note.index else [])]:
            with suppress(FileNotFoundError):  # renamed already
                os.replace(os.path.join(path, unpublished_name(name, note.save_id)), os.path.join(path, name))
        for name in [*note.remove, *([] if note.index else [INDEX_NAME])]:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        sync_directory(path)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, NOTE_NAME))
        sync_directory(path)


def _clear(path: str, save_id: str | None = None) -> None:
    """Remove files with temporary names, of one save or of any."""
    with storage_errors("cannot clear", path):
        for name in os.listdir(path):
            if _TEMPORARY.fullmatch(name) and (save_id is None or name.endswith(unpublished_name("", save_id))):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))


def _prepare_store(store: Store) -> ModelDirectory:
    # List before reading the note: files of a save that begins from here on must not be among those removed.
    names = [info.name for info in store.list()]
    seen = store.version(NOTE_NAME)
    note = read_note(store)
    if note is not None and note.pending:
        claim = PublishNote(str(uuid.uuid4()), note.files, [], note.index, pending=True)
        _swap_note(store, claim, over=seen)  # from here on the save of that note cannot publish
        for name in names:
            if _WRITTEN_TO_STORES.fullmatch(name) and name not in note.files:
                store.delete(name)
        note = claim
    elif note is not None:
        _finish_in_store(store, note)
    for name in names:
        if name.startswith(unpublished_name(INDEX_NAME, "")):
            store.delete(name)
    index_version = store.version(INDEX_NAME)
    found = replace(list_model(store), index_version=index_version)  # while the note still says what counts
    if note is not None and note.pending:
        _drop_note(store, note.save_id)
    return found


def _swap_note(store: Store, note: PublishNote, *, over: Version | None) -> None:
    if not put_if_unchanged(store, NOTE_NAME, msgspec.json.encode(note), over):
        raise _taken_over(store)


def _taken_over(store: Store) -> CheckpointExists:
    return CheckpointExists(
        f"{store.url}: another save began to write here meanwhile, and this one was not committed",
        hint="let one job at a time write models to a place",
    )


def _remove_written(store: Store, save_id: str) -> None:
    mark = marked_name("", save_id)
    for info in store.list():
        if _WRITTEN_TO_STORES.fullmatch(info.name) and info.name.endswith(mark):
            store.delete(info.name)
    store.delete(unpublished_name(INDEX_NAME, save_id))


def _drop_note(store: Store, save_id: str) -> None:
    note = read_note(store)
    if note is not None and note.save_id == save_id:
        store.delete(NOTE_NAME)


def _finish_in_store(store: Store, note: PublishNote) -> None:
    """Do what a complete note says; an interrupted process may have done a part of it."""
    index = unpublished_name(INDEX_NAME, note.save_id)
    if note.index:
        there = store.version(INDEX_NAME)  # read first: an index file that is put later may be of a later save
        with suppress(BlobNotFound):  # put already; else another process may just have put it
            put_if_unchanged(store, INDEX_NAME, store.get(index, limit=_MOST_SMALL_NBYTES), there)
    else:
        store.delete(INDEX_NAME)
    for name in note.remove:
        store.delete(name)
    _drop_note(store, note.save_id)
    store.delete(index)
