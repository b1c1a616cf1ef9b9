"""
The items of a load plan, from files of torch's layout into what the planner gives for them.

Planners that make room for each item when asked, and take it back when it is filled, are asked for a bounded amount at
a time; the default one has its tensors in place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import IO, Any

import torch

from shardkeep.errors import MalformedFile, StateMismatch
from shardkeep.format.dtypes import DType, known_to_torch
from shardkeep.format.region import Box, Ints
from shardkeep.layout.torch_files import Sums
from shardkeep.layout.torch_metadata import Place, place_of, sums_of
from shardkeep.options import Options
from shardkeep.protocol.load_planner import DefaultLoadPlanner
from shardkeep.protocol.metadata import Metadata, is_tensor_entry
from shardkeep.protocol.planners import LoadPlanner
from shardkeep.protocol.plans import LoadItemType, LoadPlan, ReadItem
from shardkeep.run.item_files import Files, Item, batches, check_inside, read_raw
from shardkeep.run.read import Reads
from shardkeep.run.torch_fetch import Wanted, fill, plain_stream
from shardkeep.state.devices import settle
from shardkeep.store.protocol import requests_of

log = logging.getLogger("shardkeep")


def read_plan(
    store: Reads,
    metadata: Metadata | None,
    places: Mapping[Any, Any],
    plan: LoadPlan,
    planner: LoadPlanner,
    transforms: Any,
) -> None:
    """Read every item of the plan."""
    options = Options()
    files = Files(store, _sums_in(metadata))
    wanted = [(request, _place(places, request)) for request in plan.items]
    objects = [each for each in wanted if each[0].type == LoadItemType.BYTE_IO]
    tensors = [each for each in wanted if each[0].type != LoadItemType.BYTE_IO]

    for some in batches(objects, lambda each: each[1].nbytes):
        _read_objects(files, some, planner, transforms, options)
    # A planner of another kind may make room for each tensor when it is asked.
    in_place = getattr(
        type(planner), "resolve_tensor", None
    ) is DefaultLoadPlanner.resolve_tensor and "resolve_tensor" not in vars(planner)
    chunks = _Chunks(metadata)
    casts: dict[str, str] = {}
    for some in [tensors] if in_place else batches(tensors, lambda each: each[1].nbytes):
        casts |= _read_tensors(files, some, chunks, planner, transforms, options)
    if isinstance(planner, DefaultLoadPlanner):
        return  # it has said so itself
    for change in sorted(set(casts.values())):
        key = next(key for key, each in casts.items() if each == change)
        log.warning("tensors are converted as they are loaded: %s (%r, and perhaps others)", change, key)


def _place(places: Mapping[Any, Any], request: ReadItem) -> Place:
    info = places.get(request.storage_index)
    if info is None:
        key = request.storage_index.fqn
        raise MalformedFile(f"the metadata do not say where {request.storage_index} is", key=key)
    return place_of(info)


def _sums_in(metadata: Metadata | None) -> dict[str, Sums]:
    said = getattr(metadata, "shardkeep_sums", None) or {}
    try:
        return sums_of(said)
    except (AttributeError, TypeError, ValueError) as exc:
        raise MalformedFile(f"what the metadata say of the files' digests makes no sense: {exc}") from exc


def _read_objects(
    files: Files, some: list[tuple[ReadItem, Place]], planner: LoadPlanner, transforms: Any, options: Options
) -> None:
    items = [
        Item(files.number(place.file), place.offset, place.nbytes, request.storage_index.fqn) for request, place in some
    ]
    check_inside(files, items)
    threads = requests_of(files.store, options.io_threads)
    held = read_raw(files, items, threads=threads, budget_nbytes=options.host_budget_bytes)
    for (request, place), data in zip(some, held, strict=True):
        planner.load_bytes(request, plain_stream(place, data, transforms.transform_load_stream, request))


def _read_tensors(
    files: Files,
    some: list[tuple[ReadItem, Place]],
    chunks: _Chunks,
    planner: LoadPlanner,
    transforms: Any,
    options: Options,
) -> dict[str, str]:
    targets = [_target(request, planner) for request, _ in some]
    wanted = []
    for (request, place), target in zip(some, targets, strict=True):
        shape, dtype = chunks.of(request)
        box = Box(tuple(request.storage_offsets), tuple(request.lengths))
        wanted.append(Wanted(place, request.storage_index.fqn, shape, dtype, box, target, request))

    def undo(request: ReadItem, descriptors: Any, stream: IO[bytes]) -> IO[bytes]:
        made: IO[bytes] = transforms.transform_load_stream(request, descriptors, stream)
        return made

    settle(targets)
    threads = requests_of(files.store, options.io_threads)
    _, casts = fill(files, wanted, undo=undo, threads=threads, budget_nbytes=options.host_budget_bytes)
    settle(targets)
    # The bytes went past autograd, which must not take what it saved from these tensors for still valid.
    torch.autograd.graph.increment_version(targets)
    for (request, _), target in zip(some, targets, strict=True):
        planner.commit_tensor(request, target)
    return casts


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if tuple(target.shape) != tuple(request.lengths):
        raise _WrongTarget(
            f"req {request.storage_index} mismatch sizes {target.size()} vs {request.lengths}",
            hint="the planner gave a tensor that does not fit its own plan",
            key=request.storage_index.fqn,
        )
    return target


class _WrongTarget(StateMismatch, AssertionError):
    """A planner gave a tensor of another size than it asked for."""


class _Chunks:
    """What the metadata say of each stored chunk."""

    def __init__(self, metadata: Metadata | None) -> None:
        self._entries = {} if metadata is None else metadata.state_dict_metadata
        self._sizes: dict[str, dict[Ints, Ints]] = {}

    def of(self, request: ReadItem) -> tuple[Ints, DType | None]:
        """Return shape and dtype of the chunk that a request reads from; no dtype where nothing is said of it."""
        index = request.storage_index
        entry: Any = self._entries.get(index.fqn)
        if entry is None or not is_tensor_entry(entry):
            return (), None
        sizes = self._sizes.get(index.fqn)
        if sizes is None:
            sizes = self._sizes[index.fqn] = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}
        shape = sizes.get(tuple(index.offset) if index.offset is not None else (0,) * len(entry.size))
        dtype = known_to_torch().get(entry.properties.dtype)
        return ((), None) if shape is None else (shape, dtype)
