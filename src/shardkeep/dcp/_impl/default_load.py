"""
Loads by the default planner and our own reader: the engine's session, in columns. No plans of items are made.

The state is flattened by torch's rules and compared with the index of the checkpoint. Objects are unpickled before the
first tensor is changed. What only torch can fill, such as a quantized tensor, is read item by item.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from shardkeep.dcp._impl import plans
from shardkeep.dcp._impl.file_reader import FileSystemReader
from shardkeep.dcp._impl.planners import DefaultLoadPlanner, FlatState, flat_state, load_object, old_flat_state
from shardkeep.engine.fill import plain_target
from shardkeep.engine.load_session import LoadTarget, MatchedState
from shardkeep.engine.reader import Source
from shardkeep.engine.torch_source import TorchSource, item_batches, read_items
from shardkeep.engine.torch_view import TorchView
from shardkeep.errors import CheckpointError, InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import intersect
from shardkeep.format.dtypes import by_code, to_torch
from shardkeep.format.torch_zip import read_object
from shardkeep.layouts import torch_values as protocol
from shardkeep.options import Options, collector_paused
from shardkeep.plan.load_plan import is_tiled
from shardkeep.state import flatten
from shardkeep.state.describe import describe_leaves
from shardkeep.state.leaves import ShardedBox, has_part, is_dtensor, is_ordinary
from shardkeep.storage import file_systems

_ATOMS = {int, float, bool, str, bytes, type(None)}


def loads_by_default(reader: object, planner: object) -> TypeGuard[FileSystemReader]:
    """Return whether nothing of the user's takes part in a load: our planner, and our reader with a store below it."""
    return (
        file_systems.keeps_all(planner, DefaultLoadPlanner)
        and isinstance(reader, FileSystemReader)
        and file_systems.keeps_all(reader, FileSystemReader)
        and reader.reads_unchanged
        and file_systems.has_store(reader.fs)
    )


class _Found(NamedTuple):
    """What is put into the state after all tensors were read."""

    objects: dict[str, Any]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors that are filled through another one."""
    by_torch: list[str]
    """Keys of tensors that only torch can fill."""


@dataclass(frozen=True)
class DefaultTarget(LoadTarget):
    """A state dict to fill, in the steps of `engine.load_session`. Each rank judges for itself."""

    state: Callable[[], dict[str, Any]]
    reader: FileSystemReader
    planner: DefaultLoadPlanner

    def begin(self) -> tuple[list[str], bool]:
        self.state()
        return [], False

    def prepare(self, source: Source) -> StoredNames:
        return StoredNames(source)

    @cached_property
    def _flat(self) -> FlatState:
        """The values by flat name, with memory instead of tensors on meta, and their paths."""
        flat, paths = flat_state(self.state(), self.planner)
        if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in flat.values()):
            plans._init_state_dict(self.state())
            return flat_state(self.state(), self.planner)
        return flat, paths

    @collector_paused()
    def compare(self, source: Source, stored: StoredNames) -> tuple[MatchedState, bytes]:
        flat, paths = self._flat
        names = stored.tensors.keys() | stored.objects
        flat, paths = old_flat_state(self.state(), self.planner, flat, names) or (flat, paths)
        missing = [name for name in flat if name not in names]
        if missing and not self.planner.allow_partial_load:
            raise plans.missing_keys(missing, sorted(names - flat.keys()))
        wanted = {name: value for name, value in flat.items() if name in names and has_part(value)}
        rows = {name: stored.tensors[name] for name in wanted if name in stored.tensors}
        plans.check_forms(wanted, _stored_forms(source, rows))
        found = _Found({}, [], [])
        leaves = _fillable(wanted, rows, found)
        matched = MatchedState(source, leaves, {name: rows[name] for name in leaves.keys}, (found, paths, wanted))
        _warn_of_holes(source, matched)
        found.objects.update(stored.load_objects([name for name in wanted if name in stored.objects]))
        return matched, b""

    def place(self, matched: MatchedState, made: dict[str, Any]) -> None:
        found, paths, wanted = matched.found
        with torch.no_grad():
            for target, filled in found.copies:
                target.copy_(filled)
        state = self.state()
        for name, value in found.objects.items():
            flatten.set_element(state, flatten.as_keyed(state, paths[name]), value)
        if found.by_torch:
            self._read_items({name: wanted[name] for name in found.by_torch})

    def _read_items(self, values: dict[str, Any]) -> None:
        metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(metadata, is_coordinator=False)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(values, metadata)
        self.reader.read_data(planner.create_local_plan(), planner)


class StoredNames:
    """The names of what a checkpoint holds, as torch's flattening gives them."""

    def __init__(self, source: Source) -> None:
        self._opened = opened = source if isinstance(source, TorchSource) else TorchView(source)
        self.tensors = opened.index.tensor_rows if isinstance(opened, TorchSource) else opened.rows
        self.paths: Mapping[str, tuple[str | int, ...]] = opened.paths
        """Of each value, the keys and positions in the nested state, in its order."""
        self.objects = set(opened.objects)

    def load_objects(self, names: list[str]) -> dict[str, Any]:
        """Unpickle objects; classes that are not known to be safe are refused."""
        options, source, made = Options(), self._opened, dict[str, Any]()
        if isinstance(source, TorchView):
            for name in names:
                made[name] = load_object(source.saved_object(name, options), key=name)
            return made
        items = {name: source.files.item(source.objects[name], name) for name in names}
        for some in item_batches(names, lambda name: items[name].nbytes):
            raw = read_items(source.files, [items[name] for name in some], options)
            for name, data in zip(some, raw, strict=True):
                stream, descriptors = io.BytesIO(data), source.objects[name].descriptors
                if descriptors:
                    stream = io.BytesIO(source.undo(-1, descriptors, stream).read(-1))
                plain: Any = _ATOMS
                with suppress(CheckpointError):  # numbers and text need no torch
                    plain = read_object(stream.getvalue(), where=f"{name!r}")
                made[name] = plain if type(plain) in _ATOMS else load_object(stream, key=name)
        return made


