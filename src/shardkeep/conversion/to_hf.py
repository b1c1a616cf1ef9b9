"""
Writes a checkpoint as safetensors files with an index, as Hugging Face has them.

Files are written, read back, compared, and then published by `layouts.safetensors_publish`. An export writes tensors alone.
A conversion also keeps what safetensors cannot hold (nesting, plain values, ties, step and meta) in the header of the first
file: nothing is lost, and other tools see the tensors.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec

from shardkeep.conversion import pipeline
from shardkeep.conversion.select import Selection
from shardkeep.engine.reader import Source
from shardkeep.engine.safetensors_source import read_weight_map
from shardkeep.engine.torch_source import item_batches
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, StateError
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.values import encode_tree
from shardkeep.layouts import orphans, safetensors, safetensors_publish
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.options import Size, parse_size
from shardkeep.storage.base import Store, is_name, is_single_file, local_path, with_any_names
from shardkeep.storage.local import storage_errors
from shardkeep.storage.resolve import open_store

_MODEL = re.compile(r"model(-\d+-of-\d+(-[0-9a-f]{8})?)?\.safetensors")


def write_model(
    store: Store,
    tensors: Mapping[str, pipeline.TensorPart],
    source: Source,
    how: pipeline.WriteArguments,
    *,
    max_shard_bytes: Size,
    metadata: Mapping[str, str],
    config: str | None = None,
    replaces_others: bool = False,
) -> pipeline.Written:
    """Make tensors the model of a place; `metadata` goes into the first file, and files beside `config` are copied."""

    def lay_out() -> dict[str, list[str]]:
        if not (most_nbytes := parse_size(max_shard_bytes, "max_shard_bytes")):
            raise StateError(f"max_shard_bytes={max_shard_bytes!r}", hint="give a size above 0")
        # In order; a tensor that is larger than a file may be has a file of its own.
        groups = [*item_batches(tensors, lambda key: tensors[key].nbytes, most_nbytes=most_nbytes)] or [[]]
        names = [safetensors.file_name(at + 1, len(groups)) for at in range(len(groups))]
        single = len(names) == 1 and safetensors_publish.can_rename(store)
        return dict(zip([safetensors.SINGLE_NAME] if single else names, groups, strict=True))

    in_file = how.team.alike("lay out", lay_out, lambda in_file: in_file)
    files = [
        model_file(name, {key: tensors[key] for key in group}, metadata if name == next(iter(in_file)) else {})
        for name, group in in_file.items()
    ]
    weights = {key: name for name, group in in_file.items() for key in group}
    changed: dict[str, bytes] = {}  # of the files beside the model; on rank 0

    def begin() -> Place:
        if is_single_file(store):
            raise CheckpointExists(f"{store.url} is a file", hint="give a directory")
        others = set() if replaces_others else {RECORD_NAME, METADATA_NAME}.intersection(names_in(store))
        if others:
            raise CheckpointExists(
                f"{store.url}: a checkpoint of another layout is there ({others.pop()})",
                hint="give another place: an export holds less than a checkpoint, and never replaces one",
            )
        with suppress(BlobNotFound):  # before anything changes there: another save may be under way
            _replaced(safetensors_publish.list_model(store), overwrite=how.overwrite)
        new, other = _companions(store, config, overwrite=how.overwrite)
        changed.update(other)
        folder = safetensors_publish.prepare_directory(store)
        return Place(folder, _replaced(folder, overwrite=how.overwrite), new)

    written = write_and_publish(
        store, files, None if safetensors.SINGLE_NAME in in_file else weights, source, how, begin=begin
    )
    for name, data in changed.items():
        store.put(name, data, replace=True)
    return written


class Place(NamedTuple):
    folder: safetensors_publish.ModelDirectory
    removes: list[str]
    beside: Mapping[str, bytes] = {}


def write_and_publish(
    store: Store,
    files: Sequence[pipeline.FileParts],
    weights: Mapping[str, str] | None,
    source: Source,
    how: pipeline.WriteArguments,
    *,
    begin: Callable[[], Place],
) -> pipeline.Written:
    """
    Make files the model of a place: each rank writes some and reads them back, and rank 0 publishes them.

    `weights` is as in `publish_model`; `begin` prepares the place, on rank 0. If anything fails, the place is unchanged.
    """
    team, names, save_id = how.team, [file.job.name for file in files], ""
    place: list[Place] = []  # on rank 0
    is_new = local_path(store) is not None and not os.path.isdir(store.url)
    handed_over, added = False, list[str]()

    def begin_on_rank_0() -> safetensors_publish.SaveNames:
        nonlocal save_id
        place.append(begin())
        save_id = str(uuid.uuid4())
        return safetensors_publish.begin_save(store, save_id, place[0].folder)

    def write() -> set[int]:
        mine = team.share(files, lambda file: file.job.nbytes)
        mine = [replace(file, job=replace(file.job, name=called.written(file.job.name))) for file in mine]
        digests, infinite = pipeline.write_parts(store, mine, source, how.options, how.progress)
        pipeline.verify_written(store, mine, digests, how.options)
        for name, data in place[0].beside.items() if place else ():  # before the weights: then the model is complete
            store.put(name, data)
            added.append(name)  # now: one that is there already belongs to another process
        return infinite

    def publish() -> pipeline.Written:
        parts = [part for file in files for part in file.parts if isinstance(part, pipeline.TensorPart)]
        safetensors_publish.publish_model(
            store,
            called,
            names,
            weights=weights,
            total_nbytes=sum(part.nbytes for part in parts),
            replaces_saves=False,
            removes=place[0].removes,
        )
        nbytes = sum(file.job.nbytes for file in files)
        return pipeline.Written(list(map(called.final, names)), nbytes, set().union(*infinite))

    try:
        # Inside the block: when rank 0 is interrupted before it has its answer, the others may write already.
        called = team.on_rank_0("begin", begin_on_rank_0, safetensors_publish.SaveNames)
        save_id = called.save_id
        infinite = team.gather("write", write, set[int])
        handed_over = True  # from here on the files may be those of a published model, and only rank 0 knows
        return team.on_rank_0("publish", publish, pipeline.Written)
    except BaseException as error:
        if team.leads:
            last, unpublished = team.has_ended(error), not handed_over
            removed = not save_id or safetensors_publish.discard_save(
                store, save_id, last=last, unpublished=unpublished
            )
            orphans.discard(store, added if removed else ())
            if removed and is_new:
                with suppress(OSError):  # not empty: another process uses it
                    os.rmdir(store.url)
        elif save_id and not handed_over:
            with suppress(CheckpointError):  # rank 0 may have removed all of it
                safetensors_publish.discard_save(store, save_id, last=False, unpublished=True)
        raise


def _replaced(folder: safetensors_publish.ModelDirectory, *, overwrite: bool) -> list[str]:
    there = model_files(folder)
    if (there or folder.index) and not overwrite:
        raise pipeline.already_there(folder.path, "a model", ", ".join(there[:3]) or str(folder.index))
    return there


def names_in(store: Store) -> list[str]:
    """Name all files of a place, links included; a directory that does not exist has none."""
    if local_path(store) is None:
        return [info.name for info in store.list()]
    try:
        with storage_errors("cannot list", store.url):
            return sorted(os.listdir(store.url))
    except (FileNotFoundError, NotADirectoryError):
        return []


def model_files(folder: safetensors_publish.ModelDirectory) -> list[str]:
    """Name those that the index file names, and those that are named like one."""
    named = set(read_weight_map(folder.index, folder.opens).values()) if folder.index else set()
    return sorted(name for name in folder.files if name in named or _MODEL.fullmatch(name))


def model_file(
    name: str, tensors: Mapping[str, pipeline.TensorPart], metadata: Mapping[str, str]
) -> pipeline.FileParts:
    inorder = sorted(tensors, key=lambda key: -safetensors.alignment_of(tensors[key].nbytes))
    described = {key: (tensors[key].dtype, tensors[key].box.sizes) for key in inorder}
    header = safetensors.build_model_header(
        described, {safetensors.FORMAT_KEY: safetensors.FORMAT_VALUE, **metadata}, where=name
    )
    return pipeline.file_parts(name, [memoryview(header), *(tensors[key] for key in inorder)])


def state_metadata(chosen: Selection, source: Source) -> dict[str, str]:
    """Return what a file says of a state besides its tensors, so that nothing of it is lost."""
    index, record = source.index, source.record
    rows = index.tensor_rows
    state = safetensors.HeaderState(
        step=record.step,
        meta=record.meta,
        tree=encode_tree(chosen.tree),
        values={key: index.value_data.raw(index.value_rows[key]) for key in chosen.values},
        numpy=[key for key in (*chosen.tensors, *chosen.ties) if int(index.tensors.origin[rows[key]]) == 1],
        ties=chosen.ties,
    )
    return {safetensors.STATE_KEY: msgspec.json.encode(state).decode()}


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Suffixes of weights, and of files that describe them."""
_MOST_COPIED_NBYTES = 1 << 30


