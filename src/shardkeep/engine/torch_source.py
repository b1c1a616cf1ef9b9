"""
Checkpoints of torch's layout as a `Source`: `.metadata` becomes an index. Nothing here imports torch.

Data files hold *items*, end to end. The item of a tensor is an archive of `torch.save`; where our writer made it, the
metadata also say where the tensor's bytes begin. In a file that torch wrote, `TorchSource.locate` looks for them in the
archive's directory when they are first wanted. Objects are read when they are first asked for: plain data become plain
values, anything else stays the bytes it is, which only `allow_pickle` opens.
"""

from __future__ import annotations

import contextlib
import io
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import IO, Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep import errors
from shardkeep.codecs.stream_extensions import ExtensionRegistry, transformed_input
from shardkeep.engine.reader import (
    DataFiles,
    DigestCache,
    FoundCheckpoint,
    KeysAt,
    Source,
    list_keys,
    read_files,
    saved_at,
)
from shardkeep.engine.workers import limits_for_reads, run_workers
from shardkeep.format.boxes import ITEMSIZES, Box, IntArray, Rows, concat_ranges, ints, segment_starts
from shardkeep.format.data_file import checksum_text, digest
from shardkeep.format.index import Index, Strings, build_index, decode_index, decoding, strings_of
from shardkeep.format.record import Blob, FileEntry, Record, Totals, data_sizes
from shardkeep.format.torch_zip import ArchivedTensor, ArchiveEntry, find_tensor, read_object, stored_parts
from shardkeep.format.values import Container, Node, encode_tree, encode_value
from shardkeep.layouts import torch as layout
from shardkeep.options import Options
from shardkeep.plan.load_plan import Runs, check_tensors, chunk_rows, plan_files, tensor_nbytes
from shardkeep.storage.base import BlobReader, ReadableStore, read_range, with_any_names
from shardkeep.storage.buffers import address_of

log = logging.getLogger("shardkeep")

T = TypeVar("T")
Path = tuple[str | int, ...]

FORMAT = "torch.distributed.checkpoint"
_SMALL_NBYTES = 16 << 10
"""Items up to this size are looked at as a whole, several in one read."""
_HEAD_NBYTES, _TAIL_NBYTES = 2048, 1024
_BATCH_NBYTES = 256 << 20
"""Items that must be read whole are read this much at a time."""
_NEIGHBOURS_NBYTES = 1 << 20
"""Small objects lie side by side, and reading one reads the blocks it lies in: its neighbours are kept with it."""
_KEPT_OBJECTS_NBYTES = 64 << 20
_KNOWN_HEADS = 8


class Item(NamedTuple):
    file: int
    offset: int
    nbytes: int
    key: str


class FileGone(errors.WrongSize, errors.BlobNotFound):
    """A file that the metadata name is missing; also the FileNotFoundError that callers of torch expect."""


class ItemFiles(DigestCache):
    """
    Data files of torch's layout: the size of each is looked up when it is first mentioned.

    Also their block digests, of which each file's are read when it is: a rank reads few of the files.
    """

    def __init__(self, store: ReadableStore, sums: Mapping[str, layout.Sums]) -> None:
        super().__init__()
        self.store = store
        self.entries: list[FileEntry] = []
        self._sums = sums
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._number:
            self._number[name] = len(self.entries)
            self.entries.append(self._entry(name))
        return self._number[name]

    def item(self, location: layout.ItemLocation, key: str) -> Item:
        return Item(self.number(location.file), location.offset, location.nbytes, key)

    def _entry(self, name: str) -> FileEntry:
        known = self._sums.get(name)
        nbytes = self._listed.get(name) if known else None
        # A network file system may list an old state; a request for one name is answered anew.
        if known is None or nbytes != known.nbytes:
            try:
                with closing(self.store.open(name)) as reader:
                    nbytes = reader.nbytes
            except errors.BlobNotFound as exc:
                raise FileGone.of(name, "the file is missing", hint="restore it from a copy") from exc
        entry = FileEntry(name=name, nbytes=nbytes, header_nbytes=0, block_nbytes=0, checksum="")
        if known is None:
            return entry
        if nbytes != known.nbytes:
            why = f"{nbytes} bytes, the metadata say {known.nbytes}"
            raise errors.WrongSize.of(name, why, hint="the file was cut short or changed after the save")
        return msgspec.structs.replace(entry, block_nbytes=known.block_nbytes, checksum=known.checksum)

    @cached_property
    def _listed(self) -> dict[str, int]:
        return {info.name: info.nbytes for info in getattr(self.store, "list", tuple)()}

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, entry: FileEntry) -> bytes:
        digests = layout.read_sums(self.store, entry.name, self._sums[entry.name])
        if digests is None:
            log.warning("%s.sums is missing, so %s is read without verifying it", entry.name, entry.name)
        self[entry] = digests or b""
        return self[entry]


