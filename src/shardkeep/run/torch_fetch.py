"""
Tensors filled from items of torch's layout, whoever wrote them.

What lies in its file as one dense tensor is read straight into place. What was transformed, or is no plain tensor, is
read whole, and torch rebuilds it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

import torch

from shardkeep.codec.chain import transformed_input
from shardkeep.codec.registry import ExtensionRegistry
from shardkeep.errors import MalformedFile, PickleRefused, StateMismatch
from shardkeep.format.dtypes import DType, to_torch
from shardkeep.format.region import Box, Ints
from shardkeep.format.torch_archive import FoundTensor
from shardkeep.layout.torch_metadata import Place
from shardkeep.run.item_files import Files, Item, batches, check_inside, find_tensors, nbytes_of, read_raw
from shardkeep.run.torch_open import CodedFiles
from shardkeep.run.torch_read import ChunkRead, in_order, read_chunks

Undo = Callable[[Any, Sequence[str], IO[bytes]], IO[bytes]]
"""Gives the stream of an item as it was before its extensions: what asked for it, their descriptors, the stored one."""


class Wanted(NamedTuple):
    """A box of a stored chunk, and the tensor to fill with it."""

    place: Place
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


def fill(
    files: Files, wanted: Sequence[Wanted], *, undo: Undo | None = None, threads: int, budget_nbytes: int
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
    for batch in batches(rest, lambda pair: pair[1].nbytes):
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


def plain_stream(place: Place, data: bytearray, undo: Undo, asks: Any) -> io.BytesIO:
    """Return an item's bytes as they were before its extensions."""
    if not place.descriptors:
        return io.BytesIO(data)
    return io.BytesIO(undo(asks, place.descriptors, io.BytesIO(data)).read(-1))


def _find(files: Files, wanted: Sequence[Wanted], items: Sequence[Item]) -> list[FoundTensor | None]:
    """Find where the bytes of each tensor begin, and what they are; None where only torch can tell."""
    found: list[FoundTensor | None] = []
    sought: dict[Item, list[int]] = {}
    for row, (each, item) in enumerate(zip(wanted, items, strict=True)):
        start = _known_start(each)
        found.append(None)
        if start is not None and each.dtype is not None:
            found[row] = FoundTensor(each.dtype, each.shape, tuple(range(len(each.shape))), start)
        elif not each.place.descriptors:
            sought.setdefault(item, []).append(row)
    for (item, rows), where in zip(sought.items(), find_tensors(files, list(sought)), strict=True):
        for row in rows:
            if where is not None:
                found[row] = FoundTensor(where.dtype, where.shape, where.order, item.offset + where.start)
    return found


def _known_start(each: Wanted) -> int | None:
    place = each.place
    if each.dtype is None or place.descriptors:
        return None
    nbytes = nbytes_of(each.shape, each.dtype)
    if place.data_start is not None and place.offset <= place.data_start <= place.offset + place.nbytes - nbytes:
        return place.data_start
    return None


def _check_source(each: Wanted, shape: Ints) -> None:
    offsets, sizes = each.source.offsets, each.source.sizes
    if len(shape) != len(sizes) or any(o + n > full for o, n, full in zip(offsets, sizes, shape, strict=True)):
        raise MalformedFile(
            f"{each.key!r}: {sizes} at {offsets} was asked of a chunk that is stored as {shape}",
            hint="the metadata do not belong to these files",
            key=each.key,
            file=each.place.file,
            offset=each.place.offset,
        )


def _note_cast(casts: dict[str, str], each: Wanted, stored: torch.dtype) -> None:
    if stored != each.target.dtype:
        casts[each.key] = f"{stored} -> {each.target.dtype}".replace("torch.", "")


def _fill_decoded(each: Wanted, data: bytearray, undo: Undo, casts: dict[str, str]) -> None:
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
