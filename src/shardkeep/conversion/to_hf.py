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

from shardkeep.conversion.pipeline import (
    FileParts,
    Progress,
    TensorPart,
    file_parts,
    verify_written,
    write_parts,
)
from shardkeep.engine.reader import Source
from shardkeep.engine.safetensors_source import find_safetensors, is_single_file, read_weight_map
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, StateError, UnsupportedLeaf
from shardkeep.format.boxes import whole
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.tree import decode_tree, leaf_keys
from shardkeep.layouts.safetensors import (
    FORMAT_KEY,
    FORMAT_VALUE,
    SINGLE_NAME,
    STATE_KEY,
    HeaderState,
    alignment_of,
    build_header,
    encode_header_state,
    file_name,
    to_text,
)
from shardkeep.layouts.safetensors_publish import (
    ModelDirectory,
    SaveNames,
    begin_save,
    can_rename,
    discard_save,
    list_model,
    prepare_directory,
    publish_model,
)
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.options import Options
from shardkeep.storage.base import Store, is_name, local_path
from shardkeep.storage.local import PathStore
from shardkeep.storage.resolve import open_store
from shardkeep.storage.system import storage_errors

# What a model needs besides its weights: configuration, tokenizer, code, copied from one place to another.

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""What else a model's place may hold that is weights, or speaks of them."""
_MOST_COPIED_NBYTES = 1 << 30


class CompanionFiles:
    """Files to copy. They are read first, so that nothing is missing in the end."""

    def __init__(self, store: Store, config: str | None, *, overwrite: bool) -> None:
        found = {} if config is None else _read_all(config)
        there = {name: data for name in found if (data := _read(store, name)) is not None}
        self._new = {name: data for name, data in found.items() if name not in there}
        self._changed = {name: data for name, data in found.items() if name in there and there[name] != data}
        self._added: list[str] = []
        if self._changed and not overwrite:
            raise CheckpointExists(
                f"{store.url}/{next(iter(self._changed))} is already there, and another one in {config}",
                hint="pass overwrite=True (--overwrite) to replace it",
            )

    def add(self, store: Store) -> None:
        """Write what is not there: before the weights get their names, so that the model is complete."""
        for name, data in self._new.items():
            self._added.append(name)
            store.put(name, data)

    def replace(self, store: Store) -> None:
        """Replace what belonged to the model that was there, which is gone now."""
        for name, data in self._changed.items():
            store.put(name, data, replace=True)
        self._added = []

    def take_back(self, store: Store) -> None:
        """Remove what was added to a place that has not become a model."""
        for name in self._added:
            with suppress(CheckpointError):
                store.delete(name)


def _read_all(config: str) -> dict[str, bytes]:
    """Read all files of a place but weights."""
    place = open_store(config, direct=False)
    if local_path(place) is not None and not os.path.isdir(place.url):
        raise StateError(f"config={config!r} is no directory", hint="give the directory that has config.json in it")
    found: dict[str, bytes] = {}
    for name in _names(place):
        if is_name(name) and not name.startswith(".") and not name.endswith(_WEIGHTS):
            data = _read(place, name)
            found |= {} if data is None else {name: data}
    if "config.json" not in found:
        raise StateError(f"{config}: there is no config.json", hint="give the place that has it")
    return found


def _names(place: Store) -> list[str]:
    if local_path(place) is None:
        return [info.name for info in place.list()]
    # Through links, as in a Hugging Face cache.
    return [name for name in sorted(os.listdir(place.url)) if os.path.isfile(os.path.join(place.url, name))]


def _read(place: Store, name: str) -> bytes | None:
    """Read a file; None where there is none."""
    try:
        if local_path(place) is not None:
            return PathStore(direct=False).get(os.path.join(place.url, name), limit=_MOST_COPIED_NBYTES)
        return place.get(name, limit=_MOST_COPIED_NBYTES)
    except BlobNotFound:
        return None


_MODEL = re.compile(r"model(-\d+-of-\d+(-[0-9a-f]{8})?)?\.safetensors")


