"""
Safetensors files and their index, as Hugging Face has them, written from an opened checkpoint.

Files are written under temporary names, read back and compared, and only then take their names, the index file last.
What was in the directory before is there until then; if anything fails, nothing is changed.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardkeep.errors import CheckpointError, CheckpointExists, StateError
from shardkeep.exchange.streams import Part, Progress, StoredPart, Streamed, check_written, streamed, write_streamed
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout.safetensors_files import alignment_of, build_header
from shardkeep.layout.safetensors_names import FORMAT_KEY, FORMAT_VALUE, SINGLE_NAME, file_name
from shardkeep.layout.safetensors_publish import Folder, discard, look, prepare, publish, temporary
from shardkeep.layout.torch_files import METADATA_NAME
from shardkeep.options import Options
from shardkeep.run.read import Source
from shardkeep.run.safetensors_catalog import read_weight_map
from shardkeep.store.local import LocalStore
from shardkeep.store.paths import PathStore
from shardkeep.store.protocol import is_name

_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""What else a model's directory may hold that is weights, or speaks of them."""
_MOST_COPIED_NBYTES = 1 << 30


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
    to: str,
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
    Make a directory hold these tensors, in this order, in files of at most `max_shard_bytes` where tensors allow it.

    `metadata` stand in the header of the first file; what is in the directory `config` but weights is copied. With
    `replaces_others` the caller takes away checkpoints of other layouts that are there.

    Raises:
        CheckpointExists: a model is there, and `overwrite` was not given; or a checkpoint of another layout is.

    """
    removes = check_target(to, overwrite=overwrite, replaces_others=replaces_others)
    groups = _groups(tensors, max_shard_bytes)
    names = [SINGLE_NAME] if len(groups) == 1 else [file_name(at + 1, len(groups)) for at in range(len(groups))]
    beside = _Beside(to, config, overwrite=overwrite)
    save_id = str(uuid.uuid4())
    files = [
        _file(name, group, tensors, {FORMAT_KEY: FORMAT_VALUE, **(metadata if name == names[0] else {})})
        for name, group in zip(names, groups, strict=True)
    ]
    is_new = not os.path.isdir(to)
    prepare(to)
    store = LocalStore(to, direct=options.direct_io)
    try:
        hidden = [_renamed(file, temporary(file.job.name, save_id)) for file in files]
        digests, infinite = write_streamed(store, hidden, source, options, progress)
        check_written(store, hidden, digests, options)
        beside.add(store)
        total = sum(part.nbytes for part in tensors.values())
        weights = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        publish(
            to,
            save_id,
            names,
            weights=weights if len(names) > 1 else None,
            total_nbytes=total,
            replaces_saves=False,
            removes=removes,
        )
        beside.replace(store)
    except BaseException:
        if discard(to, save_id):
            beside.take_back(store)
            if is_new:
                with suppress(OSError):  # not empty: somebody else's
                    os.rmdir(to)
        raise
    return Written(names, sum(file.job.nbytes for file in files), infinite)


def check_target(to: str, *, overwrite: bool, replaces_others: bool = False) -> list[str]:
    """Return the safetensors files in a directory that a new model takes the place of."""
    if os.path.exists(to) and not os.path.isdir(to):
        raise CheckpointExists(f"{to} is a file", hint="give a directory")
    if not os.path.isdir(to):
        return []
    for name in () if replaces_others else (RECORD_NAME, METADATA_NAME):
        if os.path.exists(os.path.join(to, name)):
            raise CheckpointExists(
                f"{to}: a checkpoint of another layout is there ({name})",
                hint="give another directory: an export holds less than a checkpoint, and never replaces one",
            )
    found = look(to)
    there = model_files(found)
    if (there or found.index) and not overwrite:
        raise CheckpointExists(
            f"{to}: a model is already there ({', '.join(there[:3]) or found.index})",
            hint="pass overwrite=True (--overwrite) to replace it, or give another directory",
        )
    return there


def model_files(folder: Folder) -> list[str]:
    """Name the files of a directory that are a model's: those that the index file names, and those called like one."""
    named = set(read_weight_map(folder.index).values()) if folder.index else set()
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


class _Beside:
    """What a model needs besides its weights: configuration, tokenizer, code. Read first, so that nothing is missing."""

    def __init__(self, to: str, config: str | None, *, overwrite: bool) -> None:
        found = {} if config is None else _read_all(config)
        there = {name: _read(os.path.join(to, name)) for name in found if os.path.exists(os.path.join(to, name))}
        self._new = {name: data for name, data in found.items() if name not in there}
        self._changed = {name: data for name, data in found.items() if name in there and there[name] != data}
        self._added: list[str] = []
        if self._changed and not overwrite:
            raise CheckpointExists(
                f"{os.path.join(to, next(iter(self._changed)))} is already there, and another one in {config}",
                hint="pass overwrite=True (--overwrite) to replace it",
            )

    def add(self, store: LocalStore) -> None:
        """Write what is not there: before the weights get their names, so that the model is complete."""
        for name, data in self._new.items():
            self._added.append(name)
            store.put(name, data)

    def replace(self, store: LocalStore) -> None:
        """Replace what belonged to the model that was there, which is gone now."""
        for name, data in self._changed.items():
            store.put(name, data, replace=True)
        self._added = []

    def take_back(self, store: LocalStore) -> None:
        """Remove what was added to a directory that has not become a model."""
        for name in self._added:
            with suppress(CheckpointError):
                store.delete(name)


def _read_all(config: str) -> dict[str, bytes]:
    if not os.path.isdir(config):
        raise StateError(f"config={config!r} is no directory", hint="give the directory that has config.json in it")
    found = {}
    for name in sorted(os.listdir(config)):
        path = os.path.join(config, name)
        if os.path.isfile(path) and is_name(name) and not name.startswith(".") and not name.endswith(_WEIGHTS):
            found[name] = _read(path)
    if "config.json" not in found:
        raise StateError(f"{config}: there is no config.json", hint="give the directory that has it")
    return found


def _read(path: str) -> bytes:
    return PathStore(direct=False).get(path, limit=_MOST_COPIED_NBYTES)
