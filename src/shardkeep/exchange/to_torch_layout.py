"""
A checkpoint of any layout written anew in torch's, as `torch.distributed.checkpoint` reads it: tensors whole, streamed.

Names are those that torch's flattening gives the nested state. Digests stand beside the data files, as in every
checkpoint of torch's layout that is saved here; `.metadata` is written last. With codecs, items are streams that pass an
extension, which `shardkeep.dcp` and `open` know and torch does not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from shardkeep.codec.codec_stream import CodecStream
from shardkeep.codec.codecs import CodecConfig
from shardkeep.errors import CheckpointError, CheckpointExists
from shardkeep.exchange.coded_items import check_coded, chunk_nbytes, cut, write_coded
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
from shardkeep.run.key_choice import keys_for
from shardkeep.run.read import Source
from shardkeep.storages.commit import Commit
from shardkeep.storages.commit_place import first_number, place_of
from shardkeep.storages.file_writer import keep_sums
from shardkeep.storages.metadata_files import files_of, metadata_files
from shardkeep.storages.native_view import NativeView, StoredObject
from shardkeep.store.protocol import Store

_FILE_NBYTES = 4 << 30
_LEAST_FILE_NBYTES = 64 << 20
"""Of those that are as small so that each thread has one."""
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
    store: Store,
    source: Source,
    *,
    overwrite: bool,
    codecs: Sequence[str | CodecConfig] | None,
    options: Options,
    progress: Progress | None,
) -> int:
    """
    Write all of a checkpoint into a place, and return the bytes of its data files.

    `codecs` are what its items go through, if any.

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
    coding = CodecStream(codecs, keys=keys_for(options)) if codecs else None
    metadata, items = _described(source, store.url, options, chunk_nbytes(options) if coding else None)
    made: list[str] = []
    try:
        names = _free_names(taken, first_number(place_of(store)))
        if coding is None:
            places, sums = _write(store, items, names, source, options, progress, made)
        else:
            places, sums = _write_coded(store, items, names, source, coding, options, progress, made)
        metadata.storage_data = places
        keep_sums(metadata, sums)
        ready = metadata_files(metadata, METADATA_NAME)
    except BaseException:
        for name in made:
            for each in (name, f"{name}{SUMS_SUFFIX}"):
                with suppress(CheckpointError):
                    store.delete(each)
        raise
    # It takes back its files itself: only it knows whether they were committed.
    Commit(place_of(store)).publish(ready, sums=sums, own=list(sums), keep=files_of(metadata), began_s=began_s)
    return sum(each.nbytes for each in sums.values())


_Places = dict[MetadataIndex, _StorageInfo]


def _write(
    store: Store,
    items: Sequence[_Item],
    names: Iterator[str],
    source: Source,
    options: Options,
    progress: Progress | None,
    made: list[str],
) -> tuple[_Places, dict[str, Sums]]:
    """Write all items as they are; return where they lie, and what is known of their files, which are added to `made`."""
    places: _Places = {}
    files = [_lay_out(next(names), group, places) for group in _groups(items, _FILE_NBYTES)]
    digests, _ = write_streamed(store, files, source, options, progress)
    made += [file.job.name for file in files]
    check_written(store, files, digests, options)
    sums: dict[str, Sums] = {}
    for file, of_file in zip(files, digests, strict=True):
        name = file.job.name
        sums[name], data = encode_sums(file.job.data_nbytes, file.job.block_nbytes, of_file)
        store.put(f"{name}{SUMS_SUFFIX}", data, replace=True)
    return places, sums


def _write_coded(
    store: Store,
    items: Sequence[_Item],
    names: Iterator[str],
    source: Source,
    coding: CodecStream,
    options: Options,
    progress: Progress | None,
    made: list[str],
) -> tuple[_Places, dict[str, Sums]]:
    """Write all items through codecs; a thread has a file to itself."""
    share = -(-sum(item.nbytes for item in items) // options.io_threads)
    groups = _groups(items, min(_FILE_NBYTES, max(share, _LEAST_FILE_NBYTES)))
    named = [(next(names), [(item.name.fqn, item.data) for item in group]) for group in groups]
    files = write_coded(store, named, source, coding, options, progress, made)
    check_coded(store, files, coding, options)
    places = {
        item.name: _StorageInfo(file.name, coded.offset, coded.nbytes, [coding.get_descriptor()])
        for group, file in zip(groups, files, strict=True)
        for item, coded in zip(group, file.items, strict=True)
    }
    return places, {file.name: file.sums for file in files}


def _described(source: Source, to: str, options: Options, most_nbytes: int | None) -> tuple[Metadata, list[_Item]]:
    """
    Return the metadata of the new checkpoint, without places, and all that is to be written: tensors whole, or in chunks
    of at most so many bytes.
    """
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
        row = view.rows[key]
        dtype, box = source.index.dtype(row), whole(tuple(entry.size))
        boxes = [box] if most_nbytes is None else list(cut(box, dtype.itemsize, most_nbytes))
        chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in boxes]
        entries[key] = TensorStorageMetadata(entry.properties, entry.size, chunks)
        for number, (each, chunk) in enumerate(zip(boxes, chunks, strict=True)):
            items.append(_Item(MetadataIndex(key, chunk.offsets, number), StoredPart(key, row, each, dtype)))
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


def _groups(items: Sequence[_Item], most_nbytes: int) -> list[list[_Item]]:
    """Divide items into files of about so many bytes, objects first."""
    groups: list[list[_Item]] = []
    held = 0
    for item in sorted(items, key=lambda item: not isinstance(item.data, bytes)):
        if not groups or held + item.nbytes > most_nbytes:
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
