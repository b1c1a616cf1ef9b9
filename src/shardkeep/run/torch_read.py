"""
Items of torch's layout read through the read pipeline: tensors straight into place, checked where there are digests.

A tensor of ours says where its bytes are. In a file that torch wrote they are looked for in the item's archive. What is
no dense tensor there, or was transformed, is read whole and left to the caller to decode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardkeep.errors import WrongSize
from shardkeep.format.dtypes import DType, of_torch, to_torch
from shardkeep.format.record import FileEntry
from shardkeep.format.region import Box, Ints, contiguous_run
from shardkeep.format.torch_archive import FoundTensor, find_tensor
from shardkeep.plan.loads import Runs, Scatter
from shardkeep.plan.ranges import plan_reads
from shardkeep.run.read import Headers, Reads, read_files
from shardkeep.run.workers import window_for
from shardkeep.stage.tensors import host_address, scattered
from shardkeep.store.aligned import address_of
from shardkeep.store.protocol import BlobReader, Opens

_SMALL_NBYTES = 16 << 10
"""Items up to this size are looked at as a whole, several in one read."""
_GROUP_NBYTES = 4 << 20
_HEAD_NBYTES, _TAIL_NBYTES = 2048, 1024


class Item(NamedTuple):
    """Where an item lies."""

    file: int
    offset: int
    nbytes: int
    key: str


class ChunkRead(NamedTuple):
    """A box of a stored tensor, and the tensor to fill with it."""

    item: Item
    start: int
    """Where the chunk's bytes begin in the file."""
    shape: Ints
    """Of the chunk, as its elements lie in the file."""
    dtype: DType
    source: Box
    """What is wanted of it."""
    target: torch.Tensor
    """Of the size of that box, its axes in the order of the chunk's."""


class RawRead(NamedTuple):
    """A whole item, and memory of its size."""

    item: Item
    into: memoryview


def check_inside(files: Sequence[FileEntry], items: Iterable[Item]) -> None:
    """Insist that every item lies inside its file."""
    for item in items:
        entry = files[item.file]
        if item.offset < 0 or item.nbytes < 0 or item.offset + item.nbytes > entry.nbytes:
            raise WrongSize(
                f"{entry.name}: {item.key!r} should be {item.nbytes} bytes at offset {item.offset}, but the file has"
                f" {entry.nbytes}",
                hint="the file was cut short, or belongs to another checkpoint",
                file=entry.name,
                key=item.key,
                offset=item.offset,
            )


def read_items(
    store: Reads,
    files: Sequence[FileEntry],
    chunks: Sequence[ChunkRead],
    whole: Sequence[RawRead],
    *,
    headers: Headers,
    threads: int,
    budget_nbytes: int,
) -> int:
    """Fill tensors and buffers from files, and return the bytes read."""
    threads, window = window_for(threads, budget_nbytes)
    runs: list[tuple[int, int, int, int]] = [
        (each.item.file, each.item.offset, each.item.nbytes, address_of(each.into))
        for each in whole
        if each.into.nbytes
    ]
    scatters: list[Scatter] = []
    for want, chunk in enumerate(chunks):
        if chunk.target.numel():
            _plan_chunk(want, chunk, runs, scatters)
    columns = np.array(sorted(runs), np.int64).reshape(-1, 4).T
    found = Runs(*columns)
    by_file: dict[int, list[Scatter]] = {}
    for scatter in scatters:
        by_file.setdefault(scatter.file, []).append(scatter)
    plans = [
        plan_reads(
            file,
            found.take(found.file == file),
            by_file.get(file, []),
            data_nbytes=files[file].nbytes,
            block_nbytes=files[file].block_nbytes,
            window_nbytes=window,
        )
        for file in sorted({*np.unique(found.file).tolist(), *by_file})
    ]
    others = {s.want: scattered(chunks[s.want].target, to_torch(chunks[s.want].dtype)) for s in scatters}
    items = [*(chunk.item for chunk in chunks), *(each.item for each in whole)]
    return read_files(
        store,
        files,
        plans,
        others,
        key_at=lambda file, at, end: _keys_at(items, file, at, end),
        threads=threads,
        window_nbytes=window,
        headers=headers,
    )


def _plan_chunk(want: int, chunk: ChunkRead, runs: list[tuple[int, int, int, int]], scatters: list[Scatter]) -> None:
    target, size = chunk.target, chunk.dtype.itemsize
    address = host_address(target) if of_torch(target.dtype) is chunk.dtype else 0
    run = contiguous_run(chunk.shape, chunk.source) if address else None
    if run:
        runs.append((chunk.item.file, chunk.start + run[0] * size, chunk.source.volume * size, address))
        return
    into = Box((0,) * len(chunk.source.sizes), chunk.source.sizes)
    scatters.append(Scatter(chunk.item.file, chunk.start, chunk.shape, size, chunk.source, want, into))


def _keys_at(items: Sequence[Item], file: int, at: int, end: int) -> str:
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


def find_tensors(store: Opens, files: Sequence[FileEntry], items: Sequence[Item]) -> list[FoundTensor | None]:
    """Find the tensors in items that hold archives; None for one that only torch can read."""
    found: list[FoundTensor | None] = [None] * len(items)
    order = sorted(range(len(items)), key=lambda row: items[row][:2])
    known = _Known({})
    for file in dict.fromkeys(items[row].file for row in order):
        rows = [row for row in order if items[row].file == file]
        with closing(store.open(files[file].name)) as reader:
            for row, get in _views(reader, rows, items):
                where = f"{files[file].name} ({items[row].key!r} at offset {items[row].offset})"
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
