"""
A checkpoint of any layout written anew in torch's, as `torch.distributed.checkpoint` reads it: tensors whole, streamed.

Names are those that torch's flattening gives the nested state. Digests stand beside the data files, as in every
checkpoint of torch's layout that is saved here; `.metadata` is written last.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from shardkeep.errors import CheckpointError, CheckpointExists
from shardkeep.exchange.models import names_in
from shardkeep.exchange.streams import Part, Progress, StoredPart, Streamed, check_written, streamed, write_streamed
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.region import whole
from shardkeep.format.torch_archive import frame_tensor
from shardkeep.layout.torch_files import DATA_SUFFIX, METADATA_NAME, SUMS_SUFFIX, Sums, encode_sums
from shardkeep.options import Options
from shardkeep.protocol.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from shardkeep.protocol.stored_items import CURRENT_DCP_VERSION, _StorageInfo
from shardkeep.run.read import Source
from shardkeep.storages.commit import Commit
from shardkeep.storages.commit_place import first_number, place_of
from shardkeep.storages.file_writer import keep_sums
from shardkeep.storages.metadata_files import files_of, metadata_files
from shardkeep.storages.native_view import NativeView, StoredObject
from shardkeep.store.protocol import Store

_FILE_NBYTES = 4 << 30
_ALIGNMENT = 4096
"""Where a tensor's bytes begin: on a page, for direct I/O."""


class _Item(NamedTuple):
    name: MetadataIndex
    data: bytes | StoredPart
    """An object as `torch.save` writes it, or a tensor."""

    @property
    def nbytes(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes


def write_torch_layout(
    store: Store, source: Source, *, overwrite: bool, options: Options, progress: Progress | None
) -> int:
    """
    Write all of a checkpoint into a place, and return the bytes of its data files.

    Raises:
        CheckpointExists: one is there, and `overwrite` was not given.
        PickleRefused: a value was pickled, and may not be unpickled here.

    """
    taken = set(names_in(store))
    if not overwrite and (found := [name for name in (METADATA_NAME, RECORD_NAME) if name in taken]):
        raise CheckpointExists(
            f"{store.url}: a checkpoint is already there ({found[0]})",
            hint="pass overwrite=True (--overwrite) to replace it, or give another place",
        )
    began_s = time.time()
    metadata, items = _described(source, store.url, options)
    files: list[Streamed] = []
    places: dict[MetadataIndex, _StorageInfo] = {}
    names = _free_names(taken, first_number(place_of(store)))
    for group in _groups(items):
        name = next(names)
        files.append(_lay_out(name, group, places))
    digests, _ = write_streamed(store, files, source, options, progress)
    made = [file.job.name for file in files]
    try:
        check_written(store, files, digests, options)
        sums: dict[str, Sums] = {}
        for file, of_file in zip(files, digests, strict=True):
            name = file.job.name
            sums[name], data = encode_sums(file.job.data_nbytes, file.job.block_nbytes, of_file)
            made.append(f"{name}{SUMS_SUFFIX}")
            store.put(made[-1], data, replace=True)
        metadata.storage_data = places
        keep_sums(metadata, sums)
        ready = metadata_files(metadata, METADATA_NAME)
    except BaseException:
        for name in made:
            with suppress(CheckpointError):
                store.delete(name)
        raise
    # It takes back its files itself: only it knows whether they were committed.
    Commit(place_of(store)).publish(ready, sums=sums, own=list(sums), keep=files_of(metadata), began_s=began_s)
    return sum(file.job.nbytes for file in files)


def _described(source: Source, to: str, options: Options) -> tuple[Metadata, list[_Item]]:
    """Return the metadata of the new checkpoint, without places, and all that is to be written."""
    view = NativeView(source, to)
    seen = view.metadata()
    entries: dict[str, Any] = {}
    items: list[_Item] = []
    for index, place in seen.storage_data.items():
        if isinstance(place, StoredObject):
            entries[index.fqn] = BytesStorageMetadata()
            items.append(_Item(MetadataIndex(index.fqn), view.saved_object(place, options).getvalue()))
    paths = seen.planner_data
    for key, entry in seen.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        begin = torch.Size([0] * len(entry.size))
        entries[key] = TensorStorageMetadata(entry.properties, entry.size, [ChunkStorageMetadata(begin, entry.size)])
        row = view.rows[key]
        part = StoredPart(key, row, whole(tuple(entry.size)), source.index.dtype(row))
        items.append(_Item(MetadataIndex(key, begin, 0), part))
    made = {key: entries[key] for key in seen.state_dict_metadata}  # in the order of the state
    meta = StorageMeta(checkpoint_id=to, save_id=str(uuid.uuid4()))
    return Metadata(made, planner_data=paths, storage_meta=meta, version=CURRENT_DCP_VERSION), items


def _free_names(taken: Collection[str], number: int) -> Iterator[str]:
    """Give names of data files that are not taken: by a checkpoint that must stay whole until this one is."""
    while True:
        name = f"__0_{number}{DATA_SUFFIX}"
        if name not in taken:
            yield name
        number += 1


def _groups(items: Sequence[_Item]) -> list[list[_Item]]:
    """Divide items into files of some gigabytes, objects first."""
    groups: list[list[_Item]] = []
    held = 0
    for item in sorted(items, key=lambda item: not isinstance(item.data, bytes)):
        if not groups or held + item.nbytes > _FILE_NBYTES:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += item.nbytes
    return groups


def _lay_out(name: str, items: Sequence[_Item], places: dict[MetadataIndex, _StorageInfo]) -> Streamed:
    parts: list[Part] = []
    at = 0
    for item in items:
        offset = at
        if isinstance(item.data, bytes):
            parts.append(memoryview(item.data))
            at += len(item.data)
            places[item.name] = _StorageInfo(name, offset, at - offset)
            continue
        frame = frame_tensor(item.data.dtype, item.data.box.sizes, at=offset, alignment=_ALIGNMENT)
        start = offset + len(frame.head)
        parts += [memoryview(frame.head), item.data, memoryview(frame.tail)]
        at = start + item.data.nbytes + len(frame.tail)
        places[item.name] = _StorageInfo(name, offset, at - offset)
        places[item.name].keep_data_start(start)
    return streamed(name, parts)
