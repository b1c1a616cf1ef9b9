"""
Saves by the default planner and our own writer: the engine's session, in columns. No plans of items are made.

What has no plain memory, such as an object or a tensor of a class that only torch can write, is an item of its own,
which the rank that writes it pickles. Rank 0 decides which rank writes what, each rank lays out its own files, and rank
0 makes the metadata from what all ranks report.
"""

from __future__ import annotations

import io
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat
from operator import attrgetter, is_
from typing import Any, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shardkeep.dcp._impl import plans
from shardkeep.dcp._impl.dist import _DistWrapper
from shardkeep.dcp._impl.file_writer import (
    Data,
    FileLayout,
    FileSystemWriter,
    place_items,
    plain_or_saved,
    plain_tensor,
)
from shardkeep.dcp._impl.planners import DefaultSavePlanner
from shardkeep.engine.report import Phases
from shardkeep.engine.save_session import (
    CommittedSave,
    DescribedState,
    Labels,
    RankFiles,
    SaveLayout,
    WrittenFiles,
    kept_plans,
)
from shardkeep.engine.stagers import ObjectCopier
from shardkeep.engine.tensors import sample_replicas
from shardkeep.engine.writer import FileJob
from shardkeep.errors import BrokenProtocol, CheckpointError, InvalidShards, UnsupportedLeaf
from shardkeep.format.boxes import Boxes, IntArray, ints, matrix_of, pack, widen
from shardkeep.format.dtypes import by_code
from shardkeep.format.index import Chunks, Index, Tensors, encode_index, strings_of
from shardkeep.format.record import FileEntry
from shardkeep.layouts import torch_values as protocol
from shardkeep.layouts.torch import METADATA_NAME, SUMS_SUFFIX, Columns, Sums, encode_sums, with_sums
from shardkeep.layouts.torch_pickle import (
    Body,
    Contents,
    Kind,
    decode_metadata,
    encode_body,
    encode_plain_metadata,
    read_metadata,
)
from shardkeep.options import decodable
from shardkeep.plan import save_plan
from shardkeep.plan.stamped_plan import StampedPlan, plan_stamped
from shardkeep.state.describe import Description, describe_leaves, find_buffers
from shardkeep.state.flatten import flatten_sharded_tensors, flatten_state_dict
from shardkeep.state.leaves import ShardedBox, has_part, is_dtensor, is_ordinary
from shardkeep.state.names import ModuleTree
from shardkeep.storage import file_systems
from shardkeep.storage.base import Store

log = logging.getLogger("shardkeep")

_WRITER = (
    *("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish"),
    *("storage_meta", "_settle_plans", "_write_data", "_metadata_exists", "_get_metadata_path", "_commit"),
)
_REQUIRES_GRAD, _PINNED = 1, 2
_MOST_KEPT_NBYTES = 128 << 20
"""Of the pickle of a plan's last save."""
_ATTRIBUTES = attrgetter("__dict__")
_ORDINARY: set[type] = {torch.Tensor, torch.nn.Parameter}
_ATOMS: set[type] = {int, float, bool, str, bytes, type(None)}


def saves_by_default(writer: object, planner: object) -> TypeGuard[FileSystemWriter]:
    """Return whether nothing of the user's takes part in a save: our planner, and our writer with a store below it."""
    return (
        (planner is None or file_systems.keeps_all(planner, DefaultSavePlanner))
        and isinstance(writer, FileSystemWriter)
        and file_systems.keeps(writer, FileSystemWriter, _WRITER)
        and writer.writes_archives_unchanged
        and file_systems.has_store(writer.fs)
    )


class _SentItem(msgspec.Struct, frozen=True, array_like=True):
    """An item of its own, as it is sent to rank 0; an object has no offset."""

    key: str
    offset: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    flags: int = 0


_Item = tuple[_SentItem, Any]
"""An item of its own, and what is pickled for it."""


