"""
A checkpoint of any layout written anew in torch's, as `torch.distributed.checkpoint` reads it: tensors whole, streamed.

Names are those that torch's flattening gives the nested state. Digests stand beside the data files, as in every
checkpoint of torch's layout that is saved here; `.metadata` is written last. With codecs, items are streams that pass an
extension, which `shardkeep.dcp` and `open` know and torch does not.
"""

from __future__ import annotations

import io
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash

from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.stream_extensions import CodecStream, transformed_output
from shardkeep.conversion.pipeline import (
    FileParts,
    Part,
    PartReader,
    Progress,
    TensorPart,
    file_parts,
    verify_written,
    write_parts,
)
from shardkeep.conversion.to_hf import names_in
from shardkeep.engine.codecs import keys_for
from shardkeep.engine.reader import Source
from shardkeep.engine.torch_source import Item, ItemFiles, read_items
from shardkeep.engine.torch_view import StoredObject, TorchView
from shardkeep.engine.torch_writer import HashingStream
from shardkeep.engine.workers import run_workers, window_for
from shardkeep.errors import CheckpointError, CheckpointExists, ChecksumMismatch
from shardkeep.format.boxes import Box, whole
from shardkeep.format.record import RECORD_NAME
from shardkeep.format.torch_zip import frame_tensor
from shardkeep.layouts.torch import DATA_SUFFIX, METADATA_NAME, SUMS_SUFFIX, Sums, encode_sums
from shardkeep.layouts.torch_pickle import data_files_of, encode_metadata, set_sums
from shardkeep.layouts.torch_publish import Commit, commit_target, first_number
from shardkeep.layouts.torch_values import (
    CURRENT_DCP_VERSION,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    _StorageInfo,
)
from shardkeep.options import Options
from shardkeep.storage.base import BlobWriter, Store, create_upto

# Items of torch's layout that go through codecs, streamed from an opened checkpoint: how large they become is known
# only
# when they are written.
#
# Each item is a stream of its own (`CodecStream`), with its descriptor beside its place. Whoever reads an item
# decodes all
# of it, so that tensors are cut into chunks of some megabytes. What was written is read back, decoded and compared.

_MOST_CHUNK_NBYTES, _LEAST_CHUNK_NBYTES = 64 << 20, 1 << 20
_CODED_ALIGNMENT = 64
_PIECE_NBYTES = 1 << 20
_ROOM_NBYTES = 64 << 10
"""Stores want to know beforehand how large a blob may become: so much for each item, besides twice its size."""

Data = bytes | TensorPart
"""An object as `torch.save` writes it, or a tensor."""


class CodedItem(NamedTuple):
    """Where an item lies in its file, and what it is before it is coded."""

    offset: int
    nbytes: int
    key: str
    digest: bytes


class CodedFile(NamedTuple):
    """A file that was written."""

    name: str
    items: list[CodedItem]
    sums: Sums

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.sums.nbytes


