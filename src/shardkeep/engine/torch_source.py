"""
Items of torch's layout: where they lie, what is known of their files, reading them whole, and looking into archives.

A tensor of ours says where its bytes are. In a file that torch wrote they are looked for in the item's archive. No torch
is needed here.
"""

from __future__ import annotations

import io
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import cached_property
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardkeep.codecs.base import WRAPPED
from shardkeep.codecs.stream_extensions import CodecStream, ExtensionRegistry, transformed_input
from shardkeep.engine.access import keys_for
from shardkeep.engine.memory import Scattered
from shardkeep.engine.reader import DigestCache, KeysAt, ReadableStore, Source, read_files
from shardkeep.engine.workers import WINDOW_NBYTES, window_for
from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedFile,
    UnsupportedLeaf,
    WrongSize,
)
from shardkeep.format.boxes import ITEMSIZES, Boxes, IntArray, Ints, concat_ranges, matrix_of
from shardkeep.format.checksum import checksum_text, digest
from shardkeep.format.dtypes import DType
from shardkeep.format.index import Chunks, Index, Strings, Tensors, decode_index, encode_index
from shardkeep.format.pickles import unsealed
from shardkeep.format.record import FileEntry, IndexEntry, Record, Totals
from shardkeep.format.torch_zip import ArchivedTensor, ArchiveEntry, find_tensor, read_object, stored_parts
from shardkeep.format.tree import Container, Node, encode_tree
from shardkeep.format.values import encode_value
from shardkeep.layouts.torch import MAX_METADATA_NBYTES, METADATA_NAME, Sums, read_sums, writer_rank
from shardkeep.layouts.torch_metadata import ItemLocation, TorchMetadata, decode_torch_metadata
from shardkeep.options import Options
from shardkeep.plan.load_plan import Runs, Scatter, chunk_rows, plan_reads
from shardkeep.plan.tiling import tiled
from shardkeep.storage.base import BlobInfo, BlobReader
from shardkeep.storage.buffers import address_of
from shardkeep.storage.local import LocalStore

if TYPE_CHECKING:
    import torch


log = logging.getLogger("shardkeep")

_SMALL_NBYTES = 16 << 10
"""Items up to this size are looked at as a whole, several in one read."""
_GROUP_NBYTES = 4 << 20
_HEAD_NBYTES, _TAIL_NBYTES = 2048, 1024


BATCH_NBYTES = 256 << 20
"""Items that must be read whole are read this much at a time."""


class Item(NamedTuple):
    """Where an item lies."""

    file: int
    offset: int
    nbytes: int
    key: str


class RawRead(NamedTuple):
    """A whole item, and memory of its size."""

    item: Item
    into: memoryview


class FileGone(WrongSize, BlobNotFound):
    """A file that the metadata name is not there; also the FileNotFoundError that callers of torch expect."""


