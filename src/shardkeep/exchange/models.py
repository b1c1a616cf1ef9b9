"""
Safetensors files and their index, as Hugging Face has them, written from an opened checkpoint.

Files are written beside what is there, read back and compared, and only then are the model of the place, the index file
last. What was there before is there until then; if anything fails, nothing is changed. In a store, which cannot rename,
the files of each export have names of their own, also if there is only one file: the index file tells readers.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardkeep.errors import BlobNotFound, CheckpointExists, StateError
from shardkeep.exchange.beside import Beside
from shardkeep.exchange.streams import Part, Progress, StoredPart, Streamed, check_written, streamed, write_streamed
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.safetensors_files import alignment_of, build_header
from shardkeep.layout.safetensors_folder import Folder, look
from shardkeep.layout.safetensors_names import FORMAT_KEY, FORMAT_VALUE, SINGLE_NAME, file_name
from shardkeep.layout.safetensors_publish import begin, discard, prepare, publish, renames_in
from shardkeep.layout.torch_files import METADATA_NAME
from shardkeep.options import Options
from shardkeep.run.read import Source
from shardkeep.run.safetensors_catalog import read_weight_map
from shardkeep.run.safetensors_open import is_single_file
from shardkeep.store.files import storage_errors
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import Store

_MODEL = re.compile(r"model(-\d+-of-\d+(-[0-9a-f]{8})?)?\.safetensors")


@dataclass(frozen=True)
class Written:
    """What was written."""

    files: list[str]
    """Names, in order."""
    nbytes: int
    """Of the files together."""
    infinite: set[str]
    """Keys of tensors of which finite numbers became infinite when they were converted."""


def write_model(
    store: Store,
    tensors: Mapping[str, StoredPart],
    source: Source,
    *,
    max_shard_bytes: float,
    metadata: Mapping[str, str],
    config: str | None,
    overwrite: bool,
    options: Options,
    progress: Progress | None,
    replaces_others: bool = False,
) -> Written:
    """
    Make a place hold these tensors, in this order, in files of at most `max_shard_bytes` where tensors allow it.

    `metadata` stand in the header of the first file; what is in the place `config` but weights is copied. With
    `replaces_others` the caller takes away checkpoints of other layouts that are there.

    Raises:
        CheckpointExists: a model is there, and `overwrite` was not given; or a checkpoint of another layout is.

    """
    check_target(store, overwrite=overwrite, replaces_others=replaces_others)
    groups = _groups(tensors, max_shard_bytes)
    single = len(groups) == 1 and renames_in(store)
    names = [SINGLE_NAME] if single else [file_name(at + 1, len(groups)) for at in range(len(groups))]
    beside = Beside(store, config, overwrite=overwrite)
    save_id = str(uuid.uuid4())
    files = [
        _file(name, group, tensors, {FORMAT_KEY: FORMAT_VALUE, **(metadata if name == names[0] else {})})
        for name, group in zip(names, groups, strict=True)
    ]
    is_new = isinstance(store, LocalStore) and not os.path.isdir(store.url)
    folder = prepare(store)
    removes = _replaced(folder, overwrite=overwrite)  # once more: what was under way a moment ago may be a model now
    called = begin(store, save_id, folder)
    complete = False
    try:
        written = [_renamed(file, called.written(file.job.name)) for file in files]
        digests, infinite = write_streamed(store, written, source, options, progress)
        check_written(store, written, digests, options)
        beside.add(store)
        total = sum(part.nbytes for part in tensors.values())
        weights = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        complete = True
        publish(
            store,
            called,
            names,
            weights=None if single else weights,
            total_nbytes=total,
            replaces_saves=False,
            removes=removes,
        )
    except BaseException:
        if discard(store, save_id, unpublished=not complete):
            beside.take_back(store)
            if is_new:
                with suppress(OSError):  # not empty: somebody else's
                    os.rmdir(store.url)
        raise
    beside.replace(store)
    return Written(list(map(called.final, names)), sum(file.job.nbytes for file in files), infinite)


def check_target(store: Store, *, overwrite: bool, replaces_others: bool = False) -> None:
    """Refuse a place that a new model cannot go to."""
    to = store.url
    if is_single_file(store):
        raise CheckpointExists(f"{to} is a file", hint="give a directory")
    try:
        found = look(store)
    except BlobNotFound:
        return
    for name in () if replaces_others else (RECORD_NAME, METADATA_NAME):
        if name in names_in(store):
            raise CheckpointExists(
                f"{to}: a checkpoint of another layout is there ({name})",
                hint="give another place: an export holds less than a checkpoint, and never replaces one",
            )
    _replaced(found, overwrite=overwrite)


def _replaced(folder: Folder, *, overwrite: bool) -> list[str]:
    """Return the safetensors files of a place that a new model takes the place of."""
    there = model_files(folder)
    if (there or folder.index) and not overwrite:
        raise CheckpointExists(
            f"{folder.path}: a model is already there ({', '.join(there[:3]) or folder.index})",
            hint="pass overwrite=True (--overwrite) to replace it, or give another place",
        )
    return there


def names_in(store: Store) -> list[str]:
    """Name all that is in a place, also links; a directory that does not exist has nothing."""
    if not isinstance(store, LocalStore):
        return [info.name for info in store.list()]
    try:
        with storage_errors("cannot list", store.url):
            return sorted(os.listdir(store.url))
    except (FileNotFoundError, NotADirectoryError):
        return []


def model_files(folder: Folder) -> list[str]:
    """Name the files of a place that are a model's: those that the index file names, and those called like one."""
    named = set(read_weight_map(folder.index, folder.opens).values()) if folder.index else set()
    return sorted(name for name in folder.files if name in named or _MODEL.fullmatch(name))


def _groups(tensors: Mapping[str, StoredPart], most_nbytes: float) -> list[list[str]]:
    """Divide tensors into files, in order; one that is larger than a file may be has one to itself."""
    if not most_nbytes > 0:
        raise StateError(f"max_shard_bytes={most_nbytes}", hint="give a number of bytes above 0")
    groups: list[list[str]] = [[]]
    held = 0
    for key, part in tensors.items():
        if groups[-1] and held + part.nbytes > most_nbytes:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += part.nbytes
    return groups


def _file(name: str, group: Sequence[str], tensors: Mapping[str, StoredPart], metadata: Mapping[str, str]) -> Streamed:
    inorder = sorted(group, key=lambda key: -alignment_of(tensors[key].nbytes))
    parts: list[Part] = [tensors[key] for key in inorder]
    described = {key: (tensors[key].dtype, tensors[key].box.sizes) for key in inorder}
    header = build_header(described, metadata, where=name)
    return streamed(name, [memoryview(header), *parts])


def _renamed(file: Streamed, name: str) -> Streamed:
    return replace(file, job=replace(file.job, name=name))
