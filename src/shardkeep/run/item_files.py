"""
Items of torch's layout: where they lie, what is known of their files, reading them whole, and looking into archives.

A tensor of ours says where its bytes are. In a file that torch wrote they are looked for in the item's archive. No torch
is needed here.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardkeep.errors import (
    BlobNotFound,
    CheckpointError,
    ChecksumMismatch,
    DamagedCheckpoint,
    MalformedFile,
    WrongSize,
)
from shardkeep.format.dtypes import DType
from shardkeep.format.record import FileEntry
from shardkeep.format.region import Ints
from shardkeep.format.torch_archive import FoundTensor, StoredPart, find_tensor, stored_parts
from shardkeep.layout.torch_files import Sums, read_sums
from shardkeep.plan.loads import Runs, Scatter
from shardkeep.plan.ranges import plan_reads
from shardkeep.run.read import Headers, Reads, read_files
from shardkeep.run.workers import WINDOW_NBYTES, window_for
from shardkeep.stage.memory import Scattered
from shardkeep.store.aligned import address_of
from shardkeep.store.protocol import BlobReader

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


class Files:
    """The data files that a load reads from, opened once for what is to be known of them."""

    def __init__(self, store: Reads, sums: Mapping[str, Sums]) -> None:
        self.store = store
        self.entries: list[FileEntry] = []
        self.headers = Digests()
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


class Digests(Headers):
    """The digests of all files of a load, known before they are read."""

    def keep(self, entry: FileEntry, digests: bytes) -> None:
        self._digests[entry] = digests


def check_inside(files: Files, items: Iterable[Item]) -> None:
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
    files: Files,
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


def batches(items: Sequence[Any], nbytes: Callable[[Any], int]) -> Iterator[list[Any]]:
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


def read_raw(files: Files, items: Sequence[Item], *, threads: int, budget_nbytes: int) -> list[bytearray]:
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

    heads: dict[int, list[tuple[bytes, FoundTensor]]]

    def find(self, get: Callable[[int, int], bytes], nbytes: int, where: str) -> FoundTensor | None:
        known = self.heads.setdefault(nbytes, [])
        for head, found in known:
            if get(0, len(head)) == head:
                return found
        made = find_tensor(get, nbytes, where=where)
        if made is not None and len(known) < 8:
            known.append((get(0, made.start), made))
        return made


def bad_archives(files: Files, items: Sequence[Item]) -> Iterator[CheckpointError]:
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


def _crc_of(reader: BlobReader, item: Item, part: StoredPart, buffer: memoryview) -> int:
    if part.start + part.nbytes > item.nbytes:
        raise MalformedFile(f"{item.key!r}: an archive with an entry that reaches out of it", key=item.key)
    crc = 0
    for at in range(0, part.nbytes, len(buffer)):
        window = buffer[: min(len(buffer), part.nbytes - at)]
        reader.read_into(item.offset + part.start + at, window)
        crc = zlib.crc32(window, crc)
    return crc


def find_tensors(files: Files, items: Sequence[Item]) -> list[FoundTensor | None]:
    """Find the tensors in items that hold archives; None for one that only torch can read."""
    found: list[FoundTensor | None] = [None] * len(items)
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