class ItemFiles:
    """The data files that a load reads from, opened once for what is to be known of them."""

    def __init__(self, store: ReadableStore, sums: Mapping[str, Sums]) -> None:
        self.store = store
        self.entries: list[FileEntry] = []
        self.headers = KnownDigests()
        self._sums = sums
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the position of a file in `entries`."""
        found = self._number.get(name)
        if found is None:
            found = self._number[name] = len(self.entries)
            self.entries.append(self._entry(name))
        return found

    def _entry(self, name: str) -> FileEntry:
        known = self._sums.get(name)
        try:
            reader = self.store.open(name)
        except BlobNotFound as exc:
            raise FileGone(f"{name}: the file is missing", hint="restore it from a copy", file=name) from exc
        nbytes = reader.nbytes
        reader.close()
        if known is None:
            return FileEntry(name=name, nbytes=nbytes, header_nbytes=0, block_nbytes=0, checksum="")
        if nbytes != known.nbytes:
            raise WrongSize(
                f"{name}: {nbytes} bytes, the metadata say {known.nbytes}",
                hint="the file was cut short or changed after the save",
                file=name,
            )
        digests = read_sums(self.store, name, known)
        if digests is None:
            log.warning("%s.sums is gone: %s is read without checking it", name, name)
        block = 0 if digests is None else known.block_nbytes
        entry = FileEntry(name=name, nbytes=nbytes, header_nbytes=0, block_nbytes=block, checksum=known.checksum)
        if digests is not None:
            self.headers.keep(entry, digests)
        return entry


class KnownDigests(DigestCache):
    """The digests of all files of a load, known before they are read."""

    def keep(self, entry: FileEntry, digests: bytes) -> None:
        self._digests[entry] = digests


def check_inside(files: ItemFiles, items: Iterable[Item]) -> None:
    """Insist that every item lies inside its file."""
    for item in items:
        entry = files.entries[item.file]
        if item.offset < 0 or item.nbytes < 0 or item.offset + item.nbytes > entry.nbytes:
            raise WrongSize(
                f"{entry.name}: {item.key!r} should be {item.nbytes} bytes at offset {item.offset}, but the file has"
                f" {entry.nbytes}",
                hint="the file was cut short, or belongs to another checkpoint",
                file=entry.name,
                key=item.key,
                offset=item.offset,
            )


Run = tuple[int, int, int, int]
"""A file, where in it, how many bytes, and the address they go to."""


def read_runs(
    files: ItemFiles,
    runs: Iterable[Run],
    scatters: Sequence[Scatter],
    others: dict[int, Scattered],
    items: Sequence[Item],
    *,
    threads: int,
    budget_nbytes: int,
) -> int:
    """Read what is wanted of all files, check it where there are digests, and return the bytes read."""
    threads, window = window_for(threads, budget_nbytes)
    found = Runs(*np.array(sorted(runs), np.int64).reshape(-1, 4).T)
    by_file: dict[int, list[Scatter]] = {}
    for scatter in scatters:
        by_file.setdefault(scatter.file, []).append(scatter)
    plans = [
        plan_reads(
            file,
            found.take(slice(*np.searchsorted(found.file, (file, file + 1)).tolist())),
            by_file.get(file, []),
            data_nbytes=files.entries[file].nbytes,
            block_nbytes=files.entries[file].block_nbytes,
            window_nbytes=window,
        )
        for file in sorted({*np.unique(found.file).tolist(), *by_file})
    ]
    return read_files(
        files.store,
        files.entries,
        plans,
        others,
        key_at=lambda file, at, end: keys_in(items, file, at, end),
        threads=threads,
        window_nbytes=window,
        headers=files.headers,
    )


def raw_runs(whole: Iterable[RawRead]) -> list[Run]:
    """Return the runs that fill whole items."""
    return [
        (each.item.file, each.item.offset, each.item.nbytes, address_of(each.into))
        for each in whole
        if each.into.nbytes
    ]


def item_batches(items: Sequence[Any], nbytes: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Group items so that a group takes a bounded amount of memory, if no item takes more alone."""
    batch: list[Any] = []
    held = 0
    for item in items:
        if batch and held + nbytes(item) > BATCH_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes(item)
    if batch:
        yield batch


def read_raw(files: ItemFiles, items: Sequence[Item], *, threads: int, budget_nbytes: int) -> list[bytearray]:
    """Return the bytes of whole items."""
    buffers = [bytearray(item.nbytes) for item in items]
    runs = raw_runs(RawRead(item, memoryview(buffer)) for item, buffer in zip(items, buffers, strict=True))
    read_runs(files, runs, [], {}, items, threads=threads, budget_nbytes=budget_nbytes)
    return buffers


def keys_in(items: Sequence[Item], file: int, at: int, end: int) -> str:
    """Name the items in a range of a file; used only to explain damage."""
    keys = {repr(i.key): None for i in items if i.file == file and i.offset < end and i.offset + i.nbytes > at}
    return ", ".join(list(keys)[:4]) + (" and others" if len(keys) > 4 else "")