def check_inside(files: Sequence[FileEntry], items: Iterable[Item]) -> None:
    for item in items:
        entry = files[item.file]
        if item.offset < 0 or item.nbytes < 0 or item.offset + item.nbytes > entry.nbytes:
            why = f"{item.key!r} should be {item.nbytes} bytes at offset {item.offset}, but the file has {entry.nbytes}"
            hint = "the file was cut short, or belongs to another checkpoint"
            raise errors.WrongSize.of(entry.name, why, hint=hint, key=item.key, offset=item.offset)


def read_items(files: ItemFiles, items: Sequence[Item], options: Options) -> list[bytearray]:
    """Return the bytes of whole items, verified where their files have digests."""
    check_inside(files.entries, items)
    buffers = [bytearray(item.nbytes) for item in items]
    threads, window = limits_for_reads(files.store, options)
    rows = [
        (item.file, item.offset, item.nbytes, address_of(memoryview(buffer)))
        for item, buffer in zip(items, buffers, strict=True)
        if item.nbytes
    ]
    runs = Runs(*np.array(sorted(rows), np.int64).reshape(-1, 4).T)

    def keys_at(file: int, at: int, end: int) -> str:
        return list_keys(i.key for i in items if i.file == file and i.offset < end and i.offset + i.nbytes > at)

    plans = plan_files(runs, [], files.entries, window_nbytes=window)
    data_files = DataFiles(files.store, files.entries, keys_at, files)
    read_files(data_files, plans, {}, threads=threads, window_nbytes=window)
    return buffers


def item_batches(
    items: Iterable[T], nbytes: Callable[[T], int], *, most_nbytes: float = _BATCH_NBYTES
) -> Iterator[list[T]]:
    """Group items so that a group takes a bounded amount of memory, unless a single item takes more."""
    batch: list[T] = []
    held = 0
    for item in items:
        if batch and held + nbytes(item) > most_nbytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes(item)
    if batch:
        yield batch


@dataclass(frozen=True)
class ChunkItems(Rows):
    """The item that holds each chunk; one row for each chunk of the index."""

    offset: IntArray
    nbytes: IntArray


def index_of_items(
    number: Callable[[str], int], chunks: Sequence[Sequence[tuple[Box, layout.ItemLocation]]], **columns: Any
) -> tuple[Index, ChunkItems, dict[int, tuple[str, ...]]]:
    """Make the index of tensors whose chunks are items, the items, and the extensions of those that have some."""
    index = build_index(
        chunks=[
            [(box, number(at.file), -1 if at.data_start is None else at.data_start) for box, at in some]
            for some in chunks
        ],
        **columns,
    )
    locations = [at for some in chunks for _, at in some]
    offset, nbytes = np.array([(at.offset, at.nbytes) for at in locations], np.int64).reshape(-1, 2).T
    descriptors = {row: at.descriptors for row, at in enumerate(locations) if at.descriptors}
    items = ChunkItems(offset, nbytes)
    # A chunk that cannot begin at the stated byte has the start -1: its archive is asked instead.
    believable = _begin_inside(index, items)
    believable[list(descriptors)] = False
    index.chunks.start[~believable] = -1
    return index, items, descriptors


def _begin_inside(index: Index, items: ChunkItems) -> npt.NDArray[np.bool_]:
    """Return for each chunk whether its bytes, by the index, lie inside its item."""
    owner = np.searchsorted(index.chunk_ends, np.arange(len(items)), "right")
    data_nbytes = index.chunks.boxes.volumes() * ITEMSIZES[index.tensors.dtype][owner]
    start = np.asarray(index.chunks.start, np.int64)
    return (start >= items.offset) & (start - items.offset <= items.nbytes - data_nbytes)