@dataclass(frozen=True)
class WrittenModel:
    """What was written."""

    files: list[str]
    """Names, in order."""
    nbytes: int
    """Of the files together."""
    infinite: set[str]
    """Keys of tensors of which finite numbers became infinite when they were converted."""


def write_model(
    store: Store,
    tensors: Mapping[str, TensorPart],
    source: Source,
    *,
    max_shard_bytes: float,
    metadata: Mapping[str, str],
    config: str | None,
    overwrite: bool,
    options: Options,
    progress: Progress | None,
    replaces_others: bool = False,
) -> WrittenModel:
    """
    Make a place hold these tensors, in this order, in files of at most `max_shard_bytes` where tensors allow it.

    `metadata` stand in the header of the first file; what is in the place `config` but weights is copied. With
    `replaces_others` the caller takes away checkpoints of other layouts that are there.

    Raises:
        CheckpointExists: a model is there, and `overwrite` was not given; or a checkpoint of another layout is.

    """
    check_target(store, overwrite=overwrite, replaces_others=replaces_others)
    groups = _groups(tensors, max_shard_bytes)
    single = len(groups) == 1 and can_rename(store)
    names = [SINGLE_NAME] if single else [file_name(at + 1, len(groups)) for at in range(len(groups))]
    beside = CompanionFiles(store, config, overwrite=overwrite)
    save_id = str(uuid.uuid4())
    files = [
        model_file(name, {key: tensors[key] for key in group}, metadata if name == names[0] else {})
        for name, group in zip(names, groups, strict=True)
    ]
    is_new = local_path(store) is not None and not os.path.isdir(store.url)
    folder = prepare_directory(store)
    removes = _replaced(folder, overwrite=overwrite)  # once more: what was under way a moment ago may be a model now
    called = begin_save(store, save_id, folder)
    complete = False
    try:
        infinite = write_model_files(store, called, files, source, options, progress)
        beside.add(store)
        total = sum(part.nbytes for part in tensors.values())
        weights = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        complete = True
        publish_model(
            store,
            called,
            names,
            weights=None if single else weights,
            total_nbytes=total,
            replaces_saves=False,
            removes=removes,
        )
    except BaseException:
        if discard_save(store, save_id, unpublished=not complete):
            beside.take_back(store)
            if is_new:
                with suppress(OSError):  # not empty: somebody else's
                    os.rmdir(store.url)
        raise
    beside.replace(store)
    return WrittenModel(list(map(called.final, names)), sum(file.job.nbytes for file in files), infinite)


def check_target(store: Store, *, overwrite: bool, replaces_others: bool = False) -> None:
    """Refuse a place that a new model cannot go to."""
    to = store.url
    if is_single_file(store):
        raise CheckpointExists(f"{to} is a file", hint="give a directory")
    try:
        found = list_model(store)
    except BlobNotFound:
        return
    for name in () if replaces_others else (RECORD_NAME, METADATA_NAME):
        if name in names_in(store):
            raise CheckpointExists(
                f"{to}: a checkpoint of another layout is there ({name})",
                hint="give another place: an export holds less than a checkpoint, and never replaces one",
            )
    _replaced(found, overwrite=overwrite)


def _replaced(folder: ModelDirectory, *, overwrite: bool) -> list[str]:
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
    if local_path(store) is None:
        return [info.name for info in store.list()]
    try:
        with storage_errors("cannot list", store.url):
            return sorted(os.listdir(store.url))
    except (FileNotFoundError, NotADirectoryError):
        return []


def model_files(folder: ModelDirectory) -> list[str]:
    """Name the files of a place that are a model's: those that the index file names, and those called like one."""
    named = set(read_weight_map(folder.index, folder.opens).values()) if folder.index else set()
    return sorted(name for name in folder.files if name in named or _MODEL.fullmatch(name))


def _groups(tensors: Mapping[str, TensorPart], most_nbytes: float) -> list[list[str]]:
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