def chunk_nbytes(options: Options) -> int:
    """Return how large a chunk of a tensor may be: whoever reads it holds it, coded and as it was."""
    return min(_MOST_CHUNK_NBYTES, max(_LEAST_CHUNK_NBYTES, options.host_budget_bytes // 8))


def cut(box: Box, itemsize: int, most_nbytes: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many bytes, in row-major order; elements stay whole."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or box.volume * itemsize <= most_nbytes:
        yield box
        return
    size = box.sizes[axis]
    rows = max(1, most_nbytes // (box.volume // size * itemsize))
    for at in range(0, size, rows):
        offsets = (*box.offsets[:axis], box.offsets[axis] + at, *box.offsets[axis + 1 :])
        sizes = (*box.sizes[:axis], min(rows, size - at), *box.sizes[axis + 1 :])
        yield from cut(Box(offsets, sizes), itemsize, most_nbytes)


def write_coded(
    store: Store,
    files: Sequence[tuple[str, Sequence[tuple[str, Data]]]],
    source: Source,
    extension: CodecStream,
    options: Options,
    progress: Progress | None,
    made: list[str],
) -> list[CodedFile]:
    """
    Write files, and their digests beside them; if that fails, those that are made by then are for the caller to remove.

    Args:
        store: where they go.
        files: their names, and the keys and contents of their items.
        source: what tensors are read from.
        extension: what items go through.
        options: threads and memory.
        progress: is told of plain bytes.
        made: the names of files are added to it when there are such.

    """
    most = max(1, min(options.io_threads, len(files)))
    threads, window = window_for(most, options.host_budget_bytes // 2, coded=True)
    gathering = PartReader(source, threads=1, budget_nbytes=window)
    counted = _Counted(progress, sum(_nbytes(data) for _, items in files for _, data in items))
    written: dict[str, CodedFile] = {}

    def work(file: tuple[str, Sequence[tuple[str, Data]]], buffer: memoryview) -> bool:
        name, items = file
        room = sum(_ROOM_NBYTES + 2 * _nbytes(data) for _, data in items)
        writer = create_upto(store, name, room)
        try:
            stream = HashingStream(cast("IO[bytes]", _Output(writer)))
            placed = [_write_item(stream, key, data, gathering, extension, buffer, counted) for key, data in items]
            writer.finish(stream.nbytes)
        except BaseException:
            writer.abandon()
            raise
        made.append(name)
        sums, encoded = encode_sums(stream.nbytes, stream.block_nbytes, stream.digests())
        store.put(f"{name}{SUMS_SUFFIX}", encoded, replace=True)
        written[name] = CodedFile(name, placed, sums)
        return True

    run_workers(files, work, threads=threads, buffer_nbytes=window)
    return [written[name] for name, _ in files]


def check_coded(store: Store, files: Sequence[CodedFile], extension: CodecStream, options: Options) -> None:
    """
    Read all items back, decode them, and compare them with what they were.

    Raises:
        DamagedCheckpoint: they are not what was written, or do not decode to what was meant.

    """
    opened = ItemFiles(store, {file.name: file.sums for file in files})
    for file in files:
        for item in file.items:
            where = Item(opened.number(file.name), item.offset, item.nbytes, item.key)
            budget = options.host_budget_bytes // 2
            [raw] = read_items(opened, [where], threads=options.io_threads, budget_nbytes=budget)
            found = xxhash.xxh3_128()
            with closing(extension.transform_from(io.BytesIO(raw))) as plain:
                while piece := plain.read(_PIECE_NBYTES):
                    found.update(piece)
            if found.digest() != item.digest:
                raise ChecksumMismatch(
                    f"{file.name}: {item.key!r} at offset {item.offset} does not decode to what was coded",
                    hint="nothing was committed; one of the codecs, or this machine's memory, is at fault",
                    key=item.key,
                    file=file.name,
                    offset=item.offset,
                )


class _Output:
    """A new blob as a stream that is written from its beginning on."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self._at = 0

    def write(self, data: memoryview) -> int:
        """Write all of it."""
        self._writer.write_at(self._at, data)
        self._at += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


class _Counted:
    """Tells how much is done, from any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)


def _nbytes(data: Data) -> int:
    return len(data) if isinstance(data, bytes) else data.nbytes


def _write_item(
    stream: HashingStream,
    key: str,
    data: Data,
    gathering: PartReader,
    extension: CodecStream,
    buffer: memoryview,
    counted: _Counted,
) -> CodedItem:
    offset, plain = stream.nbytes, xxhash.xxh3_128()
    out, _ = transformed_output([extension], cast("IO[bytes]", stream))
    with out:
        for piece in _pieces(data, gathering, buffer, counted):
            plain.update(piece)
            out.write(piece)
    return CodedItem(offset, stream.nbytes - offset, key, plain.digest())


def _pieces(data: Data, gathering: PartReader, buffer: memoryview, counted: _Counted) -> Iterator[bytes | memoryview]:
    """Give the bytes of an item; each piece is to be used before the next is asked for."""
    if isinstance(data, bytes):
        yield data
        counted.add(len(data))
        return
    frame = frame_tensor(data.dtype, data.box.sizes, at=0, alignment=_CODED_ALIGNMENT)
    yield frame.head
    step = len(buffer) // data.dtype.itemsize * data.dtype.itemsize
    for at in range(0, data.nbytes, step):
        piece = buffer[: min(step, data.nbytes - at)]
        gathering.fill([(data, at, at + len(piece), piece)])
        yield piece
        counted.add(len(piece))
    yield frame.tail


_FILE_NBYTES = 4 << 30
_LEAST_FILE_NBYTES = 64 << 20
"""Of those that are as small so that each thread has one."""
_ALIGNMENT = 4096
"""Where a tensor's bytes begin: on a page, for direct I/O."""


class _Item(NamedTuple):
    name: MetadataIndex
    data: bytes | TensorPart
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
        names = _free_names(taken, first_number(commit_target(store)))
        if coding is None:
            places, sums = _write(store, items, names, source, options, progress, made)
        else:
            places, sums = _write_coded(store, items, names, source, coding, options, progress, made)
        metadata.storage_data = places
        set_sums(metadata, sums)
        data = encode_metadata(metadata)
    except BaseException:
        for name in made:
            for each in (name, f"{name}{SUMS_SUFFIX}"):
                with suppress(CheckpointError):
                    store.delete(each)
        raise
    # It takes back its files itself: only it knows whether they were committed.
    Commit(commit_target(store)).publish(
        METADATA_NAME, data, sums=sums, own=list(sums), keep=data_files_of(metadata), began_s=began_s
    )
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
    digests, _ = write_parts(store, files, source, options, progress)
    made += [file.job.name for file in files]
    verify_written(store, files, digests, options)
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
    view = TorchView(source, to)
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
            items.append(_Item(MetadataIndex(key, chunk.offsets, number), TensorPart(key, row, each, dtype)))
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


def _lay_out(name: str, items: Sequence[_Item], places: dict[MetadataIndex, _StorageInfo]) -> FileParts:
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
    return file_parts(name, parts)