@dataclass
class _Known:
    """What was found in archives so far: those of equal tensors begin with the same bytes."""

    heads: dict[int, list[tuple[bytes, ArchivedTensor]]]

    def find(self, get: Callable[[int, int], bytes], nbytes: int, where: str) -> ArchivedTensor | None:
        known = self.heads.setdefault(nbytes, [])
        for head, found in known:
            if get(0, len(head)) == head:
                return found
        made = find_tensor(get, nbytes, where=where)
        if made is not None and len(known) < 8:
            known.append((get(0, made.start), made))
        return made


def bad_archives(files: ItemFiles, items: Sequence[Item]) -> Iterator[CheckpointError]:
    """
    Compare items that are archives with the checksums in them: all there is where nobody took digests.

    Torch can be told to write none (`set_crc32_options`); such a file cannot be told from a damaged one.
    """
    buffer = memoryview(bytearray(WINDOW_NBYTES))
    for item in items:
        name = files.entries[item.file].name
        where = f"{name} ({item.key!r} at offset {item.offset})"
        with closing(files.store.open(name)) as reader:

            def get(at: int, nbytes: int, reader: BlobReader = reader, item: Item = item) -> bytes:
                return _bytes(reader, item.offset + at, max(0, min(nbytes, item.nbytes - at)))

            try:
                parts = stored_parts(get, item.nbytes, where=where)
                bad = next(
                    (part for part in parts if part.crc and _crc_of(reader, item, part, buffer) != part.crc), None
                )
            except DamagedCheckpoint as exc:
                yield exc
                continue
        if bad is not None:
            yield ChecksumMismatch(
                f"{name}: bytes {item.offset + bad.start} to {item.offset + bad.start + bad.nbytes} have another CRC-32"
                f" than their archive says; they hold {item.key!r}",
                hint="the file was damaged, or written with torch.serialization.set_crc32_options(False)",
                file=name,
                offset=item.offset + bad.start,
                key=item.key,
            )


def _crc_of(reader: BlobReader, item: Item, part: ArchiveEntry, buffer: memoryview) -> int:
    if part.start + part.nbytes > item.nbytes:
        raise MalformedFile(f"{item.key!r}: an archive with an entry that reaches out of it", key=item.key)
    crc = 0
    for at in range(0, part.nbytes, len(buffer)):
        window = buffer[: min(len(buffer), part.nbytes - at)]
        reader.read_into(item.offset + part.start + at, window)
        crc = zlib.crc32(window, crc)
    return crc


def find_tensors(files: ItemFiles, items: Sequence[Item]) -> list[ArchivedTensor | None]:
    """Find the tensors in items that hold archives; None for one that only torch can read."""
    found: list[ArchivedTensor | None] = [None] * len(items)
    order = sorted(range(len(items)), key=lambda row: items[row][:2])
    known = _Known({})
    for file, of_file in groupby(order, key=lambda row: items[row].file):
        rows = list(of_file)
        with closing(files.store.open(files.entries[file].name)) as reader:
            for row, get in _views(reader, rows, items):
                where = f"{files.entries[file].name} ({items[row].key!r} at offset {items[row].offset})"
                found[row] = known.find(get, items[row].nbytes, where)
    return found


def _views(
    reader: BlobReader, rows: list[int], items: Sequence[Item]
) -> Iterator[tuple[int, Callable[[int, int], bytes]]]:
    """Give each item's bytes to look at: small neighbours from one read, of large ones the two ends."""
    group: list[int] = []
    for row in [*rows, -1]:
        item = items[row]
        small = row >= 0 and item.nbytes <= _SMALL_NBYTES
        if group and not (small and item.offset + item.nbytes - items[group[0]].offset <= _GROUP_NBYTES):
            yield from _group_views(reader, group, items)
            group = []
        if small:
            group.append(row)
        elif row >= 0:
            yield row, _ends_view(reader, item)