@decodable
class _SentState(msgspec.Struct, frozen=True):
    """What a rank's state has besides plain tensors; equal on ranks with the same state."""

    items: list[_SentItem]
    names: list[str]
    """Of all values, in the order of the state."""
    paths: list[tuple[str | int, ...]] | None
    """Of these values; None if the state is not flattened."""


@dataclass(frozen=True)
class _Pieces(Boxes):
    """What ranks write of tensors, by rank, then by row."""

    tensor: IntArray


@dataclass(frozen=True)
class _Planned:
    keys: list[str]
    tensors: Tensors
    pieces: _Pieces
    tensor_nbytes: int
    flags: list[int]
    """Of each key's tensor."""
    items: list[list[_SentItem]]
    """The items of their own that each rank writes."""
    states: list[_SentState]
    to_lowest: bool
    sampled: save_plan.SampledReplicas | None
    encoded: dict[bytes, tuple[Body, Columns | None]] = field(default_factory=dict)
    """The metadata of the last save, but for its files, by a digest of where its items are in them."""

    @property
    def nbytes(self) -> int:
        encoded = sum(len(body.raw) for body, _ in list(self.encoded.values()))
        return encoded + sum(column.nbytes for column in self.pieces.columns())


@dataclass
class DefaultSave(SaveLayout):
    """A save of one rank. Nothing is claimed, because files of dead saves are found by their age."""

    _writer: FileSystemWriter
    """Set to its place."""
    _planner: DefaultSavePlanner
    _ranks: _DistWrapper
    _modules: Sequence[torch.nn.Module]
    """Those whose state is in the state."""
    _copies: bool
    """Whether the state may change as soon as it is described."""
    _written: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self._writer.open_store()

    @property
    def save_id(self) -> str:
        return self._writer.save_id

    # -- every rank ----------------------------------------------------------------------------------------------------

    def describer(
        self, ranks: object, phases: Phases, state: Callable[[], Mapping[str, Any]]
    ) -> Callable[[], DescribedState]:
        def describe() -> DescribedState:
            with phases.phase("describe"):
                plain = state()
                prepared: Future[None] = Future()
                try:
                    self._prepare_place()
                    prepared.set_result(None)
                except Exception as error:
                    if not self._copies:
                        raise
                    # Raised in the next step: the future of the save fails, and not the call.
                    prepared.set_exception(error)
                described = self._describe(plain)
                return replace(described, samples=lambda: prepared.result() or described.samples())

        return describe

    def _prepare_place(self) -> None:
        self._writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank, use_collectives=True)
        self._writer.prepare_local_plan(protocol.SavePlan([]))

    def _describe(self, state: Mapping[str, Any]) -> DescribedState:
        flat, kinds, flattens = dict(state), {*map(type, state.values())}, self._planner.flatten_state_dict
        paths: list[tuple[str | int, ...]] | None = None
        if flattens and not (kinds <= _ORDINARY | _ATOMS and {*map(type, state)} <= {str}):
            flat, mappings = flatten_state_dict(state)
            paths, kinds = list(mappings.values()), {*map(type, flat.values())}
        names, plain = list(flat), kinds <= _ORDINARY | _ATOMS
        if not plain and self._planner.flatten_sharded_tensors:
            flat = flatten_sharded_tensors(flat)
        description, flags, items = _describe_values(flat)
        if self._copies:
            copier = ObjectCopier()
            items = [(item, copier.copy(value, (item.key,))) for item, value in items]
            copier.state_copy.wait()
        samples: Callable[[], bytes] = bytes
        if self._ranks.get_world_size() > 1:
            buffers = find_buffers(description, map(ModuleTree, self._modules))
            flags |= buffers * np.uint8(save_plan.BUFFER)
            samples = sample_replicas(description, ~buffers)
        own = [item for item, _ in items]
        said = names, paths, flattens, own, flags.tobytes()
        # Kept with the columns, of which the manifest has nothing but these besides.
        known, manifest = description.derived.get("torch's manifest", (None, None))
        if known != said:
            sent = _SentState(own, names, [*zip(names)] if flattens and paths is None else paths)
            count, tree = len(description.keys), save_plan.encode(sent)
            columns: dict[str, Any] = {"groups": ["state"] * count, "alias": np.arange(count), "flags": flags}
            manifest = save_plan.manifest_of(description, **columns, tree=tree, values=b"")
            description.derived["torch's manifest"] = said, manifest
        return DescribedState(description, manifest, samples, items=items)

    def files(self, described: DescribedState, answer: bytes, save_id: str) -> RankFiles:
        """Lay out the files that this rank writes; items of their own come after all rows in the plan's numbers."""
        rows, derived = ints(answer), described.description.derived
        data: list[Data] = [*described.description.pieces]
        first = len(data)
        items = [described.items[row - first] for row in rows[rows >= first].tolist()]
        data += [_pickled(*item) for item in items]
        writer = self._writer
        key: Any = answer, writer.thread_count, writer.single_file_per_rank, writer._splits_files
        key += ([(item, type(each), each.nbytes) for (item, _), each in zip(items, data[first:], strict=True)],)
        kept = derived.get("items", (None,))
        if kept[0] != key:
            chosen = [*rows[rows < first].tolist(), *range(first, len(data))]
            sizes = [None if at >= first else data[at].nbytes for at in chosen]
            where, files = np.empty((4, len(rows)), np.int64), list[tuple[list[int], FileLayout]]()
            for number, bucket in enumerate(filter(None, writer.divide(sizes))):
                if None in sizes:
                    bucket.sort(key=lambda at: sizes[at] is not None)  # objects first
                in_file = [chosen[at] for at in bucket]
                layout, where[1:, bucket] = place_items([data[at] for at in in_file])
                files.append((in_file, layout))
                where[0, bucket] = number
            own_nbytes = sum(each.nbytes for each in data[first:])
            derived["items"] = kept = key, files, where, own_nbytes + sum(filter(None, sizes))
        _, files, where, nbytes = kept
        self._written = names = writer.new_names(f"__{self._ranks.rank}_", len(files))
        laid_out = zip(names, files, strict=True)
        jobs = [layout.job(name, list(map(data.__getitem__, rows)), nbytes) for name, (rows, layout) in laid_out]
        return RankFiles(jobs, lambda: self._complete(jobs, where))

    def _complete(self, jobs: list[FileJob], where: IntArray) -> WrittenFiles:
        store, entries, by_name = self.store, list[FileEntry](), {job.name: job for job in jobs}
        try:
            for job in map(by_name.__getitem__, self._written):  # `where` counts files so, whatever was written first
                sums, encoded = encode_sums(job.data_nbytes, job.block_nbytes, bytes(job.digests))
                store.put(f"{job.name}{SUMS_SUFFIX}", encoded, replace=True)
                entries.append(FileEntry(name=job.name, header_nbytes=0, **sums._asdict()))
        except BaseException:
            self.discard([job.name for job in jobs])
            raise
        return WrittenFiles(entries, pack_places(where))

    def discard(self, names: Sequence[str]) -> None:
        self._writer._commit().remove(with_sums(names))

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def plan(self, manifests: list[save_plan.RankManifest]) -> tuple[_Planned, list[bytes]]:
        decoded = {raw: msgspec.msgpack.decode(raw, type=_SentState) for raw in {each.tree for each in manifests}}
        states = [decoded[each.tree] for each in manifests]
        to_lowest = self._planner.dedup_save_to_lowest_rank
        plan: StampedPlan | save_plan.CheckpointPlan | None
        plan = plan_stamped(manifests, lambda keys, _: [None] * len(keys), whole=True, to_lowest=to_lowest)
        try:
            plan = plan or save_plan.plan_whole_shards(
                manifests, to_lowest=to_lowest, warn=lambda error: log.warning("%s; the first is saved", error.message)
            )
        except InvalidShards as error:
            raise InvalidShards(f"Failed to validate global plan: {error.message}", hint=error.hint) from error
        if isinstance(plan, StampedPlan):
            by_rank, (tensor, *boxes) = plan.by_rank()
            pieces, nbytes = _Pieces(boxes[0], boxes[1], tensor), sum(file.data_nbytes for file in plan.files)
        else:
            each = plan.pieces
            by_rank = np.split(each.row, np.searchsorted(each.rank, np.arange(1, len(manifests))))
            pieces, nbytes = _Pieces(each.offsets, each.sizes, each.tensor), int(each.nbytes.sum())
        keys, tensors = plan.keys, plan.tensors
        flags = dict.fromkeys(keys, 0)
        for raw in dict.fromkeys(each.names for each in reversed(manifests)):
            names = msgspec.msgpack.decode(raw, type=save_plan.TensorNames)
            flags.update(zip(names.keys, names.flags, strict=True))
        # Of items that several ranks have, the first one's is written.
        items: list[list[_SentItem]] = []
        answers: list[bytes] = []
        seen: set[tuple[str, tuple[int, ...] | None]] = set()
        for rank, rows in enumerate(by_rank):
            own = [at for at, item in enumerate(states[rank].items) if (item.key, item.offset) not in seen]
            items.append([states[rank].items[at] for at in own])
            seen.update((item.key, item.offset) for item in items[-1])
            first = len(ints(manifests[rank].row_tensor))  # items come after the rows of tensors
            answers.append(pack(np.append(rows, first + np.array(own, np.int64))))
        _check_items(keys, items)
        flags_of = [flags[key] for key in keys]
        return _Planned(keys, tensors, pieces, nbytes, flags_of, items, states, to_lowest, plan.sampled), answers

    def plan_again(self, kept: _Planned, values: list[bytes]) -> _Planned | None:
        return kept if kept.to_lowest == self._planner.dedup_save_to_lowest_rank else None

    def commit(self, planned: _Planned, written: list[WrittenFiles], labels: Labels) -> CommittedSave:
        entries = [entry for each in written for entry in each.files]
        sums = {entry.name: Sums(entry.nbytes, entry.block_nbytes, entry.checksum) for entry in entries}
        try:
            data = _encode_metadata(planned, written, self._writer.storage_meta(), sums)
        except BaseException:
            self.discard(list(sums))
            raise
        own, began_s = self._written, self._writer._began_s
        self._writer._commit().publish(METADATA_NAME, data, sums=sums, own=own, keep=with_sums(sums), began_s=began_s)
        return CommittedSave(
            save_id=self._writer.save_id,
            bytes_total=planned.tensor_nbytes,
            tensors=len(planned.keys),
            metadata=data,
        )

    def metadata(self, committed: CommittedSave) -> protocol.Metadata:
        """Return the metadata of the checkpoint, which are decoded, or read, when they are used."""
        store, where, save_id = self.store, str(self._writer._get_metadata_path()), committed.save_id

        def load() -> protocol.Metadata:
            if committed.metadata:
                return decode_metadata(committed.metadata, where=where)
            found = read_metadata(store, METADATA_NAME, where=where)
            if getattr(found.storage_meta, "save_id", None) != save_id:
                raise CheckpointError(
                    f"{where}: another save has replaced the checkpoint", hint="read the metadata earlier"
                )
            return found

        return LazyMetadata(load)


