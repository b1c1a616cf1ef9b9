"""
From new safetensors files to a model that takes the place of what was there, in one step.

In a directory of this machine new files are written as `NAME.new-SAVE`. When all of them are durable, a small note says
which files make up the directory from now on: from then on the new model is what `Folder` sees, and the old one was
until then. Renaming to the final names follows, data first, the index file last; whoever writes to the directory next
completes what an interrupted process left. One process of a machine at a time does any of this: what another is about to
remove by its name may be the new file by then. Stores cannot rename: `safetensors_stored` does the same in other steps.

Other programs know nothing of notes, and go by `model.safetensors` or the index file. Where several files take the names
of old ones, the old index goes first: until the new one is there they find no model, and never files of both.

Only files whose header shows that a checkpoint writer made them, and those that the caller names, are ever removed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from shardkeep.errors import BlobNotFound, CheckpointError
from shardkeep.layouts import safetensors_stored as stored
from shardkeep.layouts.safetensors import CUSTOM_METADATA_KEY, INDEX_NAME, SAVE_ID_KEY, marked_name, read_header
from shardkeep.layouts.safetensors_stored import (
    NOTE_NAME,
    ModelDirectory,
    PublishNote,
    list_model,
    read_note,
    temporary_name,
)
from shardkeep.storage.base import Store, local_path
from shardkeep.storage.system import directory_lock, make_directory, storage_errors, sync_directory

_MADE_BY_WRITERS = re.compile(r"(shard-\d+-)?model-\d+-of-\d+(-[0-9a-f]{8})?\.safetensors")
_TEMPORARY = re.compile(
    r"((shard-\d+-)?model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?|"
    + re.escape(NOTE_NAME)
    + r")\.new-[0-9a-f-]+"
)


@dataclass(frozen=True)
class SaveNames:
    """Under which names the files of a save are written, and which they have in the end."""

    save_id: str
    renames: bool
    """They are written under temporary names."""
    marks: bool = False
    """All names have the save's mark in them, so that no other save, not even one at the same time, has such a name."""

    def final(self, name: str) -> str:
        """Return the name that a file has in the end."""
        return marked_name(name, self.save_id) if self.marks else name

    def written(self, name: str) -> str:
        """Return the name that a file is written under."""
        return temporary_name(name, self.save_id) if self.renames else self.final(name)


def can_rename(store: Store) -> bool:
    """Say whether files of a place can be given other names."""
    return local_path(store) is not None


def prepare_directory(store: Store) -> ModelDirectory:
    """Make a place ready to be written to: complete what was interrupted, and remove what never will be."""
    path = local_path(store)
    if path is None:
        return stored.prepare_store(store)
    with storage_errors("cannot make", path):
        make_directory(os.path.abspath(path))
    _take_over(store)
    with _alone(path):
        _complete(store)
        _clear(path)
        return list_model(store)


def _take_over(store: Store) -> None:
    """End what somebody began who wrote here as if it were a store."""
    note = read_note(store)
    if note is not None and note.pending:
        stored.prepare_store(store)


def _complete(store: Store) -> str | None:
    """Complete what was interrupted, and return whose it was."""
    note = read_note(store)
    if note is None or note.pending:
        return None
    _finish_renames(store.url, note)
    return note.save_id


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """
    Keep others of this machine from publishing in a directory, or clearing it, where the system can.

    Puts that replace what is there take the same lock, and cannot be made meanwhile.
    """
    with ExitStack() as stack:
        with storage_errors("cannot lock", path):
            stack.enter_context(directory_lock(path))
        yield


