"""
The default plans: the items of a flat state, what each rank writes and reads, and which rank writes a replicated value.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from shardkeep.display import some_of
from shardkeep.dist.world import is_initialised
from shardkeep.errors import BadState, BadValue, BrokenProtocol, InvalidShards, MalformedFile, NotSavable, StateMismatch
from shardkeep.format.boxes import Box, boxes_overlap, clashes, overlap_region, overlaps, slices, within
from shardkeep.layouts import torch_values as protocol
from shardkeep.state.flatten import is_container, items_of
from shardkeep.state.leaves import has_part, is_dtensor, is_ordinary, is_sharded_tensor, memory_for
from shardkeep.state.patterns import suggestions

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.tensor import DTensor


_MOST_GAPS = 1 << 20
"""How many items of lists may have left no trace in a checkpoint, as empty dicts do."""


def saved_path(metadata: protocol.Metadata, key: str) -> tuple[str | int, ...]:
    """Return the keys and positions of a value in the state that was saved, as default planners store them."""
    paths = metadata.planner_data
    path = paths.get(key, (key,)) if isinstance(paths, dict) else (key,)
    return checked_path(key, path, len(metadata.state_dict_metadata))


def checked_path(key: str, path: Any, count: int) -> tuple[str | int, ...]:
    """Return the path of one of `count` values; `MalformedFile` if no state has it."""
    if not isinstance(path, tuple) or not all(
        isinstance(part, str) or (type(part) is int and 0 <= part < count + _MOST_GAPS) for part in path
    ):
        raise MalformedFile(f"{key!r} cannot be at {path!r}", key=key)
    return path


def find_state_dict_object(state_dict: protocol.STATE_DICT_TYPE, index: protocol.MetadataIndex) -> Any:
    """Return what an index names in a flat state dict: the local memory of a tensor's shard, or an object."""
    if index.fqn not in state_dict:
        raise BadValue(f"Could not find FQN: '{index.fqn}' in the state", key=index.fqn)
    value = state_dict[index.fqn]
    if isinstance(value, torch.Tensor):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _not_sharded(index, type(value).__qualname__)
    return value


def find_tensor_shard(tensor: torch.Tensor, index: protocol.MetadataIndex) -> torch.Tensor:
    """Return the local memory of the shard of a tensor that an index names; of a plain tensor, itself."""
    if hasattr(tensor, "__get_tensor_shard__"):
        shard: torch.Tensor = tensor.__get_tensor_shard__(index)
        return shard
    if is_sharded_tensor(tensor):
        return _find_shard(tensor, index).tensor  # type: ignore[arg-type]  # no type guard without the import
    if protocol._is_checkpointable_tensor(tensor):
        return _get_checkpointable_tensor_shard(tensor, index)
    if index.offset is not None and any(index.offset):
        raise _not_sharded(index, "whole tensor")
    return tensor


def _find_shard(tensor: ShardedTensor, index: protocol.MetadataIndex) -> Shard:
    if index.offset is None:
        raise BadValue(
            f"{index.fqn!r} is a ShardedTensor and no offset was provided to find one of its shards", key=index.fqn
        )
    for shard in tensor.local_shards():
        if torch.Size(shard.metadata.shard_offsets) == index.offset:
            return shard
    raise BadValue(f"Could not find shard at '{index.offset}' for FQN: {index.fqn!r}, a ShardedTensor", key=index.fqn)


def _not_sharded(index: protocol.MetadataIndex, what: str) -> BadValue:
    where = f"FQN: {index.fqn!r} is not a ShardedTensor, can't find by offset: '{index.offset}'"
    return BadValue(f"{where}: it is a {what}", key=index.fqn)


# The shards that a `CheckpointableTensor` holds are checked whenever they are asked for.