def _check_items(keys: Sequence[str], items: list[list[_SentItem]]) -> None:
    """Check that items of their own have names of their own, and that tensors among them are complete."""
    whole: dict[str, int | None] = {}
    held, known = Counter[str](), set(keys)
    for item in (each for of_rank in items for each in of_rank):
        is_tensor = item.key in known or whole.get(item.key) is not None
        if (item.key in known or item.key in whole) and is_tensor == (item.offset is None):
            raise BrokenProtocol(
                f"{item.key!r} is planned to be written twice", hint="dedupe the plans first", key=item.key
            )
        if item.key not in known:  # else it is an empty part of a tensor
            whole.setdefault(item.key, None if item.offset is None else math.prod(item.shape))
            held[item.key] += math.prod(item.sizes)
    for key, elements in whole.items():
        if len(items) > 1 and elements not in (None, held[key]):
            raise InvalidShards(
                f"Failed to validate global plan: key:{key} invalid fill: its chunks hold {held[key]} elements of {elements}",
                key=key,
            )


class LazyMetadata(protocol.Metadata):
    """Metadata that are loaded when any of their fields is used; from then on an ordinary `Metadata`."""

    def __init__(self, load: Callable[[], protocol.Metadata]) -> None:
        object.__setattr__(self, "_load", load)

    def __getattribute__(self, name: str) -> Any:
        if name != "_load":
            loaded = vars(object.__getattribute__(self, "_load")())
            own = object.__getattribute__(self, "__dict__")
            object.__setattr__(self, "__class__", protocol.Metadata)
            own.clear()
            own.update(loaded)
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, version: Any) -> Any:
        return self.__reduce_ex__(version) if self.state_dict_metadata is not None else ""