def _companions(store: Store, config: str | None, *, overwrite: bool) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Read all files to copy beside a model, first, so that none is missing in the end: new ones, and changed ones."""
    found = {} if config is None else _read_all(config)
    there = {name: data for name in found if (data := _read(store, name)) is not None}
    changed = {name: data for name, data in found.items() if name in there and there[name] != data}
    if changed and not overwrite:
        raise CheckpointExists(
            f"{store.url}/{next(iter(changed))} is already there, and another one in {config}",
            hint="pass overwrite=True to replace it",
        )
    return {name: data for name, data in found.items() if name not in there}, changed


def _read_all(config: str) -> dict[str, bytes]:
    place = open_store(config, direct=False)
    if local_path(place) is not None and not os.path.isdir(place.url):
        raise StateError(f"config={config!r} is no directory", hint="give the directory that has config.json in it")
    found: dict[str, bytes] = {}
    for name in names_in(place):  # links included, as in a Hugging Face cache
        is_file = local_path(place) is None or os.path.isfile(os.path.join(place.url, name))
        if is_file and is_name(name) and not name.startswith(".") and not name.endswith(_WEIGHTS):
            data = _read(place, name)
            found |= {} if data is None else {name: data}
    if "config.json" not in found:
        raise StateError(f"{config}: there is no config.json", hint="give the place that has it")
    return found


def _read(place: Store, name: str) -> bytes | None:
    try:
        return with_any_names(place).get(name, limit=_MOST_COPIED_NBYTES)
    except BlobNotFound:
        return None
