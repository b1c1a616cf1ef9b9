"""
From files under temporary names to a model in a directory, in one step.

New files are written as `NAME.new-SAVE`. When all of them are durable, a small note says which files make up the
directory from now on: from then on the new model is what `Folder` sees, and the old one was until then. Renaming to the
final names follows, data first, the index file last; whoever writes to the directory next completes what an
interrupted process left. Only files whose header shows that a checkpoint writer made them, and
those that the caller names, are ever removed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile
from shardkeep.layout.safetensors_files import read_header
from shardkeep.layout.safetensors_names import CUSTOM_METADATA_KEY, INDEX_NAME, SAVE_ID_KEY, SUFFIX
from shardkeep.store.files import make_directory, storage_errors, sync_directory
from shardkeep.store.local import LocalStore
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import Gets, Opens, is_name

NOTE = "shardkeep-publish.json"
"""There only while files are being renamed."""
_MOST_NOTE_NBYTES = 256 << 20
_MADE_BY_WRITERS = re.compile(r"(shard-\d+-)?model-\d+-of-\d+\.safetensors")
_TEMPORARY = re.compile(
    r"((shard-\d+-)?model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?)\.new-[0-9a-f-]+"
)


class Reads(Opens, Gets, Protocol):
    """What reading the files needs."""


@dataclass(frozen=True)
class Folder:
    """What counts in a directory: files by the names they have, or will have."""

    path: str
    files: dict[str, str]
    """Path of each safetensors file, by name."""
    index: str | None
    """Path of the index file."""
    opens: Reads = field(default_factory=lambda: PathStore(direct=False))
    """What opens these paths."""


def look(path: str | os.PathLike[str]) -> Folder:
    """Say what a directory holds; writes nothing."""
    where = os.fspath(path)
    with storage_errors("cannot list", where):
        names = sorted(os.listdir(where))
    files = {name: os.path.join(where, name) for name in names if name.endswith(SUFFIX)}
    index = os.path.join(where, INDEX_NAME) if INDEX_NAME in names else None
    note = _read_note(where) if NOTE in names else None
    if note is not None:
        for name in note["files"]:
            files[name] = _either(where, name, note["save_id"])
        for name in note["remove"]:
            files.pop(name, None)
        index = _either(where, INDEX_NAME, note["save_id"]) if note["index"] else None
    return Folder(where, files, index)


def temporary(name: str, save_id: str) -> str:
    """Return the name that a file has until it is published."""
    return f"{name}.new-{save_id}"


def publish(
    path: str,
    save_id: str,
    names: Sequence[str],
    *,
    weights: Mapping[str, str] | None,
    total_nbytes: int = 0,
    replaces_saves: bool,
    removes: Sequence[str] = (),
) -> None:
    """
    Make files that are complete, under their temporary names, the contents of a directory.

    Args:
        path: the directory.
        save_id: the save they are of.
        names: their final names.
        weights: the file of each tensor, for the index file; None for a directory without one.
        total_nbytes: the bytes of all tensors, for the index file.
        replaces_saves: whether files of earlier saves in the directory are to go.
        removes: other safetensors files that are to go.

    Raises:
        BlobNotFound: a file is not there; what was in the directory is as it was.

    """
    store = LocalStore(path, direct=False)
    for name in names:
        _check_written(path, name, save_id)
    stale = [name for name in removes if name not in set(names)]
    if replaces_saves:
        present = look(path).files.items()
        stale += [name for name, file in present if name not in set(names) and made_by_writer(file, name)]
    if weights is not None:
        index = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(weights)}
        store.put(temporary(INDEX_NAME, save_id), json.dumps(index, indent=2).encode(), replace=True)
    note = {"save_id": save_id, "files": list(names), "remove": stale, "index": weights is not None}
    store.put(NOTE, json.dumps(note).encode(), replace=True)
    _carry_out(path, note)


def _check_written(path: str, name: str, save_id: str) -> None:
    """Make sure that a file of this save is there: under its temporary name, or in place already."""
    if os.path.exists(os.path.join(path, temporary(name, save_id))):
        return
    final = os.path.join(path, name)
    if not os.path.exists(final) or read_header(final).metadata.get(SAVE_ID_KEY) != save_id:
        raise BlobNotFound(
            f"{final}: a rank says that it wrote this file, but it is not there",
            hint="do all ranks see the same directory, and was the plan made for this save?",
            file=name,
        )


def made_by_writer(path: str, name: str) -> bool:
    """Say whether a file is a part of a checkpoint that was saved, and no model that came from elsewhere."""
    if not _MADE_BY_WRITERS.fullmatch(name):
        return False
    try:
        return CUSTOM_METADATA_KEY in read_header(path).metadata
    except CheckpointError:
        return False  # what cannot be read is left for its owner to look at


def prepare(path: str) -> Folder:
    """Make a directory ready to be written to: complete what was interrupted, and remove what never will be."""
    with storage_errors("cannot make", path):
        make_directory(os.path.abspath(path))
    note = _read_note(path)
    if note is not None:
        _carry_out(path, note)
    _clear(path)
    return look(path)


def discard(path: str, save_id: str) -> bool:
    """
    Remove the files of a save that nobody will publish, and say whether that was so: those of one that a note says is
    there stay.
    """
    note = _read_note(path)
    if note is not None and note["save_id"] == save_id:
        return False
    _clear(path, save_id)
    return True


def _clear(path: str, save_id: str | None = None) -> None:
    """Remove what has a temporary name, of one save or of any."""
    with storage_errors("cannot clear", path):
        for name in os.listdir(path):
            if _TEMPORARY.fullmatch(name) and (save_id is None or name.endswith(temporary("", save_id))):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))


def _carry_out(path: str, note: Mapping[str, Any]) -> None:
    with storage_errors("cannot publish in", path):
        for name in [*note["files"], *([INDEX_NAME] if note["index"] else [])]:
            # Missing: renamed already, by whoever was interrupted.
            with suppress(FileNotFoundError):
                os.replace(os.path.join(path, temporary(name, note["save_id"])), os.path.join(path, name))
        for name in [*note["remove"], *([] if note["index"] else [INDEX_NAME])]:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        sync_directory(path)
        os.unlink(os.path.join(path, NOTE))
        sync_directory(path)


def _read_note(path: str) -> dict[str, Any] | None:
    where = os.path.join(path, NOTE)
    try:
        raw = LocalStore(path, direct=False).get(NOTE, limit=_MOST_NOTE_NBYTES)
    except BlobNotFound:
        return None
    checks: dict[str, Callable[[Any], bool]] = {
        "save_id": lambda value: isinstance(value, str) and is_name(value),
        "files": _names,
        "remove": _names,
        "index": lambda value: isinstance(value, bool),
    }
    try:
        note = json.loads(raw)
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict) or not all(key in note and check(note[key]) for key, check in checks.items()):
        raise MalformedFile(f"{where}: this is no note of shardkeep's", hint="delete it", file=where)
    return note


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and is_name(name) and name.endswith(SUFFIX) for name in value
    )


def _either(path: str, name: str, save_id: str) -> str:
    """Return where a file of a noted save is: under its temporary name, or its final one."""
    new = os.path.join(path, temporary(name, save_id))
    return new if os.path.exists(new) else os.path.join(path, name)