def undo_extensions(_: int, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
    """Revert stream extensions by those that are always registered."""
    return transformed_input(ExtensionRegistry(), descriptors, stream)


@dataclass(frozen=True, kw_only=True)
class TorchSource(Source):
    files: ItemFiles
    items: ChunkItems
    descriptors: Mapping[int, tuple[str, ...]]
    """The stream extensions of chunks that were written through some, by the chunk's row."""
    objects: Mapping[str, layout.ItemLocation]
    undo: Callable[[int, Sequence[str], IO[bytes]], IO[bytes]] = undo_extensions
    """Reverts the stream extensions of an item: the row of its chunk or object, their descriptors, and the stored stream."""
    paths: Mapping[str, Path] = field(default_factory=dict)
    """Of each name, the keys and positions in the nested state, in its order."""
    archived: dict[int, ArchivedTensor | None] = field(default_factory=dict)
    """Chunks that were looked up in their archives, by row; None: only torch decodes it (extended, or not dense)."""

    aligned: ClassVar[bool] = False

    def locate(self, tensors: IntArray) -> None:
        """Find where these tensors' chunks begin; -1 stays for one not plainly in row-major order: see `archived`."""
        index, start = self.index, self.index.chunks.start
        rows = concat_ranges(*chunk_rows(index, tensors))
        sizes = data_sizes(self.record)[index.chunks.file[rows]]
        outside = rows[self.items.offset[rows] > sizes - self.items.nbytes[rows]]
        check_inside(self.record.files, map(self.item, outside.tolist()))
        unknown = [row for row in rows[start[rows] < 0].tolist() if row not in self.archived]
        self.archived.update(dict.fromkeys(unknown))
        plain = [row for row in unknown if row not in self.descriptors]
        for row, found in zip(plain, find_tensors(self.files, list(map(self.item, plain))), strict=True):
            tensor = self.tensor_of(row)
            box = index.chunks.boxes.box(row, int(index.tensors.ndim[tensor]))
            if found and (found.dtype, found.shape) == (index.dtype(tensor), box.sizes):
                self.archived[row] = found
                if found.is_row_major:
                    start[row] = self.items.offset[row] + found.start

    def strided(self, chunk: int) -> ArchivedTensor | None:
        found = self.archived.get(chunk)
        return found and found._replace(start=int(self.items.offset[chunk]) + found.start)

    def tensor_of(self, chunk: int) -> int:
        return int(np.searchsorted(self.index.chunk_ends, chunk, "right"))

    def item(self, chunk: int) -> Item:
        offset, nbytes = int(self.items.offset[chunk]), int(self.items.nbytes[chunk])
        key = self.index.keys.raw(self.tensor_of(chunk)).decode()
        return Item(int(self.index.chunks.file[chunk]), offset, nbytes, key)

    def check(self, tensors: IntArray) -> None:
        self.locate(tensors)
        check_tensors(self.index, tensors, data_sizes(self.record), aligned=False)

    def check_index(self, tensors: IntArray) -> None:
        """Check these tensors, and `.metadata` as a whole: what shardkeep reads of it, and what torch reads."""
        self.check(tensors)
        name = layout.METADATA_NAME
        data = self.store.get(name, limit=layout.MAX_METADATA_NBYTES)
        layout.unsealed(data, name)
        # A pickle that names classes of the user cannot be read here.
        with contextlib.suppress(errors.PickleRefused):
            if columns := layout.columns_of(data, where=name):
                read, pickled = _of_columns(columns), _of_pickle(layout.decode_torch_metadata(data, where=name))
                if _comparable(read) != _comparable(pickled):
                    raise errors.DamagedCheckpoint(
                        f"{name}: its columns, which shardkeep reads, and its pickle, which torch reads, differ",
                        hint="restore the checkpoint from a copy, or save again; please report this",
                        file=name,
                    )

    def keys_at(self, file: int, at: int, end: int) -> str:
        items = (item for item, _ in self._items_in(file))
        return list_keys(item.key for item in items if item.offset < end and item.offset + item.nbytes > at)

    def damage_by_form(self, file: int, uncompared: set[int]) -> Iterator[errors.CheckpointError]:
        """Verify the checksums in the archives of a file. What an extension changed is read, and cannot be verified."""
        return bad_archives(self.files, list(self._items_in(file)), self.keys_at, uncompared)

    def _items_in(self, file: int) -> Iterator[tuple[Item, tuple[str, ...]]]:
        for chunk in np.flatnonzero(self.index.chunks.file == file).tolist():
            yield self.item(chunk), self.descriptors.get(chunk, ())
        for key, location in self.objects.items():
            if location.file == self.record.files[file].name:
                yield self.files.item(location, key), location.descriptors

    def value_nbytes(self, key: str) -> int:
        return self.objects[key].nbytes

    def position(self, chunk: int) -> tuple[int, int]:
        return int(self.index.chunks.file[chunk]), int(self.items.offset[chunk])


def find_torch(store: ReadableStore, name: str = layout.METADATA_NAME) -> FoundCheckpoint:
    """Find a checkpoint of torch's layout by the name of its metadata; `BlobNotFound` where there is none."""
    store = with_any_names(store)
    data = store.get(name, limit=layout.MAX_METADATA_NBYTES)
    columns = layout.columns_of(data, where=name)
    said = _of_columns(columns) if columns else _of_pickle(layout.decode_torch_metadata(data, where=name))
    checksum, rows = checksum_text(digest(data)), np.arange(len(said.index.keys))
    record = Record(
        format=FORMAT,
        save_id=said.save_id or checksum[-20:],
        saved_at=saved_at(store, [name]),
        writer="shardkeep" if said.sums else "torch",
        world_size=max((rank for rank in map(layout.writer_rank, said.files) if rank is not None), default=0) + 1,
        totals=Totals(
            tensors=len(rows),
            chunks=len(said.index.chunks),
            values=len(said.objects),
            tensor_bytes=tensor_nbytes(said.index, rows),
        ),
        index=Blob(name=name, nbytes=len(data), checksum=checksum),
        files=[],
    )
    return FoundCheckpoint(record, lambda options: _open(store, record, said, options))


@dataclass(frozen=True)
class _Contents:
    """What `.metadata` says."""

    index: Index
    """Without the data of the values."""
    items: ChunkItems
    descriptors: dict[int, tuple[str, ...]]
    objects: dict[str, layout.ItemLocation]
    files: list[str]
    paths: dict[str, Path]
    sums: dict[str, layout.Sums]
    save_id: str


def _of_columns(columns: layout.Columns) -> _Contents:
    with decoding(layout.METADATA_NAME):
        index, files = decode_index(columns.index, where=layout.METADATA_NAME), columns.files
        items = ChunkItems(*ints(columns.items).reshape(2, len(index.chunks)))
        places = ints(columns.objects).reshape(3, len(index.value_keys)).T.tolist()
        objects = {
            key.decode(): layout.ItemLocation(files[file], offset, nbytes, None, ())
            for key, (file, offset, nbytes) in zip(index.value_keys.all(), places, strict=True)
        }
        if len({*files}) < len(files) or np.any(index.chunks.file >= len(files)):
            raise ValueError("a file that is not there, or is there twice")
        if not np.all(_begin_inside(index, items)):
            raise ValueError("a tensor that lies outside its item")
    return _Contents(index, items, {}, objects, files, columns.paths, columns.sums, columns.save_id)


def _of_pickle(metadata: layout.TorchMetadata) -> _Contents:
    keys = sorted(metadata.tensors, key=str.encode)
    entries = [metadata.tensors[key] for key in keys]
    for key, entry in zip(keys, entries, strict=True):
        if any(len(box.sizes) != len(entry.shape) for box, _ in entry.chunks):
            raise errors.MalformedFile(f"{key!r}: chunks with another number of axes than the tensor", key=key)
    used = {location.file for entry in entries for _, location in entry.chunks}
    files = sorted(used | {location.file for location in metadata.objects.values()})
    index, items, descriptors = index_of_items(
        {name: number for number, name in enumerate(files)}.__getitem__,
        [entry.chunks for entry in entries],
        keys=keys,
        dtypes=[entry.dtype for entry in entries],
        shapes=[entry.shape for entry in entries],
        value_keys=sorted(metadata.objects, key=str.encode),
        value_data=strings_of([b""] * len(metadata.objects)),
        where=layout.METADATA_NAME,
    )
    said = metadata.paths, metadata.sums, metadata.save_id
    return _Contents(index, items, descriptors, metadata.objects, files, *said)


def _comparable(said: _Contents) -> tuple[Any, ...]:
    """Return what columns and pickle must agree on; neither the order of chunks nor the numbers of files count."""
    index, chunks, tensors = said.index, said.index.chunks, said.index.tensors
    ends = np.asarray(index.chunk_ends, np.int64)
    tensor = np.repeat(np.arange(len(index.keys)), ends - segment_starts(ends))
    columns = [tensor, *chunks.offsets.T, *chunks.sizes.T, chunks.start, said.items.offset, said.items.nbytes]
    order = np.lexsort(columns[::-1])
    forms = [column.tolist() for column in (tensors.dtype, tensors.ndim, tensors.shape)]
    places = [np.asarray(column, np.int64)[order].tolist() for column in columns]
    files = [said.files[file] for file in chunks.file[order].tolist()]
    objects = {key: (place.file, place.offset, place.nbytes) for key, place in said.objects.items()}
    sums = {name: tuple(each) for name, each in said.sums.items()}
    names = index.keys.all(), index.value_keys.all(), dict(said.paths)
    return names, forms, places, files, objects, sums, said.save_id


def _open(store: ReadableStore, record: Record, said: _Contents, options: Options) -> TorchSource:
    files = ItemFiles(store, said.sums)
    for name in said.files:
        files.number(name)
    values, paths = StoredObjects(said.objects, files, options), said.paths
    return TorchSource(
        store=store,
        record=msgspec.structs.replace(record, files=files.entries),
        index=replace(said.index, value_data=values, make_tree=lambda: encode_tree(_tree(paths))),
        digests=files,
        files=files,
        items=said.items,
        descriptors=said.descriptors,
        objects=said.objects,
        paths=paths,
    )


def _tree(paths: Mapping[str, Path]) -> Node:
    """Make the skeleton of the nested state. Where paths contradict each other, all names stand side by side."""
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


class StoredObjects(Strings):
    """The objects of a checkpoint, sorted by key, as encoded values. Each is read when it is asked for."""

    def __init__(self, objects: Mapping[str, layout.ItemLocation], files: ItemFiles, options: Options) -> None:
        super().__init__(np.zeros(len(objects), np.int64), memoryview(b""))
        self._files = files
        self._options = options
        self._keys = sorted(objects, key=str.encode)
        self._locations = [objects[key] for key in self._keys]
        self._held: dict[int, bytes] = {}

    def raw(self, row: int) -> bytes:
        data = self._held.get(row) or self._read(row)  # an archive is never empty
        key, location = self._keys[row], self._locations[row]
        if location.descriptors:
            data = undo_extensions(row, location.descriptors, io.BytesIO(data)).read(-1)
        try:
            return encode_value(read_object(data, where=f"{location.file} ({key!r})"), key=key)
        except (errors.CheckpointError, errors.UnsupportedLeaf):
            return encode_value(PickledCall(load_archive, (data,)), key=key, allow_pickle=True)

    def all(self) -> list[bytes]:
        return [self.raw(row) for row in range(len(self))]

    def _read(self, row: int, *, alone: bool = False) -> bytes:
        rows = [row] if alone else self._neighbours[row]
        items = [self._files.item(self._locations[each], self._keys[each]) for each in rows]
        try:
            found = read_items(self._files, items, self._options)
        except errors.DamagedCheckpoint:
            if alone:
                raise
            return self._read(row, alone=True)  # perhaps only a neighbour is damaged
        read = dict(zip(rows, map(bytes, found), strict=True))
        # Replaced, not changed: other threads may be reading it.
        self._held = read if sum(map(len, self._held.values())) > _KEPT_OBJECTS_NBYTES else {**self._held, **read}
        return read[row]

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        """The objects that are read together with each one: small ones in the same part of its file."""
        batches: dict[tuple[str, int], list[int]] = {}
        for row, (file, offset, nbytes, *_) in enumerate(self._locations):
            part = offset // _NEIGHBOURS_NBYTES if nbytes <= _NEIGHBOURS_NBYTES else -1 - row
            batches.setdefault((file, part), []).append(row)
        return {row: batch for batch in batches.values() for row in batch}


class PickledCall(NamedTuple):
    """A call that is made when this is unpickled, and whose result is the value then."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple(self)


def load_archive(data: bytes) -> Any:
    """Rebuild what `torch.save` wrote; called only where the caller allows pickles."""
    import torch  # noqa: PLC0415 - only such objects need it

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def find_tensors(files: ItemFiles, items: Sequence[Item]) -> list[ArchivedTensor | None]:
    """Find the tensors in items that hold archives; None for one that only torch can read."""
    found: dict[Item, ArchivedTensor | None] = {}
    # Archives of equal tensors begin with the same bytes: the heads of some, by the size of the archive.
    heads: dict[int, list[tuple[bytes, ArchivedTensor]]] = {}

    def look(item: Item, get: Callable[[int, int], bytes]) -> None:
        known = heads.setdefault(item.nbytes, [])
        found[item] = next((tensor for head, tensor in known if get(0, len(head)) == head), None)
        if found[item] is None:
            where = f"{files.entries[item.file].name} ({item.key!r} at offset {item.offset})"
            found[item] = made = find_tensor(get, item.nbytes, where=where)
            if made is not None and len(known) < _KNOWN_HEADS:
                known.append((get(0, made.start), made))

    small = sorted(item for item in {*items} if item.nbytes <= _SMALL_NBYTES)
    for batch in item_batches(small, lambda item: item.nbytes):
        for item, data in zip(batch, read_items(files, batch, Options()), strict=True):
            look(item, partial(_slice_of, bytes(data)))
    for number, of_file in groupby(sorted({*items}.difference(small)), key=lambda item: item.file):
        with closing(files.store.open(files.entries[number].name)) as reader:
            for item in of_file:
                look(item, view_of(reader, item))
    return [found[item] for item in items]


def _slice_of(held: bytes, at: int, size: int) -> bytes:
    return held[at : at + size]


def view_of(reader: BlobReader, item: Item) -> Callable[[int, int], bytes]:
    """Give access to an item's bytes: its two ends are read first."""
    head = bytes(read_range(reader, item.offset, min(item.nbytes, _HEAD_NBYTES)))
    tail_at = max(0, item.nbytes - _TAIL_NBYTES)
    tail = bytes(read_range(reader, item.offset + tail_at, item.nbytes - tail_at))

    def get(at: int, size: int) -> bytes:
        stop = min(at + size, item.nbytes)
        if stop <= len(head):
            return head[at:stop]
        if at >= tail_at:
            return tail[at - tail_at : stop - tail_at]
        return bytes(read_range(reader, item.offset + at, stop - at))

    return get


def bad_archives(
    files: ItemFiles, items: Sequence[tuple[Item, Sequence[str]]], keys_at: KeysAt, uncompared: set[int]
) -> Iterator[errors.CheckpointError]:
    """Compare archives in a file with the CRC-32 checksums in them, all that a file without digests has."""
    # After `torch.serialization.set_crc32_options(False)` torch writes wrong ones: such a file looks damaged.
    if not items:
        return
    name, found, parts = files.entries[items[0][0].file].name, list[errors.CheckpointError](), list[ArchiveEntry]()

    def check(part: ArchiveEntry, buffer: memoryview) -> bool:
        crc = 0
        for at in range(0, part.nbytes, len(buffer)):
            window = buffer[: min(len(buffer), part.nbytes - at)]
            reader.read_into(part.start + at, window)
            crc = zlib.crc32(window, crc)
        if part.nbytes and not part.crc:  # our writer does not know it in advance
            uncompared.add(items[0][0].file)
        elif crc != part.crc:
            start, stop = part.start, part.start + part.nbytes
            keys = keys_at(items[0][0].file, start, stop)
            why = f"bytes {start} to {stop} ({part.name}) have another CRC-32 than their archive says; they hold {keys}"
            hint = "the file was damaged, or written with torch.serialization.set_crc32_options(False)"
            found.append(errors.ChecksumMismatch.of(name, why, hint=hint, offset=start, key=keys))
        return True

    with closing(files.store.open(name)) as reader:
        for item, extensions in items:
            where = f"{name} ({item.key!r} at {item.offset})"
            entries = [ArchiveEntry(item.key, 0, item.nbytes, 0)]
            try:
                if not extensions:
                    entries = stored_parts(view_of(reader, item), item.nbytes, where=where)
            except errors.DamagedCheckpoint as exc:
                found.append(exc)
                continue
            if any(entry.start + entry.nbytes > item.nbytes for entry in entries):
                why = f"an archive with an entry that reaches out of it ({item.key!r})"
                found.append(errors.MalformedFile.of(name, why, key=item.key))
            else:
                parts += [entry._replace(start=item.offset + entry.start) for entry in entries]
        threads, window = limits_for_reads(files.store, Options())
        run_workers(parts, check, threads=min(threads, len(parts)) or 1, buffer_nbytes=window)
    yield from found
