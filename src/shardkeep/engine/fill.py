"""From boxes that are wanted to tensors that are filled: plan the load, plan each file's reads, do them."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shardkeep.codecs.stream_extensions import ExtensionRegistry, transformed_input
from shardkeep.engine.reader import Source, keys_at, read_files
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.torch_source import (
    CodedFiles,
    Item,
    ItemFiles,
    Run,
    check_inside,
    find_tensors,
    item_batches,
    nbytes_of,
    read_raw,
    read_runs,
)
from shardkeep.engine.workers import ACCELERATOR_WINDOW_NBYTES, WINDOW_NBYTES, window_for
from shardkeep.errors import MalformedFile, PickleRefused, StateMismatch
from shardkeep.format.boxes import (
    AxisSlice,
    Box,
    Boxes,
    IntArray,
    Ints,
    contiguous_run,
    intersect,
    matrix_of,
    relative,
    slices,
)
from shardkeep.format.dtypes import DType, by_code, of_torch, to_torch
from shardkeep.format.torch_zip import ArchivedTensor
from shardkeep.layouts.native import data_sizes
from shardkeep.layouts.torch_metadata import ItemLocation
from shardkeep.options import Options
from shardkeep.plan.load_plan import FileReads, ReadRequests, Scatter, plan_load, plan_reads
from shardkeep.storage.base import preferred_requests

if TYPE_CHECKING:
    from shardkeep.engine.torch_source import TorchSource


def fill_native(
    source: Source,
    tensor: IntArray,
    boxes: Boxes,
    into: Sequence[torch.Tensor],
    *,
    threads: int,
    budget_nbytes: int,
    first_file: float,
) -> int:
    """Fill tensors from a native checkpoint, and return the bytes read."""
    index = source.index
    codes = np.asarray(index.tensors.dtype)[tensor]
    own = [of_torch(t.dtype).code for t in into]
    address = np.array(
        [host_address(t) if mine == stored else 0 for t, mine, stored in zip(into, own, codes.tolist(), strict=True)],
        np.int64,
    )
    axes = index.tensors.shape.shape[1]
    wants = ReadRequests(tensor, _fit(boxes.offsets, axes, 0), _fit(boxes.sizes, axes, 1), address)
    on_host = all(each.device.type == "cpu" for each in into)
    threads = preferred_requests(source.store, threads)
    most = WINDOW_NBYTES if on_host else ACCELERATOR_WINDOW_NBYTES
    coded = any(file.chain is not None for file in source.record.files)
    threads, window = window_for(threads, budget_nbytes, most, coded=coded)
    plans, needs = _plan(source, wants, window)
    others = {want: scattered_memory(into[want], to_torch(by_code(int(codes[want])))) for want in needs}
    start = int(first_file * len(plans))
    return read_files(
        source.store,
        source.record.files,
        plans[start:] + plans[:start],
        others,
        key_at=keys_at(index),
        threads=threads,
        window_nbytes=window,
        headers=source.headers,
    )


def _fit(matrix: IntArray, axes: int, fill: int) -> IntArray:
    """Give a box matrix the index's width; what is cut off is padding."""
    fitted = np.full((len(matrix), axes), fill, np.int64)
    width = min(axes, matrix.shape[1])
    fitted[:, :width] = matrix[:, :width]
    return fitted


def _plan(source: Source, wants: ReadRequests, window_nbytes: int) -> tuple[list[FileReads], set[int]]:
    """Return the reads of each file, and the wants that are reached box by box."""
    sizes = data_sizes(source.record)
    runs, scatters = plan_load(source.index, wants, sizes)
    runs = runs.take(np.argsort(runs.file, kind="stable"))
    by_file: dict[int, list[int]] = {}
    for row, scatter in enumerate(scatters):
        by_file.setdefault(scatter.file, []).append(row)
    files = sorted({*np.unique(runs.file).tolist(), *by_file})
    low = np.searchsorted(runs.file, files, "left").tolist()
    high = np.searchsorted(runs.file, files, "right").tolist()
    plans = [
        plan_reads(
            file,
            runs.take(slice(a, b)),
            [scatters[row] for row in by_file.get(file, [])],
            data_nbytes=int(sizes[file]),
            block_nbytes=source.record.files[file].block_nbytes,
            window_nbytes=window_nbytes,
        )
        for file, a, b in zip(files, low, high, strict=True)
    ]
    return plans, {scatter.want for scatter in scatters}


# Boxes of stored tensors of torch's layout, read straight into tensors, or copied box by box where they do not lie in
# one
# run.


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