def _get_checkpointable_tensor_chunks(tensor: protocol.CheckpointableTensor) -> list[protocol.ChunkStorageMetadata]:
    _validate_checkpointable_tensor_metadata(tensor)
    boxes = zip(tensor.global_offsets, tensor.local_sizes, strict=True)
    return [protocol.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def _get_checkpointable_tensor_shard(
    tensor: protocol.CheckpointableTensor, index: protocol.MetadataIndex
) -> torch.Tensor:
    offsets = [chunk.offsets for chunk in _get_checkpointable_tensor_chunks(tensor)]
    if index.offset is None and len(offsets) != 1:
        raise BadValue(f"{index.fqn!r} holds {len(offsets)} shards, and there is no offset in the index", key=index.fqn)
    if index.offset is not None and index.offset not in offsets:
        raise BadValue(f"{index.fqn!r} has no shard at {tuple(index.offset)} on this rank", key=index.fqn)
    at = 0 if index.offset is None else offsets.index(index.offset)
    shard: torch.Tensor = tensor[slices(Box(tensor.local_offsets[at], tensor.local_sizes[at]))]  # type: ignore[index]
    return shard


def _validate_checkpointable_tensor_metadata(tensor: protocol.CheckpointableTensor) -> None:
    shape: Sequence[int] = tensor.shape  # type: ignore[attr-defined]  # it is a tensor, as the caller has checked
    names = ("global_offsets", "local_offsets", "local_sizes")
    counts = {name: len(getattr(tensor, name)) for name in names}
    if len(set(counts.values())) > 1:
        raise InvalidShards(f"a tensor of {tuple(shape)} must describe each of its shards three times, not {counts}")
    for n, (offsets, starts, sizes) in enumerate(
        zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True)
    ):
        for name, begin, whole in (("global_offsets", offsets, tensor.global_shape), ("local_offsets", starts, shape)):
            if not within(whole, protocol.ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))):
                raise InvalidShards(
                    f"shard {n} of a tensor, at {tuple(begin)} of {name} with local_sizes {tuple(sizes)}, is not inside"
                    f" {tuple(whole)}"
                )


Change = Callable[[Any], Any]


def _init_state_dict(state_dict: dict[str, Any]) -> Any:
    """Replace, in place, each tensor on meta by an empty one on the current device; leave everything else as it is."""
    _iterate_state_dict(state_dict, _real_dtensor, _real_sharded_tensor, _real_tensor)


def _iterate_state_dict(
    iter_object: Any, dtensor_func: Change, sharded_tensor_func: Change, tensor_func: Change
) -> Any:
    """Replace each tensor, in place where the container can be changed; all else stays the same object."""
    functions = (dtensor_func, sharded_tensor_func, tensor_func)
    if isinstance(iter_object, torch.Tensor):
        return functions[0 if is_dtensor(iter_object) else 1 if is_sharded_tensor(iter_object) else 2](iter_object)
    places = list(items_of(iter_object)) if is_container(iter_object) else []
    changed = {key: new for key, value in places if (new := _iterate_state_dict(value, *functions)) is not value}
    if changed and isinstance(iter_object, tuple):
        return getattr(iter_object, "_make", tuple)(changed.get(key, value) for key, value in places)
    for key, new in changed.items():
        iter_object[key] = new
    return iter_object