def _describe_values(flat: dict[str, Any]) -> tuple[Description, npt.NDArray[np.uint8], list[_Item]]:
    """Describe what has plain memory as columns, with the flags of each tensor; return the rest as items of their own."""
    items, flags = list[_Item](), dict[str, int]()

    def open_value(key: str) -> None:
        """Take a value apart as torch does: into pieces of plain memory, or into items of their own."""
        planned = plans._create_write_items(key, flat[key])
        own = [(_sent(item), plans.find_state_dict_object(flat, item.index)) for item in planned]
        filled = [each for each in own if 0 not in each[0].sizes]
        if filled and (box := _as_box(filled)) is not None:
            tensors[key], flags[key] = box, filled[0][0].flags
            own = [each for each in own if each not in filled]
        items.extend(own)

    plain = {*map(type, flat.values())} <= _ORDINARY
    tensors = dict(flat) if plain else {key: value for key, value in flat.items() if type(value) in _ORDINARY}
    # Nearly no tensor has attributes, among which would be those of a shard.
    if any(map(_ATTRIBUTES, tensors.values())) and not all(map(is_ordinary, tensors.values())):
        tensors = {}
    for key, value in flat.items() if len(tensors) < len(flat) else ():
        if key in tensors:
            continue
        local = value if is_ordinary(value) else value._local_tensor if is_dtensor(value) else None
        if local is not value and not has_part(value):
            continue
        if local is not None and local.numel():
            tensors[key] = value
        elif type(value) in _ATOMS:
            items.append((_SentItem(key), value))
        else:
            open_value(key)
    kept, empty = kept_plans().descriptions, set[str]()
    if kept.without_elements:  # those of earlier saves are known, or else the state would be described twice each time
        named = {key: value for key, value in tensors.items() if key in kept.without_elements}
        empty = {key for key, value in named.items() if isinstance(value, torch.Tensor) and not value.numel()}
    while True:
        for key in empty & tensors.keys():
            del tensors[key]
        try:
            description = describe_leaves(tensors, kept=kept)
        except (UnsupportedLeaf, InvalidShards) as error:
            refused = str(error.details.get("key"))
            if type(tensors.get(refused)) in (ShardedBox, type(None)):
                raise
            del tensors[refused]
            open_value(refused)
            continue
        found = {description.keys[at] for at in np.flatnonzero(~description.shape.all(axis=1))}
        if not found:
            break
        kept.without_elements |= found
        empty |= found
    for key in flat if empty else ():
        if key in empty:
            open_value(key)
    return description, _flags_of(description, list(tensors.values()), flags), items