def _stored_forms(source: Source, rows: dict[str, int]) -> dict[str, tuple[list[int], torch.dtype]]:
    tensors = source.index.tensors
    shapes, ndims, codes = tensors.shape.tolist(), tensors.ndim.tolist(), tensors.dtype.tolist()
    dtypes = {code: to_torch(by_code(code)) for code in set(codes)}
    return {name: (shapes[row][: ndims[row]], dtypes[codes[row]]) for name, row in rows.items()}


def _fillable(wanted: dict[str, Any], rows: dict[str, int], found: _Found) -> Any:
    """Describe the memory to fill; what is filled in another way is noted."""
    leaves: dict[str, Any] = {}

    def open_value(name: str) -> None:
        """Take a tensor apart into the local memory of its shards."""
        value, pieces = wanted[name], list[tuple[torch.Tensor, Any]]()
        for number, chunk in enumerate(plans._create_chunk_list(value)):
            shard = plans.find_tensor_shard(value, protocol.MetadataIndex(name, chunk.offsets, number)).detach()
            if not shard.numel():
                continue
            target = plain_target(shard, key=name)
            if target is not shard:
                found.copies.append((shard, target))
            if target.is_quantized or not target.data_ptr():
                found.by_torch.append(name)
                return
            pieces.append((target.as_subclass(torch.Tensor), chunk.offsets))
        if pieces:
            leaves[name] = ShardedBox.of(pieces, shape=plans.global_size(value), dtype=pieces[0][0].dtype)

    for name in rows:
        value = wanted[name]
        if is_ordinary(value) or is_dtensor(value):
            leaves[name] = value
        else:
            open_value(name)
    while True:
        try:
            return describe_leaves(leaves, filling=True)
        except (UnsupportedLeaf, InvalidShards) as error:
            refused = str(error.details.get("key"))
            if isinstance(leaves.pop(refused, None), (ShardedBox, type(None))):
                found.by_torch.append(refused)
                continue
            open_value(refused)


def _warn_of_holes(source: Source, matched: MatchedState) -> None:
    index, d = source.index, matched.description
    rows = np.array([matched.tensors[key] for key in d.keys], np.int64)
    whole = dict(zip(d.keys, is_tiled(index, rows).tolist(), strict=True))
    thin: dict[str, None] = {}
    for row, tensor in enumerate(d.row_tensor.tolist()):
        key = d.keys[tensor]
        if not whole[key]:
            ndim, chunks = int(d.ndim[tensor]), index.chunks.take(index.chunk_rows(matched.tensors[key]))
            box, stored = d.boxes.box(row, ndim), [chunks.boxes.box(at, ndim) for at in range(len(chunks))]
            if sum(common.volume for each in stored if (common := intersect(each, box))) < box.volume:
                thin[key] = None
    if thin:
        plans.warn_of_holes(list(thin))
