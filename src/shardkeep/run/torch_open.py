"""
A checkpoint of torch's layout, opened: what is in it, in the terms of the native index, so that everything that looks at
a checkpoint or loads from one does not ask who wrote it.

Tensors and names come from `.metadata`. Objects are read, and those that are plain data become plain values; others are
kept as the bytes they are, which only `allow_pickle` opens. No torch is needed for any of this.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

import numpy as np

from shardkeep.codec.chain import transformed_input
from shardkeep.codec.registry import ExtensionRegistry
from shardkeep.errors import CheckpointError, MalformedFile, UnsupportedLeaf
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.columns import Boxes, IntArray, concat_ranges, matrix_of
from shardkeep.format.index import Chunks, Index, Tensors, decode_index, encode_index
from shardkeep.format.record import IndexEntry, Record, Totals
from shardkeep.format.torch_archive import read_object
from shardkeep.format.tree import Container, Node, encode_tree
from shardkeep.format.values import encode_value
from shardkeep.layout.torch_files import MAX_METADATA_NBYTES, METADATA_NAME, writer_rank
from shardkeep.layout.torch_metadata import Place, TorchMetadata, decode_torch_metadata
from shardkeep.options import Options
from shardkeep.plan.loads import chunk_rows
from shardkeep.plan.tiling import tiled
from shardkeep.run.item_files import Files, Item, bad_archives, batches, check_inside, keys_in, read_raw
from shardkeep.run.read import Reads, Source
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import BlobInfo

FORMAT = "torch.distributed.checkpoint"


@dataclass(frozen=True, kw_only=True)
class TorchSource(Source):
    """An opened checkpoint of torch's layout. Of the index, a chunk's start is the row of its place."""

    files: Files
    places: Sequence[Place]
    objects: Mapping[str, Place]

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

    def places_of(self, rows: slice) -> list[Place]:
        """Return where these chunks lie."""
        return [self.places[number] for number in self.index.chunks.start[rows].tolist()]

    def item(self, row: int, place: Place) -> Item:
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

    def keys_at(self, file: int, at: int, end: int) -> str:
        """Name the tensors and objects in a range of a file."""
        return keys_in(self.items(), file, at, end)

    def bad_archives(self, file: int) -> Iterator[CheckpointError]:
        """Check what lies in a file that nobody took digests of; what was transformed cannot be."""
        return bad_archives(self.files, self._plain_items.get(file, []))

    @cached_property
    def _plain_items(self) -> dict[int, list[Item]]:
        """All items that were not transformed, by file."""
        plain = {(p.file, p.offset) for p in (*self.places, *self.objects.values()) if not p.descriptors}
        found: dict[int, list[Item]] = {}
        for item in self.items():
            if (self.files.entries[item.file].name, item.offset) in plain:
                found.setdefault(item.file, []).append(item)
        return found


def read_torch_record(store: Reads) -> Record:
    """Read what there is to know of a checkpoint before it is opened; `BlobNotFound` where there is none."""
    data = _as_foreign(store).get(METADATA_NAME, limit=MAX_METADATA_NBYTES)
    metadata = decode_torch_metadata(data, where=METADATA_NAME)
    names = {place.file for place in _all_places(metadata)}
    writers = [rank for rank in map(writer_rank, names) if rank is not None]
    checksum = text_of(digest(data))
    return Record(
        format=FORMAT,
        save_id=metadata.save_id or checksum[-20:],
        saved_at=_when(store),
        writer="shardkeep" if metadata.sums else "torch",
        world_size=max(writers, default=0) + 1,
        totals=Totals(
            tensors=len(metadata.tensors),
            chunks=sum(len(entry.chunks) for entry in metadata.tensors.values()),
            values=len(metadata.objects),
            tensor_bytes=sum(math.prod(e.shape) * e.dtype.itemsize for e in metadata.tensors.values()),
        ),
        index=IndexEntry(name=METADATA_NAME, nbytes=len(data), checksum=checksum),
        files=[],
    )


def _as_foreign(store: Reads) -> Reads:
    """Let files be called, and be links to, what their writer liked."""
    return store.of_foreign_files() if isinstance(store, LocalStore) else store


def _when(store: Reads) -> str:
    infos: Iterable[BlobInfo] = getattr(store, "list", tuple)()
    seconds = next((info.modified_s for info in infos if info.name == METADATA_NAME), 0.0)
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def open_torch(store: Reads, record: Record, options: Options) -> TorchSource:
    """Open the checkpoint that a record is of."""
    store = _as_foreign(store)
    data = store.get(METADATA_NAME, limit=MAX_METADATA_NBYTES)
    if text_of(digest(data)) != record.index.checksum:
        raise CheckpointError(
            f"{METADATA_NAME}: the checkpoint was replaced by another save meanwhile", hint="open or load it again"
        )
    metadata = decode_torch_metadata(data, where=METADATA_NAME)
    files = Files(store, metadata.sums)
    names = sorted({place.file for place in _all_places(metadata)})
    for name in names:
        files.number(name)
    places: list[Place] = []
    index = _index(metadata, files, places, _values(metadata, files, options))
    whole = Record(
        **{name: getattr(record, name) for name in record.__struct_fields__ if name != "files"}, files=files.entries
    )
    return TorchSource(store, whole, index, files.headers, files=files, places=places, objects=metadata.objects)


def _all_places(metadata: TorchMetadata) -> list[Place]:
    chunks = [place for entry in metadata.tensors.values() for _, place in entry.chunks]
    return [*chunks, *metadata.objects.values()]


def _values(metadata: TorchMetadata, files: Files, options: Options) -> list[tuple[str, bytes]]:
    """Read all objects, as the index has values."""
    keys = sorted(metadata.objects, key=str.encode)
    places = [metadata.objects[key] for key in keys]
    items = [
        Item(files.number(place.file), place.offset, place.nbytes, key) for key, place in zip(keys, places, strict=True)
    ]
    check_inside(files, items)
    values: list[tuple[str, bytes]] = []
    for some in batches(list(zip(keys, places, items, strict=True)), lambda each: each[2].nbytes):
        held = read_raw(
            files, [item for _, _, item in some], threads=options.io_threads, budget_nbytes=options.host_budget_bytes
        )
        values += [(key, _value(key, place, data)) for (key, place, _), data in zip(some, held, strict=True)]
    return values


def _value(key: str, place: Place, data: bytearray) -> bytes:
    raw = bytes(data)
    if place.descriptors:
        raw = transformed_input(ExtensionRegistry(), place.descriptors, io.BytesIO(raw)).read(-1)
    try:
        return encode_value(read_object(raw, where=f"{place.file} ({key!r})"), key=key)
    except (CheckpointError, UnsupportedLeaf):
        return encode_value(Archive(raw), key=key, allow_pickle=True)


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


def _index(metadata: TorchMetadata, files: Files, places: list[Place], values: list[tuple[str, bytes]]) -> Index:
    keys = sorted(metadata.tensors, key=str.encode)
    entries = [metadata.tensors[key] for key in keys]
    axes = max((len(entry.shape) for entry in entries), default=0)
    stored = [pair for entry in entries for pair in entry.chunks]
    places.extend(place for _, place in stored)
    for key, entry in zip(keys, entries, strict=True):
        if any(len(box.sizes) != len(entry.shape) for box, _ in entry.chunks):
            raise MalformedFile(f"{key!r}: chunks with another number of axes than the tensor", key=key)
    encoded = encode_index(
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
            file=np.array([files.number(place.file) for _, place in stored], np.int64),
            start=np.arange(len(stored)),
        ),
        values=values,
        tree=encode_tree(_tree(metadata.paths)),
    )
    return decode_index(encoded, where=METADATA_NAME)


def _tree(paths: Mapping[str, tuple[str | int, ...]]) -> Node:
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