def _flags_of(d: Description, leaves: Sequence[Any], known: Mapping[str, int]) -> npt.NDArray[np.uint8]:
    """Return the flags of described values; those of values that were taken apart are known."""
    flags, rows = np.zeros(len(leaves), np.uint8), len(d.pieces)
    # A tensor that requires a gradient is never a piece itself, because pieces are detached.
    same = (
        np.fromiter(map(is_, leaves, d.pieces), np.bool_, rows)
        if rows == len(leaves)
        else np.zeros(len(leaves), np.bool_)
    )
    asked = [at for at in np.flatnonzero(~same).tolist() if d.keys[at] not in known]
    flags[[at for at in asked if leaves[at].requires_grad]] = _REQUIRES_GRAD
    if torch.accelerator.current_accelerator() is not None:  # other builds of torch pin no memory
        pinned = np.fromiter((piece.is_cpu and piece.is_pinned() for piece in d.pieces), np.bool_, rows)
        flags[d.row_tensor[pinned]] |= _PINNED
    for at, key in enumerate(d.keys) if known else ():
        flags[at] = known.get(key, flags[at])
    return flags


def _flags(requires_grad: bool, pinned: bool) -> int:
    return requires_grad * _REQUIRES_GRAD + pinned * _PINNED


def _as_box(items: Sequence[_Item]) -> ShardedBox | None:
    """Return the pieces that a value consists of; None if it is not made of plain memory."""
    pieces: list[tuple[torch.Tensor, Sequence[int]]] = []
    for item, value in items:
        plain = None if item.offset is None else plain_tensor(item.key, value)
        if item.offset is None or plain is None:
            return None
        pieces.append((plain, item.offset))
    return ShardedBox.of(pieces, shape=items[0][0].shape, dtype=pieces[0][0].dtype)