def begin_save(store: Store, save_id: str, folder: ModelDirectory) -> SaveNames:
    """
    Begin to write files beside what `prepare` found: until `publish`, only that counts.

    Raises:
        CheckpointExists: another save to the place, which is a store, has begun since.

    """
    if can_rename(store):
        return SaveNames(save_id, renames=True)
    stored.pin_current(store, save_id, folder)
    stored.check_unchanged(store, save_id, folder)
    # Also in an empty place: a save that hung, and is thought to be dead, may go on to write its files.
    return SaveNames(save_id, renames=False, marks=True)


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
    Make files that are complete the contents of a place.

    Args:
        store: the place.
        names: what they are called.
        files: all of them, without marks.
        weights: the file of each tensor, for the index file; None for a place without one.
        total_nbytes: the bytes of all tensors, for the index file.
        replaces_saves: whether files of earlier saves are to go.
        removes: other safetensors files that are to go.

    Raises:
        BlobNotFound: a file is not there; what was in the place is as it was.
        CheckpointExists: another save to the place, which is a store, began meanwhile.

    """
    final = list(map(names.final, files))
    index = b""
    if weights is not None:
        by_tensor = {key: names.final(name) for key, name in weights.items()}
        index = json.dumps({"metadata": {"total_size": total_nbytes}, "weight_map": by_tensor}, indent=2).encode()

    def noted(folder: ModelDirectory) -> PublishNote:
        stale = [name for name in removes if name not in set(final)]
        if replaces_saves:
            stale += [name for name in folder.files if name not in set(final) and made_by_writer(folder, name)]
        return PublishNote(names.save_id, final, list(dict.fromkeys(stale)), weights is not None)

    if can_rename(store):
        _publish(store, names.save_id, files, index, noted)
        return
    folder = list_model(store)
    if not names.marks:  # nobody called `begin`
        stored.pin_current(store, names.save_id, folder)
    stored.check_present(store, final)
    note = noted(folder)
    if index:
        store.put(temporary_name(INDEX_NAME, names.save_id), index, replace=True)
    stored.commit_note(store, note)
    stored.finish_in_store(store, note)


def _publish(
    store: Store, save_id: str, files: Sequence[str], index: bytes, noted: Callable[[ModelDirectory], PublishNote]
) -> None:
    """Publish in a directory of this machine; the index file is empty where there is none."""
    _check_renamed(store, files, save_id)
    if index:
        store.put(temporary_name(INDEX_NAME, save_id), index, replace=True)
    _take_over(store)
    with _alone(store.url):
        if _complete(store) == save_id:  # which may also be of one who died since `prepare`
            return
        _check_renamed(store, files, save_id, [INDEX_NAME] if index else [])  # which others may have cleared
        note = noted(list_model(store))
        _put_note(store, note)
        _finish_renames(store.url, note)


def _put_note(store: Store, note: PublishNote) -> None:
    """Write the note, in one step; also over one of a store's kind."""
    path, written = store.url, temporary_name(NOTE_NAME, note.save_id)
    with storage_errors("cannot publish in", path):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, written))
        store.put(written, note.encode())
        os.replace(os.path.join(path, written), os.path.join(path, NOTE_NAME))
        sync_directory(path)


def _check_renamed(store: Store, files: Sequence[str], save_id: str, others: Sequence[str] = ()) -> None:
    """Make sure that files of this save are there: under temporary names, or in place already, which others cannot be."""
    for name in (*files, *others):
        if os.path.exists(os.path.join(store.url, temporary_name(name, save_id))):
            continue
        final = os.path.join(store.url, name)
        if name in others or not os.path.exists(final) or read_header(final).metadata.get(SAVE_ID_KEY) != save_id:
            raise BlobNotFound(
                f"{final}: a rank says that it wrote this file, but it is not there",
                hint="do all ranks see the same directory, and did no other export or save to it begin meanwhile?",
                file=name,
            )


def made_by_writer(folder: ModelDirectory, name: str) -> bool:
    """Say whether a file is a part of a checkpoint that was saved, and no model that came from elsewhere."""
    if not _MADE_BY_WRITERS.fullmatch(name):
        return False
    try:
        return CUSTOM_METADATA_KEY in read_header(folder.files[name], folder.opens).metadata
    except CheckpointError:
        return False  # what cannot be read is left for its owner to look at


def discard_save(store: Store, save_id: str, *, last: bool = True, unpublished: bool = False) -> bool:
    """
    Remove the files of a save that nobody will publish, and say whether that was so: those of one that a note says is
    there stay.

    Args:
        store: the place.
        save_id: the save.
        last: nobody writes files of it any more.
        unpublished: `publish` was not called, so that its files may go also where another save has taken over.

    """
    note = read_note(store)
    began = note is not None and note.save_id == save_id
    if note is not None and began and not note.pending:
        return False
    if can_rename(store):
        _clear(store.url, save_id)
        return True
    if began or unpublished:
        stored.remove_written(store, save_id)
    if began and last:
        stored.drop_note(store, save_id)
    return True


def _clear(path: str, save_id: str | None = None) -> None:
    """Remove what has a temporary name, of one save or of any."""
    with storage_errors("cannot clear", path):
        for name in os.listdir(path):
            if _TEMPORARY.fullmatch(name) and (save_id is None or name.endswith(temporary_name("", save_id))):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))


def _finish_renames(path: str, note: PublishNote) -> None:
    with storage_errors("cannot publish in", path):
        # Not the new one, which is there already if whoever was interrupted came so far.
        is_old = not note.index or os.path.lexists(os.path.join(path, temporary_name(INDEX_NAME, note.save_id)))
        replaces = any(os.path.lexists(os.path.join(path, name)) for name in note.files)
        if is_old and replaces and len(note.files) > 1:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, INDEX_NAME))
        for name in [*note.files, *([INDEX_NAME] if note.index else [])]:
            # Missing: renamed already, by whoever was interrupted.
            with suppress(FileNotFoundError):
                os.replace(os.path.join(path, temporary_name(name, note.save_id)), os.path.join(path, name))
        for name in [*note.remove, *([] if note.index else [INDEX_NAME])]:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        sync_directory(path)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, NOTE_NAME))
        sync_directory(path)