def _group_views(
    reader: BlobReader, group: list[int], items: Sequence[Item]
) -> Iterator[tuple[int, Callable[[int, int], bytes]]]:
    first, last = items[group[0]], items[group[-1]]
    data = _bytes(reader, first.offset, last.offset + last.nbytes - first.offset)
    for row in group:
        base, nbytes = items[row].offset - first.offset, items[row].nbytes

        def get(at: int, size: int, base: int = base, nbytes: int = nbytes) -> bytes:
            return data[base + at : base + min(at + size, nbytes)]

        yield row, get


def _ends_view(reader: BlobReader, item: Item) -> Callable[[int, int], bytes]:
    head = _bytes(reader, item.offset, _HEAD_NBYTES)
    tail_at = item.nbytes - _TAIL_NBYTES
    tail = _bytes(reader, item.offset + tail_at, _TAIL_NBYTES)

    def get(at: int, size: int) -> bytes:
        stop = min(at + size, item.nbytes)
        if stop <= len(head):
            return head[at:stop]
        if at >= tail_at:
            return tail[at - tail_at : stop - tail_at]
        return _bytes(reader, item.offset + at, stop - at)

    return get


def _bytes(reader: BlobReader, offset: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    reader.read_into(offset, memoryview(data))
    return bytes(data)


def nbytes_of(shape: Ints, dtype: DType) -> int:
    """Return what a dense tensor takes."""
    return math.prod(shape) * dtype.itemsize


# What `.metadata` says, in the columns of the native index.

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class TorchContents:
    """Tensors sorted by key, their chunks, and where everything lies."""

    checksum: str
    """Tells this `.metadata` from any other."""
    nbytes: int
    """Of `.metadata`."""
    keys: list[str]
    tensors: Tensors
    chunk_ends: Any
    chunks: Chunks
    """Their files are rows of `files`, their starts rows of `places`."""
    places: Sequence[ItemLocation]
    objects: Mapping[str, ItemLocation]
    files: list[str]
    sums: dict[str, Sums]
    save_id: str
    paths: Mapping[str, Path]

    @cached_property
    def tree(self) -> bytes:
        """The skeleton of the nested state."""
        return encode_tree(_tree(self.paths))

    @property
    def totals(self) -> Totals:
        """How much there is."""
        itemsizes = ITEMSIZES.tolist()
        sizes = [
            math.prod(shape) * itemsizes[code]
            for shape, code in zip(self.tensors.shape.tolist(), self.tensors.dtype.tolist(), strict=True)
        ]
        return Totals(
            tensors=len(self.keys), chunks=len(self.chunks), values=len(self.objects), tensor_bytes=sum(sizes)
        )


def read_contents(store: ReadableStore) -> TorchContents:
    """
    Read what a checkpoint holds.

    Raises:
        BlobNotFound: there is none.
        DamagedCheckpoint: it is not what was saved.

    """
    found = store.get(METADATA_NAME, limit=MAX_METADATA_NBYTES)
    metadata = decode_torch_metadata(found, where=METADATA_NAME)
    return _of_metadata(metadata, checksum=checksum_text(digest(found)), nbytes=len(found))


def _of_metadata(metadata: TorchMetadata, *, checksum: str, nbytes: int) -> TorchContents:
    keys = sorted(metadata.tensors, key=str.encode)
    entries = [metadata.tensors[key] for key in keys]
    axes = max((len(entry.shape) for entry in entries), default=0)
    stored = [pair for entry in entries for pair in entry.chunks]
    for key, entry in zip(keys, entries, strict=True):
        if any(len(box.sizes) != len(entry.shape) for box, _ in entry.chunks):
            raise MalformedFile(f"{key!r}: chunks with another number of axes than the tensor", key=key)
    files = sorted({place.file for place in (*(place for _, place in stored), *metadata.objects.values())})
    number = {name: row for row, name in enumerate(files)}
    return TorchContents(
        checksum=checksum,
        nbytes=nbytes,
        keys=keys,
        tensors=Tensors(
            dtype=np.array([entry.dtype.code for entry in entries], np.uint8),
            ndim=np.array([len(entry.shape) for entry in entries], np.uint8),
            shape=matrix_of([entry.shape for entry in entries], axes, 1),
            origin=np.zeros(len(entries), np.uint8),
            alias=np.arange(len(entries)),
        ),
        chunk_ends=np.cumsum([len(entry.chunks) for entry in entries], dtype=np.int64),
        chunks=Chunks(
            offsets=matrix_of([box.offsets for box, _ in stored], axes, 0),
            sizes=matrix_of([box.sizes for box, _ in stored], axes, 1),
            file=np.array([number[place.file] for _, place in stored], np.int64),
            start=np.arange(len(stored)),
        ),
        places=[place for _, place in stored],
        objects=metadata.objects,
        files=files,
        sums=metadata.sums,
        save_id=metadata.save_id,
        paths=metadata.paths,
    )


def _tree(paths: Mapping[str, Path]) -> Node:
    """Make the skeleton of the nested state; where paths contradict each other, all names stand side by side."""
    root: dict[Any, Any] = {}
    try:
        for name, path in paths.items():
            if ".".join(map(str, path)) != name:
                raise ValueError
            here = root
            for part in path[:-1]:
                here = here.setdefault(part, {})
            if path[-1] in here:
                raise ValueError
            here[path[-1]] = None
        return _container(root)
    except (ValueError, AttributeError, TypeError):
        return Container("dict", tuple((name, None) for name in paths))


def _container(held: dict[Any, Any]) -> Container:
    numbers = [part for part in held if type(part) is int]
    if numbers and (len(numbers) != len(held) or sorted(numbers) != list(range(len(numbers)))):
        raise ValueError
    parts = sorted(numbers) if numbers else list(held)
    children = tuple((part, None if held[part] is None else _container(held[part])) for part in parts)
    return Container("list" if numbers else "dict", children)


# Objects of a checkpoint of torch's layout as an index has values, each read when it is asked for.

_TOGETHER_NBYTES = 1 << 20
"""Small objects lie side by side, and a read of one is a read of the blocks it lies in: its neighbours come with it."""
_HELD_NBYTES = 64 << 20


class StoredObjects(Strings):
    """Objects, sorted by key. `decode` makes a value of the bytes of one."""

    def __init__(
        self,
        objects: Mapping[str, ItemLocation],
        files: ItemFiles,
        options: Options,
        decode: Callable[[str, ItemLocation, bytes], bytes],
    ) -> None:
        super().__init__(np.zeros(len(objects), np.int64), memoryview(b""))
        self._files = files
        self._options = options
        self._decode = decode
        self._keys = sorted(objects, key=str.encode)
        self._places = [objects[key] for key in self._keys]
        self._held: dict[int, bytes] = {}

    def raw(self, row: int) -> bytes:
        """Return one object, as a value."""
        data = self._held.get(row)
        if data is None:
            data = self._read(row)
        return self._decode(self._keys[row], self._places[row], data)

    def all(self) -> list[bytes]:
        """Return all of them."""
        return [self.raw(row) for row in range(len(self))]

    def _read(self, row: int) -> bytes:
        rows = self._together(row)
        try:
            held = self._read_all(rows)
        except DamagedCheckpoint:  # of its neighbours, perhaps
            held = self._read_all([row])
        if sum(map(len, self._held.values())) > _HELD_NBYTES:
            self._held = {}
        self._held |= held
        return held[row]

    def _read_all(self, rows: list[int]) -> dict[int, bytes]:
        items = [self._item(row) for row in rows]
        check_inside(self._files, items)
        options = self._options
        found = read_raw(self._files, items, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
        return {row: bytes(data) for row, data in zip(rows, found, strict=True)}

    def _item(self, row: int) -> Item:
        place = self._places[row]
        return Item(self._files.number(place.file), place.offset, place.nbytes, self._keys[row])

    def _together(self, row: int) -> list[int]:
        """Return a row, and those behind it in its file that are read with it."""
        order, at = self._by_place
        first = self._places[row]
        end = first.offset + max(_TOGETHER_NBYTES, first.nbytes)
        rows = [row]
        for other in order[at[row] + 1 :]:
            place = self._places[other]
            if place.file != first.file or place.offset + place.nbytes > end:
                break
            rows.append(other)
        return rows

    @cached_property
    def _by_place(self) -> tuple[list[int], dict[int, int]]:
        """Return the rows in the order in which they lie in files, and where each is in it."""
        order = sorted(range(len(self)), key=lambda row: self._places[row][:2])
        return order, {row: at for at, row in enumerate(order)}


# A checkpoint of torch's layout, opened: what is in it, in the terms of the native index, so that everything that
# looks at
# a checkpoint or loads from one does not ask who wrote it.
#
# Tensors and names come from `.metadata`, or from the columns beside it. Objects are read when they are asked for;
# those
# that are plain data become plain values, others are kept as the bytes they are, which only `allow_pickle` opens. No
# torch
# is needed for any of this.

FORMAT = "torch.distributed.checkpoint"


@dataclass(frozen=True, kw_only=True)
class TorchSource(Source):
    """An opened checkpoint of torch's layout. Of the index, a chunk's start is the row of its place."""

    files: ItemFiles
    places: Sequence[ItemLocation]
    objects: Mapping[str, ItemLocation]

    @property
    def is_secret(self) -> bool:
        """Whether anything in it is encrypted."""
        return any(map(_is_secret, self._descriptors))

    def check_keys(self) -> None:
        """
        Insist that what is encrypted can be read with the keys that there are; reads nothing.

        Raises:
            KeyMissing: there is no key.
            WrongKey: it is encrypted with another one.

        """
        if isinstance(self.files, CodedFiles):
            for descriptors in filter(_is_secret, self._descriptors):
                self.files.undo(None, descriptors, io.BytesIO())

    def check(self, tensors: IntArray) -> None:
        """Insist that the chunks of these tensors tile them, and that their files are there."""
        first, counts = chunk_rows(self.index, tensors)
        chunks = self.index.chunks.take(concat_ranges(first, counts))
        boxes = Boxes(np.asarray(chunks.offsets, np.int64), np.asarray(chunks.sizes, np.int64))
        owner = np.repeat(np.arange(len(tensors)), counts)
        good = tiled(np.asarray(self.index.tensors.shape[tensors], np.int64), owner, boxes)
        if not good.all():
            key = self.index.keys.raw(int(tensors[np.flatnonzero(~good)[0]])).decode()
            raise MalformedFile(f"the stored chunks of {key!r} overlap or leave a hole", key=key)
        places = [self.places[number] for number in chunks.start.tolist()]
        check_inside(self.files, (self.item(row, p) for row, p in zip(tensors[owner].tolist(), places, strict=True)))

    def places_of(self, rows: slice) -> list[ItemLocation]:
        """Return where these chunks lie."""
        return [self.places[number] for number in self.index.chunks.start[rows].tolist()]

    def item(self, row: int, place: ItemLocation) -> Item:
        """Return a chunk of a tensor as an item to read."""
        key = self.index.keys.raw(row).decode()
        return Item(self.files.number(place.file), place.offset, place.nbytes, key)

    def items(self) -> list[Item]:
        """Return all chunks and objects."""
        tensors = [(row, self.index.chunk_rows(row)) for row in range(len(self.index.keys))]
        chunks = [self.item(row, place) for row, rows in tensors for place in self.places_of(rows)]
        objects = [
            Item(self.files.number(place.file), place.offset, place.nbytes, key) for key, place in self.objects.items()
        ]
        return [*chunks, *objects]

    def check_index(self, tensors: IntArray) -> None:
        """Check these tensors, and `.metadata` whole, of which columns may have been read instead."""
        self.check(tensors)
        unsealed(self.store.get(METADATA_NAME, limit=MAX_METADATA_NBYTES), METADATA_NAME)

    def to_verify(self) -> tuple[DigestCache, KeysAt]:
        """Return the digests that were read when the files were looked at, and what names tensors and objects."""
        return self.files.headers, lambda file, at, end: keys_in(self.items(), file, at, end)

    def undigested(self, file: int) -> Iterator[CheckpointError] | None:
        """Check what lies in a file that nobody took digests of; what was transformed cannot be."""
        if self.record.files[file].block_nbytes:
            return None
        return bad_archives(self.files, self._plain_items.get(file, []))

    def place_of(self, chunk: int) -> tuple[str, int]:
        """Return the file of a chunk, and where in it the chunk begins."""
        [place] = self.places_of(slice(chunk, chunk + 1))
        return place.file, place.offset

    def fill(
        self,
        tensor: IntArray,
        boxes: Boxes,
        into: Sequence[torch.Tensor],
        *,
        threads: int,
        budget_nbytes: int,
        first_file: float = 0.0,  # noqa: ARG002 - a file is read by as many threads as there are
    ) -> int:
        """Fill tensors, and return the bytes read; see `Source.fill`."""
        from shardkeep.engine.fill import fill_boxes  # noqa: PLC0415 - only reading a tensor needs torch

        return fill_boxes(self, tensor, boxes, into, threads=threads, budget_nbytes=budget_nbytes)

    @cached_property
    def _descriptors(self) -> set[tuple[str, ...]]:
        """What items went through, each only once."""
        return {place.descriptors for place in (*self.places, *self.objects.values())}

    @cached_property
    def _plain_items(self) -> dict[int, list[Item]]:
        """All items that were not transformed, by file."""
        plain = {(p.file, p.offset) for p in (*self.places, *self.objects.values()) if not p.descriptors}
        found: dict[int, list[Item]] = {}
        for item in self.items():
            if (self.files.entries[item.file].name, item.offset) in plain:
                found.setdefault(item.file, []).append(item)
        return found


class CodedFiles(ItemFiles):
    """Data files, and what undoes the extensions that items in them went through."""

    def __init__(self, store: ReadableStore, sums: Mapping[str, Sums], options: Options) -> None:
        super().__init__(store, sums)
        self._registry = ExtensionRegistry()
        self._registry.register(CodecStream.reading_with(keys_for(options)))

    def undo(self, _: Any, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
        """Return the stream of an item as it was before its extensions."""
        return transformed_input(self._registry, descriptors, stream)

    def value(self, key: str, place: ItemLocation, raw: bytes) -> bytes:
        """Make a value of the stored bytes of an object."""
        if place.descriptors:
            raw = self.undo(None, place.descriptors, io.BytesIO(raw)).read(-1)
        try:
            return encode_value(read_object(raw, where=f"{place.file} ({key!r})"), key=key)
        except (CheckpointError, UnsupportedLeaf):
            return encode_value(Archive(raw), key=key, allow_pickle=True)


def _is_secret(descriptors: Sequence[str]) -> bool:
    """Say whether one of these extensions encrypts; of one that is not known here nobody can tell."""
    for descriptor in descriptors:
        name, _, version = descriptor.partition("/")
        if name != CodecStream.registry_name():
            continue
        try:
            recorded = json.loads(version.partition(":")[2])
        except (ValueError, RecursionError):
            continue  # which is said where it is read
        if isinstance(recorded, list) and any(isinstance(each, dict) and WRAPPED in each for each in recorded):
            return True
    return False


def find_torch(store: ReadableStore) -> FoundTorch:
    """Find a checkpoint of torch's layout; `BlobNotFound` where there is none."""
    store = _as_foreign(store)
    contents = read_contents(store)
    writers = [rank for rank in map(writer_rank, contents.files) if rank is not None]
    record = Record(
        format=FORMAT,
        save_id=contents.save_id or contents.checksum[-20:],
        saved_at=_when(store),
        writer="shardkeep" if contents.sums else "torch",
        world_size=max(writers, default=0) + 1,
        totals=contents.totals,
        index=IndexEntry(name=METADATA_NAME, nbytes=contents.nbytes, checksum=contents.checksum),
        files=[],
    )
    return FoundTorch(store, record, contents)


def _as_foreign(store: ReadableStore) -> ReadableStore:
    """Let files be called, and be links to, what their writer liked."""
    return store.of_foreign_files() if isinstance(store, LocalStore) else store


def _when(store: ReadableStore) -> str:
    infos: Iterable[BlobInfo] = getattr(store, "list", tuple)()
    seconds = next((info.modified_s for info in infos if info.name == METADATA_NAME), 0.0)
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def open_torch(store: ReadableStore, record: Record, options: Options) -> TorchSource:
    """Open the checkpoint that a record, which may be from another rank, is of."""
    store = _as_foreign(store)
    return FoundTorch(store, record, read_contents(store)).open(options)


@dataclass(frozen=True)
class FoundTorch:
    """A checkpoint of torch's layout whose metadata were read."""

    store: ReadableStore
    record: Record
    contents: TorchContents

    def open(self, options: Options, _: DigestCache | None = None) -> TorchSource:
        """
        Look at its files.

        Raises:
            CheckpointError: it is another checkpoint than the record is of.

        """
        contents = self.contents
        if contents.checksum != self.record.index.checksum:
            raise CheckpointError(
                f"{METADATA_NAME}: the checkpoint was replaced by another save meanwhile", hint="open or load it again"
            )
        files = CodedFiles(self.store, contents.sums, options)
        for name in contents.files:  # in this order: they are numbered as in the contents
            files.number(name)
        said = {name: getattr(self.record, name) for name in self.record.__struct_fields__ if name != "files"}
        whole = Record(**said, files=files.entries)
        index = _index(contents, StoredObjects(contents.objects, files, options, files.value))
        return TorchSource(
            self.store, whole, index, files.headers, files=files, places=contents.places, objects=contents.objects
        )


class Archive:
    """An object as `torch.save` wrote it; unpickled, it is that object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return load_archive, (self._data,)


def load_archive(data: bytes) -> Any:
    """Rebuild what `torch.save` wrote; reached only where the caller allows pickles."""
    import torch  # noqa: PLC0415 - only such objects need it

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _index(contents: TorchContents, values: Strings) -> Index:
    # Written and read again, which checks that all fits.
    encoded = encode_index(
        keys=contents.keys,
        tensors=contents.tensors,
        chunk_ends=contents.chunk_ends,
        chunks=contents.chunks,
        values=[(key, b"") for key in sorted(contents.objects, key=str.encode)],
        tree=b"",
    )
    return _TorchIndex(decode_index(encoded, where=METADATA_NAME), values, contents)


class _TorchIndex(Index):
    """An index whose values and tree are made when they are asked for."""

    def __init__(self, index: Index, values: Strings, contents: TorchContents) -> None:
        made = {field.name: getattr(index, field.name) for field in fields(Index) if field.name != "tree"}
        super().__init__(**{**made, "value_data": values}, tree=b"")
        vars(self).pop("tree")  # which the property below then makes
        vars(self)["contents"] = contents

    @cached_property
    def tree(self) -> bytes:
        """The skeleton of the nested state."""
        return vars(self)["contents"].tree  # type: ignore[no-any-return]  # put there above