def model_file(name: str, tensors: Mapping[str, TensorPart], metadata: Mapping[str, str]) -> FileParts:
    """Lay out a safetensors file of these tensors, each aligned to its elements."""
    inorder = sorted(tensors, key=lambda key: -alignment_of(tensors[key].nbytes))
    described = {key: (tensors[key].dtype, tensors[key].box.sizes) for key in inorder}
    header = build_header(described, {FORMAT_KEY: FORMAT_VALUE, **metadata}, where=name)
    return file_parts(name, [memoryview(header), *(tensors[key] for key in inorder)])


def write_model_files(
    store: Store,
    names: SaveNames,
    files: Sequence[FileParts],
    source: Source,
    options: Options,
    progress: Progress | None = None,
) -> set[str]:
    """
    Write files under the names that `names` gives them before they are published, and read them back.

    Returns:
        Keys of tensors with finite numbers that became infinite when they were converted.

    Raises:
        ChecksumMismatch: a file does not hold what was written.

    """
    written = [replace(file, job=replace(file.job, name=names.written(file.job.name))) for file in files]
    digests, infinite = write_parts(store, written, source, options, progress)
    verify_written(store, written, digests, options)
    return infinite


# A checkpoint of any layout written anew as safetensors files: tensors under their flat names, and all else in a
# header.
#
# What safetensors cannot hold stands in the metadata of the first file (`layout.safetensors_state`): nesting, plain
# values, ties, step and meta. So nothing is lost on the way there and back, and other tools see the tensors alone.


def write_safetensors(
    store: Store,
    source: Source,
    *,
    max_shard_bytes: float,
    overwrite: bool,
    options: Options,
    progress: Progress | None,
) -> int:
    """
    Write all of a checkpoint into a place, and return the bytes of its files.

    Raises:
        UnsupportedLeaf: a tensor is of a dtype that safetensors does not have.
        CheckpointExists: a checkpoint is there, and `overwrite` was not given.

    """
    tensors = _tensors(source)
    kept = encode_header_state(_state(source))
    written = write_model(
        store,
        tensors,
        source,
        max_shard_bytes=max_shard_bytes,
        metadata={STATE_KEY: kept},
        config=None,
        overwrite=overwrite,
        options=options,
        progress=progress,
        replaces_others=True,
    )
    _check_opens(store, source, options)
    return written.nbytes


def _check_opens(store: Store, source: Source, options: Options) -> None:
    """Insist that the place, with all that lies in it, is opened as what was converted."""
    found = find_safetensors(store)
    meant = source.index
    if found is not None:
        index = found.open(options).index
        if (index.tree, set(index.tensor_rows), set(index.value_rows)) == (
            meant.tree,
            set(meant.tensor_rows),
            set(meant.value_rows),
        ):
            return
    raise CheckpointError(
        f"{store.url}: the files were written, but other files there keep them from being opened as one checkpoint",
        hint="convert into an empty place",
    )


def _tensors(source: Source) -> dict[str, TensorPart]:
    index = source.index
    parts: dict[str, TensorPart] = {}
    for key in leaf_keys(decode_tree(index.tree)):
        row = index.tensor_rows.get(key)
        if row is None or int(index.tensors.alias[row]) != row:
            continue
        dtype, shape = index.dtype(row), index.shape(row)
        if dtype.safetensors is None or (dtype.packed > 1 and not shape):
            raise UnsupportedLeaf(
                f"{key!r} is of dtype {dtype.name}, which safetensors files cannot hold",
                hint=f"leave it out: drop={key!r} (--drop)",
                key=key,
            )
        if key == "__metadata__":
            raise UnsupportedLeaf("safetensors files cannot hold a tensor called '__metadata__'", key=key)
        parts[key] = TensorPart(key, row, whole(shape), dtype)
    return parts


def _state(source: Source) -> HeaderState:
    index, record = source.index, source.record
    alias = index.tensors.alias.tolist()
    rows = index.tensor_rows
    names = list(rows)
    return HeaderState(
        step=record.step,
        meta=record.meta,
        tree=to_text(index.tree),
        values={key: to_text(index.value_data.raw(row)) for key, row in index.value_rows.items()},
        numpy=[key for key, row in rows.items() if int(index.tensors.origin[row]) == 1],
        ties={key: names[alias[row]] for key, row in rows.items() if alias[row] != row},
    )