def read_chunks(files: ItemFiles, chunks: Sequence[ChunkRead], *, threads: int, budget_nbytes: int) -> int:
    """Fill tensors, and return the bytes read."""
    runs: list[Run] = []
    scatters: list[Scatter] = []
    for want, chunk in enumerate(chunks):
        if chunk.target.numel():
            _plan_chunk(want, chunk, runs, scatters)
    others = {s.want: scattered_memory(chunks[s.want].target, to_torch(chunks[s.want].dtype)) for s in scatters}
    items = [chunk.item for chunk in chunks]
    return read_runs(files, runs, scatters, others, items, threads=threads, budget_nbytes=budget_nbytes)


def in_order(chunk: ChunkRead, order: Ints) -> ChunkRead:
    """See a chunk and its target with their axes in the order in which the chunk's elements lie."""
    source = Box(tuple(chunk.source.offsets[a] for a in order), tuple(chunk.source.sizes[a] for a in order))
    shape = tuple(chunk.shape[a] for a in order)
    return chunk._replace(shape=shape, source=source, target=chunk.target.permute(order))


def _plan_chunk(want: int, chunk: ChunkRead, runs: list[Run], scatters: list[Scatter]) -> None:
    target, size = chunk.target, chunk.dtype.itemsize
    address = host_address(target) if of_torch(target.dtype) is chunk.dtype else 0
    run = contiguous_run(chunk.shape, chunk.source) if address else None
    if run:
        runs.append((chunk.item.file, chunk.start + run[0] * size, chunk.source.volume * size, address))
        return
    into = Box((0,) * len(chunk.source.sizes), chunk.source.sizes)
    scatters.append(Scatter(chunk.item.file, chunk.start, chunk.shape, size, chunk.source, want, into))


# Tensors filled from items of torch's layout, whoever wrote them.
#
# What lies in its file as one dense tensor is read straight into place. What was transformed, or is no plain tensor,
# is
# read whole, and torch rebuilds it.

Undo = Callable[[Any, Sequence[str], IO[bytes]], IO[bytes]]
"""Gives the stream of an item as it was before its extensions: what asked for it, their descriptors, the stored one."""


class ChunkRequest(NamedTuple):
    """A box of a stored chunk, and the tensor to fill with it."""

    place: ItemLocation
    key: str
    shape: Ints
    """Of the chunk, as the metadata have it."""
    dtype: DType | None
    """As the metadata have it; None for one that this version does not know."""
    source: Box
    target: torch.Tensor
    asks: Any = None
    """What it was asked for by; handed to `Undo`."""


class _TensorRefused(PickleRefused, pickle.UnpicklingError):
    """Torch does not hold what a tensor is made of for safe; also the error that torch raises for it."""


def undo_known(_: Any, descriptors: Sequence[str], stream: IO[bytes]) -> IO[bytes]:
    """Undo the extensions that everybody has."""
    return transformed_input(ExtensionRegistry(), descriptors, stream)


def fill_items(
    files: ItemFiles, wanted: Sequence[ChunkRequest], *, undo: Undo | None = None, threads: int, budget_nbytes: int
) -> tuple[int, dict[str, str]]:
    """
    Fill every target; return the bytes read, and keys whose dtype was converted, with what to what.

    Extensions are undone by `undo`, else by files that know how, with their keys.
    """
    undo = undo or (files.undo if isinstance(files, CodedFiles) else undo_known)
    items = [Item(files.number(each.place.file), each.place.offset, each.place.nbytes, each.key) for each in wanted]
    check_inside(files, items)
    found = _find(files, wanted, items)
    casts: dict[str, str] = {}
    chunks = []
    views: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each, item, where in zip(wanted, items, found, strict=True):
        if where is not None:
            _check_source(each, where.shape)
            _note_cast(casts, each, to_torch(where.dtype))
            target = plain_target(each.target, key=each.key)
            if target is not each.target:
                views.append((each.target, target))
            chunk = ChunkRead(item, where.start, where.shape, where.dtype, each.source, target)
            in_rows = where.order == tuple(range(len(where.order)))
            chunks.append(chunk if in_rows else in_order(chunk, where.order))
    nbytes = read_chunks(files, chunks, threads=threads, budget_nbytes=budget_nbytes)
    for view, held in views:
        view.copy_(held)
    rest = [(each, item) for each, item, where in zip(wanted, items, found, strict=True) if where is None]
    for batch in item_batches(rest, lambda pair: pair[1].nbytes):
        raw = read_raw(files, [item for _, item in batch], threads=threads, budget_nbytes=budget_nbytes)
        nbytes += sum(map(len, raw))
        for (each, _), data in zip(batch, raw, strict=True):
            _fill_decoded(each, data, undo, casts)
    return nbytes, casts


def plain_target(target: torch.Tensor, *, key: str) -> torch.Tensor:
    """
    Return a tensor to fill by its memory: the target itself, or for one that shows other numbers than its memory holds
    a new one, which is then to be copied into it.

    Raises:
        StateMismatch: several elements of the target are one in memory.

    """
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise OverlappingTarget(
            f"{key!r} is expanded: several of its elements are one in memory", hint="load into a clone of it", key=key
        )
    if target.is_conj() or target.is_neg():
        return torch.empty_like(target)
    return target


