"""
The items of a load plan, from files of torch's layout into what the planner gives for them.

Planners that make room for each item when asked, and take it back when it is filled, are asked for a bounded amount at
a time; the default one has its tensors in place.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardkeep.errors import MalformedFile, StateMismatch
from shardkeep.format.dtypes import DType, known_to_torch, of_torch
from shardkeep.format.region import Box, Ints
from shardkeep.format.torch_archive import FoundTensor
from shardkeep.options import Options
from shardkeep.protocol.load_planner import DefaultLoadPlanner
from shardkeep.protocol.metadata import Metadata, is_tensor_entry
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan, ReadItem
from shardkeep.run.item_files import Files, Item, check_inside, find_tensors, nbytes_of, read_raw
from shardkeep.run.read import Reads
from shardkeep.run.torch_read import ChunkRead, in_order, read_chunks
from shardkeep.state.devices import settle

log = logging.getLogger("shardkeep")

_BATCH_NBYTES = 256 << 20
"""What planners are asked to have room for at a time."""


class _Wanted(NamedTuple):
    request: ReadItem
    place: Any
    item: Item


def read_plan(
    store: Reads,
    metadata: Metadata | None,
    places: dict[Any, Any],
    plan: LoadPlan,
    planner: LoadPlanner,
    transforms: Any,
) -> None:
    """Read every item of the plan."""
    files = Files(store, getattr(metadata, "shardkeep_sums", None) or {})
    wanted = [_want(files, places, request) for request in plan.items]
    check_inside(files, (each.item for each in wanted))
    objects = [each for each in wanted if each.request.type == LoadItemType.BYTE_IO]
    tensors = [each for each in wanted if each.request.type != LoadItemType.BYTE_IO]
    for batch in _batches(objects, lambda each: each.item.nbytes):
        _read_objects(files, batch, planner, transforms)
    found = _find(files, tensors, metadata)
    in_place = type(planner).resolve_tensor is DefaultLoadPlanner.resolve_tensor
    casts = _Casts()
    direct = [(each, where) for each, where in zip(tensors, found, strict=True) if where is not None]
    batches = [direct] if in_place else _batches(direct, lambda each: each[0].item.nbytes)
    for some in batches:
        _read_direct(files, some, planner, casts)
    rest = [each for each, where in zip(tensors, found, strict=True) if where is None]
    for batch in _batches(rest, lambda each: each.item.nbytes):
        _read_decoded(files, batch, planner, transforms, casts)
    casts.tell()


def _batches(items: Sequence[Any], nbytes: Any) -> Iterator[list[Any]]:
    batch: list[Any] = []
    held = 0
    for item in items:
        if batch and held + nbytes(item) > _BATCH_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += nbytes(item)
    if batch:
        yield batch


def _want(files: Files, places: dict[Any, Any], request: ReadItem) -> _Wanted:
    key = request.storage_index.fqn
    place = places.get(request.storage_index)
    if place is None:
        raise MalformedFile(f"the metadata do not say where {request.storage_index} is", key=key)
    return _Wanted(request, place, Item(files.number(place.relative_path), place.offset, place.length, key))


def _read_objects(files: Files, batch: list[_Wanted], planner: LoadPlanner, transforms: Any) -> None:
    for each, data in zip(batch, _read_whole(files, batch), strict=True):
        stream = _untransformed(each, data, transforms)
        planner.load_bytes(each.request, stream)


def _read_whole(files: Files, batch: list[_Wanted]) -> list[bytearray]:
    options = Options()
    items = [each.item for each in batch]
    return read_raw(files, items, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)


def _untransformed(each: _Wanted, data: bytearray, transforms: Any) -> io.BytesIO:
    descriptors = getattr(each.place, "transform_descriptors", None) or ()
    if not descriptors:
        return io.BytesIO(data)
    stream = transforms.transform_load_stream(each.request, descriptors, io.BytesIO(data))
    return io.BytesIO(stream.read(-1))


def _find(files: Files, wanted: list[_Wanted], metadata: Metadata | None) -> list[FoundTensor | None]:
    """Find where the bytes of each tensor begin, and what they are; None where only torch can tell."""
    shapes = _Shapes(metadata)
    found: list[FoundTensor | None] = []
    sought: dict[int, list[int]] = {}
    for row, each in enumerate(wanted):
        known: FoundTensor | None = None
        described = shapes.of(each.request)
        if getattr(each.place, "transform_descriptors", None):
            pass
        elif described is not None and (start := _known_start(each, *described)) is not None:
            shape, dtype = described
            known = FoundTensor(dtype, shape, tuple(range(len(shape))), start)
        else:
            sought.setdefault(id(each.place), []).append(row)
        found.append(known)
    rows = [rows[0] for rows in sought.values()]
    made = find_tensors(files, [wanted[row].item for row in rows])
    for same, where in zip(sought.values(), made, strict=True):
        for row in same:
            item = wanted[row].item
            if where is not None:
                found[row] = FoundTensor(where.dtype, where.shape, where.order, item.offset + where.start)
    return found


def _known_start(each: _Wanted, shape: Ints, dtype: DType) -> int | None:
    nbytes = nbytes_of(shape, dtype)
    start = getattr(each.place, "data_start", None)
    if type(start) is int and each.item.offset <= start <= each.item.offset + each.item.nbytes - nbytes:
        return start
    # Of this length, it can only be the bytes themselves: every archive is longer.
    return each.item.offset if each.item.nbytes == nbytes else None


class _Shapes:
    """What the metadata say of each stored chunk."""

    def __init__(self, metadata: Metadata | None) -> None:
        self._entries = {} if metadata is None else metadata.state_dict_metadata
        self._sizes: dict[str, dict[Ints, Ints]] = {}

    def of(self, request: ReadItem) -> tuple[Ints, DType] | None:
        """Return shape and dtype of the chunk that a request reads from."""
        index = request.storage_index
        entry: Any = self._entries.get(index.fqn)
        if entry is None or not is_tensor_entry(entry) or entry.properties.dtype not in known_to_torch():
            return None
        sizes = self._sizes.get(index.fqn)
        if sizes is None:
            sizes = self._sizes[index.fqn] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
        shape = sizes.get(tuple(index.offset) if index.offset is not None else (0,) * len(entry.size))
        return None if shape is None else (shape, of_torch(entry.properties.dtype))


class _Casts:
    """Conversions of dtype, told once a load."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def see(self, key: str, stored: torch.dtype, target: torch.dtype) -> None:
        """Note a tensor that is filled from another dtype."""
        if stored != target:
            self._made.setdefault(f"{stored} -> {target}".replace("torch.", ""), key)

    def tell(self) -> None:
        """Log what was converted."""
        for change, key in self._made.items():
            log.warning("tensors are converted as they are loaded: %s (%r, and perhaps others)", change, key)