def _sent(item: protocol.WriteItem) -> _SentItem:
    data = item.tensor_data
    if data is None:
        return _SentItem(item.index.fqn)
    return _SentItem(
        item.index.fqn,
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
        tuple(data.size),
        str(data.properties.dtype).removeprefix("torch."),
        _flags(data.properties.requires_grad, data.properties.pin_memory),
    )


def _pickled(item: _SentItem, value: Any) -> Data:
    """Return the bytes of an item of its own; of a plain tensor, the tensor."""
    if item.offset is not None:
        return plain_or_saved(item.key, value)
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getbuffer()


def _encode_metadata(
    planned: _Planned, written: list[WrittenFiles], storage_meta: protocol.StorageMeta | None, sums: Mapping[str, Sums]
) -> bytes:
    files = [entry.name for each in written for entry in each.files]
    key = xxhash.xxh3_128_digest(save_plan.encode([(len(each.files), each.items) for each in written]))
    made = planned.encoded.get(key)  # other threads may save by this plan too
    if made is None:
        places, own, places_of_own = _places(planned, written)
        contents = _contents(planned, own)
        body = encode_body(contents, np.concatenate([places, places_of_own], axis=1), len(files))
        made = body, _columns(planned, places, own, places_of_own, contents)
        planned.encoded.clear()
        if len(body.raw) < _MOST_KEPT_NBYTES:
            planned.encoded[key] = made
    body, columns = made
    if columns is not None:
        save_id = str(getattr(storage_meta, "save_id", None) or "")
        columns = msgspec.structs.replace(columns, files=files, sums=dict(sums), save_id=save_id)
    return encode_plain_metadata(
        body,
        files,
        columns,
        storage_meta=storage_meta,
        version=protocol.CURRENT_DCP_VERSION,
        shardkeep_sums={name: tuple(each) for name, each in sorted(sums.items())},
    )


def pack_places(where: IntArray) -> bytes:
    """Encode four rows for `_places`: as differences, which repeat in layers that are alike."""
    return zlib.compress(pack(np.diff(where, axis=1, prepend=0)), 1)


def _places(planned: _Planned, written: list[WrittenFiles]) -> tuple[IntArray, list[_SentItem], IntArray]:
    """Return the places of all pieces, in four rows, and all items of their own with theirs."""
    places, own_places, first = list[IntArray](), list[IntArray](), 0
    for items, each in zip(planned.items, written, strict=True):
        where = np.cumsum(ints(zlib.decompress(each.items)).reshape(4, -1), axis=1)
        where[0] += first
        first += len(each.files)
        pieces = where.shape[1] - len(items)
        places.append(where[:, :pieces])
        own_places.append(where[:, pieces:])
    return np.concatenate(places, axis=1), [*chain(*planned.items)], np.concatenate(own_places, axis=1)