def device_of_group(group: Any = None) -> torch.device:
    """Return the default device of a process group: its only one, or the CPU if that is among them."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    kinds = c10d._device_capability(group)
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def current_device(kind: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == kind:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(kind)


def _real_dtensor(value: Any) -> Any:
    if not value.is_meta:
        return value
    return torch.empty_like(value, device=current_device(value.device_mesh.device_type))


def _real_sharded_tensor(value: Any) -> Any:
    if value.device == torch.device("meta"):
        raise BrokenProtocol(
            "a ShardedTensor on the meta device cannot be loaded into", hint="give it memory first, or use a DTensor"
        )
    return value


def _real_tensor(value: torch.Tensor) -> torch.Tensor:
    if not value.is_meta:
        return value
    real = memory_for(value, _default_device())
    if protocol._is_checkpointable_tensor(value):
        protocol._copy_checkpointable_tensor_metadata(value, real)
    return real


def _default_device() -> torch.device:
    if is_initialised():
        return current_device(device_of_group().type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else current_device(accelerator.type)


# Values with `__create_write_items__` and `__create_chunk_list__` (DTensors, LocalShardsWrapper) describe themselves in
# torch's classes, which are translated to ours.


def _create_write_items(fqn: str, object: Any) -> list[protocol.WriteItem]:  # noqa: A002 - torch's name
    if hasattr(object, "__create_write_items__"):
        items: list[protocol.WriteItem] = protocol.to_ours(list(object.__create_write_items__(fqn, object)))
        return items
    if is_sharded_tensor(object):
        return [_create_write_item_for_shard(fqn, object, shard.metadata) for shard in object.local_shards()]
    if protocol._is_checkpointable_tensor(object):
        return _get_checkpointable_tensor_write_items(fqn, object)
    if isinstance(object, torch.Tensor):
        if object.layout != torch.strided:
            raise NotSavable(
                f"{fqn!r} is a tensor of layout {object.layout}, which could not be loaded again",
                hint="save its indices and values",
                key=fqn,
            )
        return [_create_write_item_for_tensor(fqn, object)]
    if _holds_shards(object):
        raise NotSavable(
            f"{fqn!r} is a {type(object).__qualname__} that holds tensors spread over ranks: it would be saved as one"
            " object, with the part of one rank",
            hint="put them in a dict or a list, and leave flatten_state_dict as it is",
            key=fqn,
        )
    return [_create_write_item_for_bytesio(fqn, object)]


def _holds_shards(value: Any) -> bool:
    """Return whether a value is, or containers in it hold, a tensor of which other ranks have parts."""
    if is_container(value) or isinstance(value, (set, frozenset)):
        return any(_holds_shards(each) for _, each in items_of(value))
    if is_dtensor(value):
        return bool(value.device_mesh.size() > 1) and not all(each.is_replicate() for each in value.placements)
    return is_sharded_tensor(value) and len(value.metadata().shards_metadata) > len(value.local_shards())


def _tensor_item(
    fqn: str, data: protocol.TensorWriteData, kind: protocol.WriteItemType, number: int | None = None
) -> protocol.WriteItem:
    return protocol.WriteItem(protocol.MetadataIndex(fqn, data.chunk.offsets, number), kind, tensor_data=data)


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> protocol.WriteItem:
    properties = protocol.TensorProperties.create_from_tensor(tensor)
    data = protocol.TensorWriteData(_create_chunk_from_tensor(tensor), properties, tensor.size())
    return _tensor_item(fqn, data, protocol.WriteItemType.TENSOR)


def _create_write_item_for_shard(
    fqn: str, sharded_tensor: ShardedTensor, shard_md: ShardMetadata
) -> protocol.WriteItem:
    return _tensor_item(fqn, _sharded_tensor_metadata(sharded_tensor, shard_md), protocol.WriteItemType.SHARD)


def _get_checkpointable_tensor_write_items(fqn: str, tensor: protocol.CheckpointableTensor) -> list[protocol.WriteItem]:
    properties = protocol.TensorProperties.create_from_tensor(cast("torch.Tensor", tensor))
    chunks = _get_checkpointable_tensor_chunks(tensor)
    parts = [protocol.TensorWriteData(chunk, properties, torch.Size(tensor.global_shape)) for chunk in chunks]
    return [_tensor_item(fqn, data, protocol.WriteItemType.SHARD, number) for number, data in enumerate(parts)]


def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> protocol.WriteItem:
    properties = protocol.TensorProperties.create_from_tensor(tensor.to_local())
    data = protocol.TensorWriteData(_create_chunk_from_dtensor(tensor), properties, tensor.size())
    return _tensor_item(fqn, data, protocol.WriteItemType.SHARD)


def _create_write_item_for_bytesio(fqn: str, bytes: Any) -> protocol.WriteItem:  # noqa: A002, ARG001 - torch's names
    return protocol.WriteItem(protocol.MetadataIndex(fqn), protocol.WriteItemType.BYTE_IO)


def _create_default_metadata_only_plan(state_dict: protocol.STATE_DICT_TYPE) -> protocol.SavePlan:
    """Return a plan that describes all shards that this rank knows of. It is for metadata only, and cannot be written."""
    items: list[protocol.WriteItem] = []
    for fqn, value in state_dict.items():
        if is_dtensor(value):
            items.append(_create_write_items_for_dtensor(fqn, value))
        elif is_sharded_tensor(value):
            shards = value.metadata().shards_metadata
            items += [_create_write_item_for_shard(fqn, value, shard) for shard in shards]
        else:
            items += _create_write_items(fqn, value)
    return protocol.SavePlan(items)


def _create_chunk_list(tensor: torch.Tensor) -> list[protocol.ChunkStorageMetadata]:
    if hasattr(tensor, "__create_chunk_list__"):
        chunks: list[protocol.ChunkStorageMetadata] = protocol.to_ours(list(tensor.__create_chunk_list__()))
        return chunks
    if is_sharded_tensor(tensor):
        return [_chunk_for_shard(shard.metadata) for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    if protocol._is_checkpointable_tensor(tensor):
        return _get_checkpointable_tensor_chunks(tensor)
    if isinstance(tensor, torch.Tensor):
        return [_create_chunk_from_tensor(tensor)]
    raise StateMismatch(f"expected a tensor, found a {type(tensor).__qualname__}")


def _create_chunk_from_tensor(tensor: torch.Tensor) -> protocol.ChunkStorageMetadata:
    return protocol.ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())


def _create_chunk_from_dtensor(tensor: DTensor) -> protocol.ChunkStorageMetadata:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - loaded already

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return protocol.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _chunk_for_shard(shard_md: ShardMetadata) -> protocol.ChunkStorageMetadata:
    return protocol.ChunkStorageMetadata(torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes))


def _sharded_tensor_metadata(sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> protocol.TensorWriteData:
    whole = sharded_tensor.metadata()
    properties = protocol.TensorProperties(**vars(whole.tensor_properties))
    return protocol.TensorWriteData(_chunk_for_shard(shard_md), properties, whole.size)


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: protocol.TensorStorageMetadata, local_chunks: list[protocol.ChunkStorageMetadata]
) -> list[protocol.ReadItem]:
    """Return what to read to fill boxes of a tensor that is stored in other boxes."""
    items = []
    stored = checkpoint_md.chunks
    for number, index in overlaps(local_chunks, stored):
        local, saved = local_chunks[number], stored[index]
        region = overlap_region(saved, local)
        items.append(
            _create_read_item_for_tensor(
                dest_index=protocol.MetadataIndex(fqn, local.offsets, number),
                dest_offsets=[here for _, _, here, _ in region],
                storage_index=protocol.MetadataIndex(fqn, saved.offsets, index),
                storage_offsets=[there for _, there, _, _ in region],
                lengths=[length for _, _, _, length in region],
            )
        )
    return items


def _create_read_items(fqn: str, md: Any, obj: Any) -> list[protocol.ReadItem]:
    """Return what to read to fill this rank's part of a value; `md` is its entry in the checkpoint."""
    return reads_of(fqn, md, obj)[0]