class OverlappingTarget(StateMismatch, RuntimeError):
    """A tensor that cannot hold what is to be loaded into it."""


def plain_stream(place: ItemLocation, data: bytearray, undo: Undo, asks: Any) -> io.BytesIO:
    """Return an item's bytes as they were before its extensions."""
    if not place.descriptors:
        return io.BytesIO(data)
    return io.BytesIO(undo(asks, place.descriptors, io.BytesIO(data)).read(-1))


def _find(files: ItemFiles, wanted: Sequence[ChunkRequest], items: Sequence[Item]) -> list[ArchivedTensor | None]:
    """Find where the bytes of each tensor begin, and what they are; None where only torch can tell."""
    found: list[ArchivedTensor | None] = []
    sought: dict[Item, list[int]] = {}
    for row, (each, item) in enumerate(zip(wanted, items, strict=True)):
        start = _known_start(each)
        found.append(None)
        if start is not None and each.dtype is not None:
            found[row] = ArchivedTensor(each.dtype, each.shape, tuple(range(len(each.shape))), start)
        elif not each.place.descriptors:
            sought.setdefault(item, []).append(row)
    for (item, rows), where in zip(sought.items(), find_tensors(files, list(sought)), strict=True):
        for row in rows:
            if where is not None:
                found[row] = ArchivedTensor(where.dtype, where.shape, where.order, item.offset + where.start)
    return found


def _known_start(each: ChunkRequest) -> int | None:
    place = each.place
    if each.dtype is None or place.descriptors:
        return None
    nbytes = nbytes_of(each.shape, each.dtype)
    if place.data_start is not None and place.offset <= place.data_start <= place.offset + place.nbytes - nbytes:
        return place.data_start
    return None


def _check_source(each: ChunkRequest, shape: Ints) -> None:
    offsets, sizes = each.source.offsets, each.source.sizes
    if len(shape) != len(sizes) or any(o + n > full for o, n, full in zip(offsets, sizes, shape, strict=True)):
        raise MalformedFile(
            f"{each.key!r}: {sizes} at {offsets} was asked of a chunk that is stored as {shape}",
            hint="the metadata do not belong to these files",
            key=each.key,
            file=each.place.file,
            offset=each.place.offset,
        )


def _note_cast(casts: dict[str, str], each: ChunkRequest, stored: torch.dtype) -> None:
    if stored != each.target.dtype:
        casts[each.key] = f"{stored} -> {each.target.dtype}".replace("torch.", "")