def _contents(planned: _Planned, own: Sequence[_SentItem]) -> Contents:
    """Return what is stored: pieces, then the items of their own."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for state in {id(each): each for each in planned.states}.values():
        named = dict(zip(state.names, state.paths or repeat(()), strict=False))
        paths |= {name: path for name, path in named.items() if name not in paths} if paths else named
    stored = dict.fromkeys([*planned.keys, *(item.key for item in own)])
    kinds: dict[str, Kind | None] = dict.fromkeys(filter(stored.__contains__, chain(paths, stored)))
    row_of, tensors, pieces = dict(zip(kinds, count(), strict=False)), planned.tensors, planned.pieces
    axes = max([pieces.axes, *(len(item.shape) for item in own)])
    ndim, shape = np.zeros(len(kinds), np.int64), np.ones((len(kinds), axes), np.int64)
    for item in own:
        if item.offset is not None:
            row, kinds[item.key] = row_of[item.key], _kind(item.dtype, item.flags)
            ndim[row], shape[row, : len(item.shape)] = len(item.shape), item.shape
    rows = np.array([*map(row_of.__getitem__, planned.keys)], np.int64)
    ndim[rows], shape[rows] = tensors.ndim, widen(tensors.shape, axes, 1)
    said = list(zip(tensors.dtype.tolist(), planned.flags, strict=True))
    kind_of = {(code, flags): _kind(by_code(code).name, flags) for code, flags in {*said}}
    kinds |= zip(planned.keys, map(kind_of.__getitem__, said), strict=True)
    begins = widen(pieces.offsets, axes, 0), matrix_of([item.offset or () for item in own], axes, 0)
    extents = widen(pieces.sizes, axes, 1), matrix_of([item.sizes for item in own], axes, 1)
    return Contents(
        kinds=kinds,
        ndim=ndim,
        shape=shape,
        paths=None if planned.states[0].paths is None else paths,
        value=np.append(rows[pieces.tensor], np.array([row_of[item.key] for item in own], np.int64)),
        boxes=Boxes(np.concatenate(begins), np.concatenate(extents)),
    )


def _columns(
    planned: _Planned, places: IntArray, own: Sequence[_SentItem], places_of_own: IntArray, contents: Contents
) -> Columns | None:
    """Return what is said of the checkpoint in columns, but for its files; None if only torch can read some tensor."""
    file, offset, nbytes, start = places
    # An empty part of a tensor need not be read.
    odd = (item for item in own if item.offset is not None)
    if np.any(start < 0) or any(math.prod(item.sizes) or not math.prod(item.shape) for item in odd):
        return None
    objects = {item.key: place for item, place in zip(own, places_of_own[:3].T, strict=True) if item.offset is None}
    pieces, tensors = planned.pieces, planned.tensors
    order, rows = np.argsort(pieces.tensor, kind="stable"), np.arange(len(planned.keys))
    values = sorted(objects, key=str.encode)
    index = Index(
        keys=strings_of(map(str.encode, planned.keys)),
        tensors=replace(tensors, origin=np.zeros(len(rows), np.uint8), alias=rows),
        chunk_ends=np.searchsorted(pieces.tensor[order], rows, "right"),
        chunks=Chunks(pieces.offsets[order], pieces.sizes[order], file[order], start[order]),
        value_keys=strings_of(map(str.encode, values)),
        value_data=strings_of([b""] * len(values)),
        make_tree=bytes,
    )
    of_objects = pack(np.array([objects[key] for key in values], np.int64).reshape(-1, 3).T)
    paths = {name: (contents.paths or {}).get(name) or (name,) for name in contents.kinds}
    return Columns(encode_index(index), pack(np.stack([offset, nbytes])[:, order]), of_objects, [], paths, {}, "")


def _kind(dtype: str, flags: int) -> Kind:
    return dtype, bool(flags & _REQUIRES_GRAD), bool(flags & _PINNED)