def reads_of(fqn: str, md: Any, obj: Any) -> tuple[list[protocol.ReadItem], bool]:
    """Return what to read to fill this rank's part of a value, and whether that fills all of it."""
    if not protocol.is_tensor_entry(md):
        return [_create_read_item_for_byteio(protocol.MetadataIndex(fqn), 0, protocol.MetadataIndex(fqn), 0, 0)], True
    try:
        local_chunks = _create_chunk_list(obj)
    except StateMismatch as error:
        raise _no_tensor(fqn, obj) from error
    items = create_read_items_for_chunk_list(fqn, md, local_chunks)
    wanted = sum(math.prod(chunk.sizes) for chunk in local_chunks)
    return items, sum(math.prod(item.lengths) for item in items) >= wanted


def _create_read_item_for_byteio(
    dest_index: protocol.MetadataIndex,
    dest_offset: int,
    storage_index: protocol.MetadataIndex,
    storage_offset: int,
    length: int,
) -> protocol.ReadItem:
    boxes = dest_index, (dest_offset,), storage_index, (storage_offset,), (length,)
    return dataclasses.replace(_create_read_item_for_tensor(*boxes), type=protocol.LoadItemType.BYTE_IO)


def _create_read_item_for_tensor(
    dest_index: protocol.MetadataIndex,
    dest_offsets: Sequence[int],
    storage_index: protocol.MetadataIndex,
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> protocol.ReadItem:
    target, source = (dest_index, torch.Size(dest_offsets)), (storage_index, torch.Size(storage_offsets))
    return protocol.ReadItem(protocol.LoadItemType.TENSOR, *target, *source, torch.Size(lengths))


# -- plans and metadata of a flat state dict ---------------------------------------------------------------------------

logger = logging.getLogger("shardkeep")

_named = partial(some_of, most=20)
"""How many keys a message lists; it only counts the others."""


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> protocol.SavePlan:  # noqa: ARG001
    """Return the plan to write everything this rank has. The global plan removes replicas."""
    items: list[protocol.WriteItem] = []
    for fqn, value in state_dict.items():
        if has_part(value):
            items += _create_write_items(fqn, value)
    return protocol.SavePlan(items)


def create_default_global_save_plan(
    all_plans: list[protocol.SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[protocol.SavePlan], protocol.Metadata]:
    """Return the plans of all ranks, and the metadata of what they write."""
    entries: dict[str, protocol.STORAGE_TYPES] = {}
    plans = []
    for plan in all_plans:
        items = []
        for item in plan.items:
            fqn, data = item.index.fqn, item.tensor_data
            if fqn in entries and (
                item.type != protocol.WriteItemType.SHARD or not protocol.is_tensor_entry(entries[fqn])
            ):
                raise BrokenProtocol(f"{fqn!r} is planned to be written twice", hint="dedupe the plans first", key=fqn)
            if item.type == protocol.WriteItemType.BYTE_IO:
                entries[fqn] = protocol.BytesStorageMetadata()
                items.append(item)
                continue
            if data is None or data.chunk is None:
                raise BrokenProtocol(f"the item for {fqn!r} does not say which box of the tensor it writes", key=fqn)
            entry = entries.setdefault(fqn, protocol.TensorStorageMetadata(data.properties, data.size, []))
            chunks = entry.chunks  # type: ignore[union-attr]  # no bytes: checked above
            if rewrite_index_hints:
                item = dataclasses.replace(item, index=dataclasses.replace(item.index, index=len(chunks)))  # noqa: PLW2901
            items.append(item)
            chunks.append(data.chunk)
        plans.append(dataclasses.replace(plan, items=items))
    return plans, protocol.Metadata(entries)


def create_default_local_load_plan(
    state_dict: dict[str, Any], metadata: protocol.Metadata, strict: bool = True
) -> protocol.LoadPlan:
    """Return what to read to fill this rank's part of a flat state dict; conversions and holes are logged."""
    entries = metadata.state_dict_metadata
    if strict and (missing := [fqn for fqn in state_dict if fqn not in entries]):
        raise missing_keys(missing, [fqn for fqn in entries if fqn not in state_dict])
    wanted = {fqn: value for fqn, value in state_dict.items() if fqn in entries}
    tensors = {fqn: each for fqn in wanted if protocol.is_tensor_entry(each := entries[fqn])}
    check_forms(wanted, {fqn: (each.size, each.properties.dtype) for fqn, each in tensors.items()})  # type: ignore[union-attr]
    items: list[protocol.ReadItem] = []
    thin: list[str] = []
    for fqn, value in wanted.items():
        if has_part(value):
            reads, complete = reads_of(fqn, entries[fqn], value)
            items += reads
            if not complete:
                thin.append(fqn)
    if thin:
        warn_of_holes(thin)
    return protocol.LoadPlan(items)


def create_default_global_load_plan(all_plans: list[protocol.LoadPlan]) -> list[protocol.LoadPlan]:
    """Return the plans unchanged: each rank reads what it needs."""
    return all_plans


def _create_default_local_metadata(state_dict: protocol.STATE_DICT_TYPE) -> protocol.Metadata:
    """Return the metadata that a save of this state by the default planner would have, as far as this rank knows."""
    _, metadata = create_default_global_save_plan([_create_default_metadata_only_plan(state_dict)])
    return metadata


def _validate_global_plan(global_plan: list[protocol.SavePlan], metadata: protocol.Metadata) -> list[str]:
    """Return the faults of a global plan, one line each."""
    faults: list[str] = []
    for key, entry in metadata.state_dict_metadata.items():
        if not protocol.is_tensor_entry(entry):
            continue
        size, chunks = entry.size, entry.chunks  # type: ignore[union-attr]  # checked above
        outside = [chunk for chunk in chunks if not within(size, chunk)]
        faults += [f"key:{key} has out of bounds chunk {_box(chunk)} of {tuple(size)}" for chunk in outside]
        if outside:
            continue
        faults += [f"key:{key} has overlapping chunks {_box(a)} and {_box(b)}" for a, b in clashes(chunks)]
        covered, volume = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(size)
        # A single plan may be one rank's part of a state that other ranks save elsewhere.
        if len(global_plan) > 1 and covered != volume:
            faults.append(f"key:{key} invalid fill: its chunks hold {covered} elements of {volume}")
    for fault in faults:
        logger.warning(fault)
    return faults


def _check_box_overlap(box0: protocol.ChunkStorageMetadata, box1: protocol.ChunkStorageMetadata) -> bool:
    return boxes_overlap(box0, box1)


def missing_keys(
    missing: list[str],
    unclaimed: Collection[str],
    hint: str = "load with DefaultLoadPlanner(allow_partial_load=True) to leave these as they are",
) -> BadState:
    """Return the error for keys that a checkpoint lacks; `unclaimed`: names in it that may have been meant."""
    meant, rename = suggestions((missing, unclaimed))
    near = f"did you mean {_named([f'{other!r} for {name!r}' for name, other in meant.items()])}?" if meant else ""
    hint = "; ".join(filter(None, (f"{rename} to shardkeep.load" if rename else near, hint)))
    return BadState(f"Missing key in checkpoint state_dict: {', '.join(missing)}.", hint=hint, missing=missing)


def warn_of_holes(keys: list[str]) -> None:
    logger.warning("the checkpoint does not hold all of these tensors; the rest stays as it is: %s", _named(keys))


def check_forms(wanted: Mapping[str, Any], stored: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
    """Compare tensors with the sizes and dtypes that are stored, and log which dtypes will be converted."""
    wrong: list[str] = []
    casts: list[str] = []
    for fqn, (saved, dtype) in stored.items():
        value = wanted[fqn]
        if not isinstance(value, torch.Tensor):
            raise _no_tensor(fqn, value)
        size = global_size(value)
        if tuple(saved) != size:
            wrong.append(f"Size mismatch between saved {torch.Size(saved)} and current: {size} for {fqn}")
        if dtype != value.dtype:
            casts.append(f"{fqn} ({dtype} to {value.dtype})")
    if wrong:
        raise StateMismatch("; ".join(wrong), hint="build the state with the saved sizes", mismatched=wrong)
    if casts:
        logger.warning("tensors are converted to the state's dtype as they are loaded: %s", _named(casts))


def global_size(tensor: torch.Tensor) -> torch.Size:
    """Return the size of the whole tensor of which a rank holds shards."""
    if not is_ordinary(tensor) and protocol._is_checkpointable_tensor(tensor):
        return torch.Size(tensor.global_shape)
    return tensor.size()


def _no_tensor(fqn: str, value: object) -> StateMismatch:
    return StateMismatch(
        f"{fqn!r} is a tensor in the checkpoint and a {type(value).__qualname__} in the state",
        hint="put a tensor of the saved size there, or take the key out of the state",
        key=fqn,
    )


def _box(chunk: Any) -> str:
    return f"{tuple(chunk.sizes)} at {tuple(chunk.offsets)}"


def dedup_save_plans(all_plans: list[protocol.SavePlan], save_to_lowest_rank: bool = False) -> list[protocol.SavePlan]:
    """Return the plans with each item in one of them only: the first that has it, or so that all ranks write about as much."""
    return dedupe(all_plans, small_nbytes=math.inf if save_to_lowest_rank else 0)


def dedupe(all_plans: list[protocol.SavePlan], *, small_nbytes: float) -> list[protocol.SavePlan]:
    """Return new plans with each item in one of them only, so that all ranks write about as much; the order is kept."""
    # Large items go first, to the rank with least to write; those of up to `small_nbytes` to the first that has them.
    holders: dict[protocol.MetadataIndex, list[int]] = {}
    items: dict[protocol.MetadataIndex, protocol.WriteItem] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            held_by = holders.setdefault(item.index, [])
            if not held_by or held_by[-1] != rank:
                held_by.append(rank)
            items.setdefault(item.index, item)

    writer = {index: ranks[0] for index, ranks in holders.items()}
    load = [0] * len(all_plans)
    sizes = {index: protocol.chunk_nbytes(item) or 1 for index, item in items.items()}
    shared = []
    for index, ranks in holders.items():
        if len(ranks) == 1 or sizes[index] <= small_nbytes:
            load[ranks[0]] += sizes[index]
        else:
            shared.append(index)
    for index in sorted(shared, key=lambda each: -sizes[each]):
        writer[index] = min(holders[index], key=load.__getitem__)
        load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writer[item.index] == rank])
        for rank, plan in enumerate(all_plans)
    ]


def dedup_tensors(all_plans: list[protocol.SavePlan]) -> list[protocol.SavePlan]:
    """Return the plans with each item only in the first plan that has it."""
    return dedup_save_plans(all_plans, save_to_lowest_rank=True)
