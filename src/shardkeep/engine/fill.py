"""
Fill tensors from an opened checkpoint of any layout: plan the load, plan each file's reads, execute them.

Chunks that are boxes of arrays in their file, whatever the order of their axes, go through the read pipeline. An item
that a stream extension changed, or that is no plain tensor, is read whole, and torch decodes it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from shardkeep.engine import torch_source
from shardkeep.engine.reader import Source, read_files
from shardkeep.engine.tensors import host_address, scattered_memory
from shardkeep.engine.workers import ACCELERATOR_WINDOW_NBYTES, WINDOW_NBYTES, Scattered, limits_for_reads
from shardkeep.errors import MalformedFile, PickleRefused, StateMismatch
from shardkeep.format.boxes import (
    AxisSlice,
    Box,
    Boxes,
    IntArray,
    Ints,
    distinct,
    slices,
    strides_of,
    whole,
    widen,
    within,
)
from shardkeep.format.dtypes import DType, by_code, known_to_torch, of_torch, to_torch
from shardkeep.format.record import Blob, Record, Totals, data_sizes
from shardkeep.format.torch_zip import ArchivedTensor
from shardkeep.layouts.torch import ItemLocation
from shardkeep.options import Options
from shardkeep.plan.load_plan import ReadRequests, Scatter, plan_files, plan_load
from shardkeep.state.leaves import copy_bits

Picks = tuple[AxisSlice, ...]

_LARGE_GAP_NBYTES = 64 << 10
"""Gaps of this size are not read: what is picked with such a step is read one by one."""
_BAND_NBYTES = 64 << 20
_MOST_PARTS = 4096


def fill(
    source: Source,
    tensor: IntArray,
    boxes: Boxes,
    into: Sequence[torch.Tensor],
    options: Options,
    *,
    first_file: float = 0.0,
    complete: bool = True,
    decoded: dict[int, torch.dtype] | None = None,
    keep_cached: bool = True,
) -> int:
    """
    Fill tensors from a checkpoint, and return the number of bytes read.

    For each destination, `tensor` has its row in the index, `boxes` the box it wants, and `into` a tensor of the box's
    shape, on any device, of any stride and dtype. `first_file`, from 0 to 1, is where in the list of files to begin. If
    not `complete`, what the checkpoint lacks stays as it is. `decoded` gets the stored dtype of each destination that
    only torch could decode. `keep_cached` is as in `read_files`.
    """
    index, sizes = source.index, data_sizes(source.record)
    source.locate(distinct(np.asarray(index.tensors.alias, np.int64)[tensor]))
    codes = np.asarray(index.tensors.dtype)[tensor].tolist()
    known = known_to_torch()
    address = [
        host_address(target) if target.dtype in known and known[target.dtype].code == stored else 0
        for target, stored in zip(into, codes, strict=True)
    ]
    # As wide as the index; columns that are cut off are padding.
    axes = index.tensors.shape.shape[1]
    wide = max(axes, boxes.axes)
    offsets, lengths = widen(boxes.offsets, wide, 0)[:, :axes], widen(boxes.sizes, wide, 1)[:, :axes]
    requests = ReadRequests(offsets, lengths, tensor, np.array(address, np.int64))
    runs, parts = plan_load(
        index.narrowed(tensor, requests), requests, sizes, aligned=source.aligned, complete=complete
    )
    scatters = [part for part in parts if part.start >= 0]
    wanted = {part.want for part in scatters}
    memory = {want: scattered_memory(into[want], to_torch(by_code(codes[want]))) for want in wanted}
    opaque: list[Scatter] = []
    spans: list[tuple[Scatter, ArchivedTensor]] = []
    for part in parts if len(parts) > len(scatters) else ():
        if part.start >= 0:
            continue
        found = source.strided(part.chunk)
        if found is None:
            opaque.append(part)
        elif not _plan_strided(part, found, into, scatters, memory):
            spans.append((part, found))
    threads, window = _limits(source, into, options)
    plans = plan_files(runs, scatters, source.record.files, window_nbytes=window)
    start = int(first_file * len(plans))
    plans = plans[start:] + plans[:start]
    nbytes = read_files(
        source.data_files, plans, memory, threads=threads, window_nbytes=window, keep_cached=keep_cached
    )
    if spans:
        nbytes += _fill_spans(source, spans, into, options)
    if not opaque or not isinstance(source, torch_source.TorchSource):
        return nbytes
    stored = _fill_decoded(source, opaque, into, options)
    if decoded is not None:
        decoded.update(stored)
    return nbytes + sum(int(source.items.nbytes[each.chunk]) for each in opaque)


def _limits(source: Source, into: Sequence[torch.Tensor], options: Options) -> tuple[int, int]:
    on_host = all(each.device.type == "cpu" for each in into)
    window = WINDOW_NBYTES if on_host else ACCELERATOR_WINDOW_NBYTES
    coded = any(file.chain is not None for file in source.record.files)
    return limits_for_reads(source.store, options, window, coded=coded)


def _plan_strided(
    part: Scatter,
    found: ArchivedTensor,
    into: Sequence[torch.Tensor],
    scatters: list[Scatter],
    memory: dict[int, Scattered],
) -> bool:
    """Plan to read a chunk that is a box of a larger array, its axes in any order; False for one that is none."""
    embedding = found.embedding()
    if embedding is None:
        return False
    order, sizes = embedding
    gaps = len(sizes) > len(order)

    def placed(numbers: Ints, *last: int) -> Ints:
        return (*(numbers[axis] for axis in order), *(last if gaps else ()))

    # A view with its axes in that order is a destination of its own.
    target = into[part.want][slices(part.target)].permute(order)
    target = target.unsqueeze(-1) if gaps else target
    want = len(into) + len(memory)
    memory[want] = scattered_memory(target, to_torch(found.dtype))
    scatters.append(
        replace(
            part,
            start=found.start,
            shape=sizes,
            source=Box(placed(part.source.offsets, 0), placed(part.source.sizes, 1)),
            want=want,
            target=whole(tuple(target.shape)),
        )
    )
    return True


def _fill_spans(
    source: Source, parts: Sequence[tuple[Scatter, ArchivedTensor]], into: Sequence[torch.Tensor], options: Options
) -> int:
    """Read chunks that are no boxes of an array, or in another byte order, from their first wanted byte to the last."""
    files, nbytes = torch_source.ItemFiles(source.store, {}), 0
    for batch in torch_source.item_batches(parts, lambda each: each[1].span_of(each[0].source)[1]):
        items = []
        for part, found in batch:
            begin, span = found.span_of(part.source)
            name = source.record.files[part.file].name
            items.append(torch_source.Item(files.number(name), found.start + begin, span, name))
        for (part, found), data in zip(batch, torch_source.read_items(files, items, options), strict=True):
            nbytes += len(data)
            if found.swapped:  # complex numbers by their halves
                size = found.dtype.itemsize // (2 if found.dtype.name.startswith("complex") else 1)
                np.frombuffer(data, f"u{size}").byteswap(inplace=True)
            flat = torch.frombuffer(data, dtype=torch.uint8).view(to_torch(found.dtype))
            copy_bits(into[part.want][slices(part.target)], flat.as_strided(part.source.sizes, found.strides))
    return nbytes


class _TensorRefused(PickleRefused, pickle.UnpicklingError):
    """Torch refuses to rebuild a tensor safely; also the error that torch raises for it."""


def _fill_decoded(
    source: torch_source.TorchSource, parts: Sequence[Scatter], into: Sequence[torch.Tensor], options: Options
) -> dict[int, torch.dtype]:
    """Read whole items and let torch decode them; return the stored dtype of each destination."""
    stored: dict[int, torch.dtype] = {}
    for batch in torch_source.item_batches(parts, lambda each: int(source.items.nbytes[each.chunk])):
        items = [source.item(each.chunk) for each in batch]
        raw = torch_source.read_items(source.files, items, options)
        for each, item, data in zip(batch, items, raw, strict=True):
            descriptors, stream = source.descriptors.get(each.chunk, ()), io.BytesIO(data)
            if descriptors:
                stream = io.BytesIO(source.undo(each.chunk, descriptors, stream).read(-1))
            file = source.record.files[item.file].name
            where = f"{file}: {item.key!r} at offset {item.offset}"
            try:
                tensor = torch.load(stream, map_location="cpu", weights_only=True)
            except Exception as exc:  # torch raises many kinds of errors for what is not one of its archives
                kind = _TensorRefused if isinstance(exc, pickle.UnpicklingError) else MalformedFile
                raise kind(f"{where} cannot be read: {exc}", key=item.key, file=file) from exc
            if not isinstance(tensor, torch.Tensor):
                raise MalformedFile(f"{where} is a {type(tensor).__name__}, not a tensor", key=item.key, file=file)
            _check_box(each.source, tuple(tensor.shape), item, file)
            into[each.want][slices(each.target)].copy_(tensor[slices(each.source)])
            stored[each.want] = tensor.dtype
    return stored


def _check_box(box: Box, shape: Ints, item: torch_source.Item, file: str) -> None:
    if not within(shape, box):
        raise MalformedFile(
            f"{item.key!r}: {box.sizes} at {box.offsets} was asked of a chunk that is stored as {shape}",
            hint="the metadata do not belong to these files",
            key=item.key,
            file=file,
            offset=item.offset,
        )


class ChunkRequest(NamedTuple):
    location: ItemLocation
    key: str
    shape: Ints
    dtype: DType | None
    """By the metadata; None for one that this version does not know."""
    source: Box
    target: torch.Tensor
    request: Any = None
    """Passed to `Undo`."""


Undo = Callable[[Any, Sequence[str], IO[bytes]], IO[bytes]]
"""Reverts stream extensions: the request, the descriptors, and the stored stream."""


def fill_items(
    files: torch_source.ItemFiles,
    wanted: Sequence[ChunkRequest],
    options: Options,
    *,
    undo: Undo | None = None,
) -> dict[str, str]:
    """Fill every target; return the stored and the wanted dtype of each key that was converted."""
    items = [files.item(each.location, each.key) for each in wanted]
    torch_source.check_inside(files.entries, items)
    filled = [row for row, each in enumerate(wanted) if each.target.numel()]
    wanted, items = [wanted[row] for row in filled], [items[row] for row in filled]
    source = _source_of_items(files, wanted, items, undo)
    targets = [plain_target(each.target, key=each.key) for each in wanted]
    decoded: dict[int, torch.dtype] = {}
    rows, boxes = np.arange(len(wanted)), Boxes.of([each.source for each in wanted])
    fill(source, rows, boxes, targets, options, decoded=decoded)
    casts: dict[str, str] = {}
    for row, (each, target) in enumerate(zip(wanted, targets, strict=True)):
        if target is not each.target:
            each.target.copy_(target)
        stored = decoded.get(row, to_torch(source.index.dtype(row)))
        if stored != target.dtype:
            casts[each.key] = f"{stored} -> {target.dtype}".replace("torch.", "")
    return casts


def _source_of_items(
    files: torch_source.ItemFiles, wanted: Sequence[ChunkRequest], items: Sequence[torch_source.Item], undo: Undo | None
) -> torch_source.TorchSource:
    """Make a source with one tensor for each requested chunk, as the metadata describe it."""
    for each, item in zip(wanted, items, strict=True):
        _check_box(each.source, each.shape, item, each.location.file)
    # If the dtype is not known, or is not the stored one, torch decodes the item: then any dtype serves.
    index, chunk_items, descriptors = torch_source.index_of_items(
        files.number,
        [[(whole(each.shape), each.location)] for each in wanted],
        keys=[each.key for each in wanted],
        dtypes=[each.dtype or of_torch(torch.uint8) for each in wanted],
        shapes=[each.shape for each in wanted],
        where="the requested chunks",
    )
    return torch_source.TorchSource(
        store=files.store,
        record=Record(
            save_id="",
            saved_at="",
            writer="",
            world_size=1,
            totals=Totals(tensors=0, chunks=0, values=0, tensor_bytes=0),
            index=Blob(name="", nbytes=0, checksum=""),
            files=files.entries,
        ),
        index=index,
        digests=files,
        files=files,
        items=chunk_items,
        descriptors=descriptors,
        objects={},
        undo=(lambda row, *stored: undo(wanted[row].request, *stored)) if undo else torch_source.undo_extensions,
    )


def plain_target(target: torch.Tensor, *, key: str) -> torch.Tensor:
    """Return the target, or a tensor to copy into it for conjugated or negated views; raise if its elements overlap."""
    if any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)):
        raise OverlappingTarget(
            f"{key!r} is expanded: several of its elements share memory", hint="load into a clone of it", key=key
        )
    if target.is_conj() or target.is_neg():
        return torch.empty_like(target)
    return target


class OverlappingTarget(StateMismatch, RuntimeError):
    """A tensor that cannot hold what is to be loaded into it."""


def read_whole(source: Source, tensors: IntArray, options: Options) -> list[torch.Tensor]:
    """Return these tensors, none of them tied to another, as new ones."""
    index = source.index
    source.check(tensors)
    into = [torch.empty(index.shape(row), dtype=to_torch(index.dtype(row)), device="cpu") for row in tensors.tolist()]
    sizes = np.asarray(index.tensors.shape[tensors], np.int64)
    fill(source, tensors, Boxes(np.zeros_like(sizes), sizes), into, options)
    return into


def read_picks(source: Source, row: int, picks: Picks, options: Options) -> torch.Tensor:
    dtype = source.index.dtype(row)
    budget = options.host_budget_bytes
    if math.prod(pick.count for pick in picks) * dtype.itemsize > budget:
        source.check(np.array([source.index.tensors.alias[row]], np.int64))
    out = torch.empty([pick.count for pick in picks], dtype=to_torch(dtype), device="cpu")
    if out.numel():
        # What is read with gaps in it is held until it has been thinned out.
        band = min(_BAND_NBYTES, budget // 4)
        strides = tuple(stride * dtype.itemsize for stride in strides_of(source.index.shape(row)))

        def held_nbytes(part: Picks) -> int:
            """All of a part that has gaps, and a little in any case."""
            nbytes = math.prod(pick.extent for pick in part) * dtype.itemsize if _has_gaps(part) else 0
            return max(nbytes, band // _MOST_PARTS)

        for parts in torch_source.item_batches(
            _parts(picks, strides, dtype.itemsize, band), held_nbytes, most_nbytes=band
        ):
            _fill_parts(source, row, picks, parts, out, replace(options, host_budget_bytes=budget - band))
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
    apart = (pick.step - 1) * strides[axis] >= _LARGE_GAP_NBYTES or row_nbytes > band_nbytes
    many = 1 if apart else (band_nbytes // row_nbytes - 1) // pick.step + 1
    for i in range(0, pick.count, many):
        some = AxisSlice(pick.start + i * pick.step, pick.step, min(many, pick.count - i), drop=False)
        part = (*picks[:axis], some, *picks[axis + 1 :])
        if some.count == 1:
            yield from _parts(part, strides, itemsize, band_nbytes)
        else:
            yield part


def _fill_parts(
    source: Source, row: int, picks: Picks, parts: list[Picks], out: torch.Tensor, options: Options
) -> None:
    """Fill those places of `out`, which is for all picks, that the parts stand for."""
    firsts = [[(p.start - pick.start) // pick.step for p, pick in zip(part, picks, strict=True)] for part in parts]
    targets = [
        out[tuple(slice(at, at + p.count) for at, p in zip(first, part, strict=True))]
        for first, part in zip(firsts, parts, strict=True)
    ]
    # With a gap inside a part, the whole of it is read and thinned out afterwards.
    into = [
        torch.empty([p.extent for p in part], dtype=out.dtype, device="cpu") if _has_gaps(part) else target
        for part, target in zip(parts, targets, strict=True)
    ]
    boxes = Boxes.of([Box(tuple(p.start for p in part), tuple(p.extent for p in part)) for part in parts])
    fill(source, np.full(len(parts), row, np.int64), boxes, into, options)
    for part, target, dense in zip(parts, targets, into, strict=True):
        if dense is not target:
            target.copy_(dense[tuple(slice(None, None, p.step) for p in part)])