def _read_direct(
    files: Files, some: Sequence[tuple[_Wanted, FoundTensor]], planner: LoadPlanner, casts: _Casts
) -> None:
    targets = [_target(each.request, planner) for each, _ in some]
    chunks = []
    for (each, where), target in zip(some, targets, strict=True):
        source = _source(each, where.shape)
        chunk = ChunkRead(each.item, where.start, where.shape, where.dtype, source, target)
        casts.see(each.item.key, _torch_dtype(where.dtype), target.dtype)
        if where.order != tuple(range(len(where.order))):
            chunk = in_order(chunk, where.order)
        chunks.append(chunk)
    settle(targets)
    options = Options()
    read_chunks(files, chunks, threads=options.io_threads, budget_nbytes=options.host_budget_bytes)
    settle(targets)
    torch.autograd.graph.increment_version(targets)
    for (each, _), target in zip(some, targets, strict=True):
        planner.commit_tensor(each.request, target)


def _torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if tuple(target.shape) != tuple(request.lengths):
        raise StateMismatch(
            f"req {request.storage_index} mismatch sizes {target.size()} vs {request.lengths}",
            hint="the planner gave a tensor that does not fit its own plan",
            key=request.storage_index.fqn,
        )
    return target


def _source(each: _Wanted, shape: Ints) -> Box:
    offsets, sizes = tuple(each.request.storage_offsets), tuple(each.request.lengths)
    if len(shape) != len(sizes) or any(
        o < 0 or n < 0 or o + n > full for o, n, full in zip(offsets, sizes, shape, strict=False)
    ):
        raise MalformedFile(
            f"{each.item.key!r}: {sizes} at {offsets} was asked of a chunk that is stored as {shape}", key=each.item.key
        )
    return Box(offsets, sizes)


def _read_decoded(files: Files, batch: list[_Wanted], planner: LoadPlanner, transforms: Any, casts: _Casts) -> None:
    """Read whole items that are no plain tensor in the file, and let torch rebuild them."""
    for each, data in zip(batch, _read_whole(files, batch), strict=True):
        stream = _untransformed(each, data, transforms)
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
        source = _source(each, tuple(tensor.shape))
        for axis, (offset, size) in enumerate(zip(source.offsets, source.sizes, strict=True)):
            tensor = tensor.narrow(axis, offset, size)
        target = _target(each.request, planner)
        casts.see(each.item.key, tensor.dtype, target.dtype)
        target.copy_(tensor)
        planner.commit_tensor(each.request, target)