def _fill_decoded(each: ChunkRequest, data: bytearray, undo: Undo, casts: dict[str, str]) -> None:
    stream = plain_stream(each.place, data, undo, each.asks)
    where = f"{each.place.file}: {each.key!r} at offset {each.place.offset}"
    try:
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as exc:  # of what is no archive of torch's: whatever torch raises
        kind = _TensorRefused if isinstance(exc, pickle.UnpicklingError) else MalformedFile
        raise kind(f"{where} cannot be read: {exc}", key=each.key, file=each.place.file) from exc
    if not isinstance(tensor, torch.Tensor):
        raise MalformedFile(f"{where} is a {type(tensor).__name__}, not a tensor", key=each.key, file=each.place.file)
    _check_source(each, tuple(tensor.shape))
    _note_cast(casts, each, tensor.dtype)
    for axis, (offset, size) in enumerate(zip(each.source.offsets, each.source.sizes, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    each.target.copy_(tensor)


# Boxes that are wanted of a checkpoint of torch's layout, and the chunks that they are read from.


def fill_boxes(
    source: TorchSource,
    tensor: IntArray,
    boxes: Boxes,
    into: Sequence[torch.Tensor],
    *,
    threads: int,
    budget_nbytes: int,
) -> int:
    """Fill tensors with boxes of stored ones, and return the bytes read."""
    index = source.index
    source.check(np.unique(tensor))
    wanted = []
    for want, row in enumerate(tensor.tolist()):
        rows, ndim = index.chunk_rows(row), int(index.tensors.ndim[row])
        box, key = boxes.box(want, ndim), index.keys.raw(row).decode()
        stored = index.chunks.take(rows).boxes
        for number, place in enumerate(source.places_of(rows)):
            chunk = stored.box(number, ndim)
            if common := intersect(chunk, box):
                target = into[want][slices(relative(common, box))]
                inside = relative(common, chunk)
                wanted.append(ChunkRequest(place, key, chunk.sizes, index.dtype(row), inside, target))
    return fill_items(source.files, wanted, threads=threads, budget_nbytes=budget_nbytes)[0]


# Read stored tensors, or a slice of one, into tensors of their own.

Picks = tuple[AxisSlice, ...]

_APART_NBYTES = 64 << 10
"""Gaps of this size are not read: what is picked with such a step is read one by one."""
_BAND_NBYTES = 64 << 20
_MOST_PARTS = 4096


def read_whole(source: Source, tensors: IntArray, options: Options) -> list[torch.Tensor]:
    """Return these tensors, none of them tied to another, as new ones."""
    index = source.index
    source.check(tensors)
    into = [torch.empty(index.shape(row), dtype=to_torch(index.dtype(row)), device="cpu") for row in tensors.tolist()]
    sizes = np.asarray(index.tensors.shape[tensors], np.int64)
    boxes = Boxes(np.zeros_like(sizes), sizes)
    source.fill(tensors, boxes, into, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
    return into


def read_picks(source: Source, row: int, picks: Picks, options: Options) -> torch.Tensor:
    """Return what the picks select, as a new dense tensor."""
    dtype = source.index.dtype(row)
    budget = options.host_budget_bytes
    if math.prod(pick.count for pick in picks) * dtype.itemsize > budget:
        source.check(np.array([source.index.tensors.alias[row]], np.int64))
    out = torch.empty([pick.count for pick in picks], dtype=to_torch(dtype), device="cpu")
    if out.numel():
        # What is read with gaps in it is held until it has been thinned out.
        band = min(_BAND_NBYTES, budget // 4)
        shape = source.index.shape(row)
        strides = tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
        for parts in _batches(_parts(picks, strides, dtype.itemsize, band), dtype.itemsize, band):
            _fill(source, row, picks, parts, out, threads=options.io_threads, budget_nbytes=budget - band)
    return out[tuple(0 if pick.drop else slice(None) for pick in picks)]


def _has_gaps(picks: Picks) -> bool:
    return any(pick.step > 1 and pick.count > 1 for pick in picks)


def _parts(picks: Picks, strides: Ints, itemsize: int, band_nbytes: int) -> Iterator[Picks]:
    """Cut picks into ones that have no gaps or, gaps included, are at most a band; large gaps lie between them."""
    if not _has_gaps(picks):
        yield picks
        return
    axis = next(axis for axis, pick in enumerate(picks) if pick.count > 1)
    pick = picks[axis]
    row_nbytes = math.prod(p.extent for p in picks[axis + 1 :]) * itemsize
    apart = (pick.step - 1) * strides[axis] >= _APART_NBYTES or row_nbytes > band_nbytes
    many = 1 if apart else (band_nbytes // row_nbytes - 1) // pick.step + 1
    for i in range(0, pick.count, many):
        some = AxisSlice(pick.start + i * pick.step, pick.step, min(many, pick.count - i), drop=False)
        part = (*picks[:axis], some, *picks[axis + 1 :])
        if some.count == 1:
            yield from _parts(part, strides, itemsize, band_nbytes)
        else:
            yield part


def _batches(parts: Iterator[Picks], itemsize: int, band_nbytes: int) -> Iterator[list[Picks]]:
    """Group parts to be read together: those with gaps are at most a band in all."""
    batch: list[Picks] = []
    held = 0
    for part in parts:
        nbytes = math.prod(pick.extent for pick in part) * itemsize if _has_gaps(part) else 0
        if batch and (held + nbytes > band_nbytes or len(batch) == _MOST_PARTS):
            yield batch
            batch, held = [], 0
        batch.append(part)
        held += nbytes
    yield batch


def _places(part: Picks, picks: Picks) -> tuple[slice, ...]:
    """Return where in the result of all picks a part of them goes."""
    first = [(p.start - pick.start) // pick.step for p, pick in zip(part, picks, strict=True)]
    return tuple(slice(i, i + p.count) for i, p in zip(first, part, strict=True))


def _fill(
    source: Source, row: int, picks: Picks, parts: list[Picks], out: torch.Tensor, *, threads: int, budget_nbytes: int
) -> None:
    """Fill those places of `out`, which is for all picks, that the parts stand for."""
    targets = [out[_places(part, picks)] for part in parts]
    # With a gap inside a part, the whole of it is read and thinned out afterwards.
    into = [
        torch.empty([p.extent for p in part], dtype=out.dtype, device="cpu") if _has_gaps(part) else target
        for part, target in zip(parts, targets, strict=True)
    ]
    boxes = Boxes(
        matrix_of([tuple(p.start for p in part) for part in parts], out.dim(), 0),
        matrix_of([tuple(p.extent for p in part) for part in parts], out.dim(), 1),
    )
    rows = np.full(len(parts), row, np.int64)
    source.fill(rows, boxes, into, threads=threads, budget_nbytes=budget_nbytes)
    for part, target, dense in zip(parts, targets, into, strict=True):
        if dense is not target:
            target.copy_(dense[tuple(slice(None, None, p.step) for p in part)])
