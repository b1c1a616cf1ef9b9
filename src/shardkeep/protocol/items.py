"""
From the values of a state to the items of plans.

Values that describe themselves (`__create_write_items__`, `__create_chunk_list__`: DTensors, LocalShardsWrapper) do so
in torch's classes; what they say becomes ours here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardkeep.errors import StateMismatch
from shardkeep.protocol.chunks import overlap_region, overlaps
from shardkeep.protocol.foreign import ours
from shardkeep.protocol.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    is_tensor_entry,
)
from shardkeep.protocol.plans import LoadItemType, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from shardkeep.protocol.problems import NotSavable
from shardkeep.state.toolkit.recognise import is_dtensor, is_sharded_tensor

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor

# -- what is written ---------------------------------------------------------------------------------------------------


def _create_write_items(fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002 - torch's name
    """Return the items that write this rank's part of a value."""
    if hasattr(object, "__create_write_items__"):
        items: list[WriteItem] = ours(list(object.__create_write_items__(fqn, object)))
        return items
    if is_sharded_tensor(object):
        return [_create_write_item_for_shard(fqn, object, shard.metadata) for shard in object.local_shards()]
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
    """Say whether a part of a tensor, of which other ranks have the rest, is somewhere in these containers."""
    if isinstance(value, Mapping):
        return any(map(_holds_shards, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_shards, value))
    if is_dtensor(value):
        return bool(value.device_mesh.size() > 1) and not all(each.is_replicate() for each in value.placements)
    return is_sharded_tensor(value) and len(value.metadata().shards_metadata) > len(value.local_shards())


def _create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    chunk = _create_chunk_from_tensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def _create_write_item_for_shard(fqn: str, sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> WriteItem:
    data = _sharded_tensor_metadata(sharded_tensor, shard_md)
    return WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _create_write_items_for_dtensor(fqn: str, tensor: DTensor) -> WriteItem:
    chunk = _create_chunk_from_dtensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor.to_local()), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _create_write_item_for_bytesio(fqn: str, bytes: Any) -> WriteItem:  # noqa: A002, ARG001 - torch's names
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def _create_default_metadata_only_plan(state_dict: STATE_DICT_TYPE) -> SavePlan:
    """Return a plan that describes every shard of the state as far as this rank knows; nothing can be written by it."""
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if is_dtensor(value):
            items.append(_create_write_items_for_dtensor(fqn, value))
        elif is_sharded_tensor(value):
            shards = value.metadata().shards_metadata
            items += [_create_write_item_for_shard(fqn, value, shard) for shard in shards]
        else:
            items += _create_write_items(fqn, value)
    return SavePlan(items)


# -- boxes -------------------------------------------------------------------------------------------------------------


def _create_chunk_list(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    """Return the boxes of a tensor that this rank holds."""
    if hasattr(tensor, "__create_chunk_list__"):
        chunks: list[ChunkStorageMetadata] = ours(list(tensor.__create_chunk_list__()))
        return chunks
    if is_sharded_tensor(tensor):
        return [_chunk_for_shard(shard.metadata) for shard in tensor.local_shards()]  # type: ignore[attr-defined]
    if isinstance(tensor, torch.Tensor):
        return [_create_chunk_from_tensor(tensor)]
    raise StateMismatch(f"only tensors have boxes, and this is a {type(tensor).__qualname__}")


def _create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())


def _create_chunk_from_dtensor(tensor: DTensor) -> ChunkStorageMetadata:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - loaded already

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _chunk_for_shard(shard_md: ShardMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes))


def _sharded_tensor_metadata(sharded_tensor: ShardedTensor, shard_md: ShardMetadata) -> TensorWriteData:
    whole = sharded_tensor.metadata()
    kept = whole.tensor_properties
    properties = TensorProperties(
        dtype=kept.dtype,
        layout=kept.layout,
        requires_grad=kept.requires_grad,
        memory_format=kept.memory_format,
        pin_memory=kept.pin_memory,
    )
    return TensorWriteData(_chunk_for_shard(shard_md), properties, whole.size)


# -- what is read ------------------------------------------------------------------------------------------------------


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """
    Return what to read to fill boxes of a tensor that is stored in other boxes.

    Args:
        fqn: The tensor's flat name.
        checkpoint_md: How it is stored.
        local_chunks: The boxes to fill.

    """
    items = []
    stored = checkpoint_md.chunks
    for number, index in overlaps(local_chunks, stored):
        local, saved = local_chunks[number], stored[index]
        region = overlap_region(saved, local)
        items.append(
            _create_read_item_for_tensor(
                dest_index=MetadataIndex(fqn, local.offsets, number),
                dest_offsets=[here for _, _, here, _ in region],
                storage_index=MetadataIndex(fqn, saved.offsets, index),
                storage_offsets=[there for _, there, _, _ in region],
                lengths=[length for _, _, _, length in region],
            )
        )
    return items


def _create_read_items(fqn: str, md: Any, obj: Any) -> list[ReadItem]:
    """Return what to read to fill this rank's part of a value; `md` is its entry in the checkpoint."""
    return reads_of(fqn, md, obj)[0]


def reads_of(fqn: str, md: Any, obj: Any) -> tuple[list[ReadItem], bool]:
    """
    Return what to read to fill this rank's part of a value, and whether that fills all of it.

    Raises:
        StateMismatch: (a ValueError) the checkpoint has a tensor there and the state has none.

    """
    if not is_tensor_entry(md):
        return [_create_read_item_for_byteio(MetadataIndex(fqn), 0, MetadataIndex(fqn), 0, 0)], True
    try:
        local_chunks = _create_chunk_list(obj)
    except StateMismatch as error:
        raise StateMismatch(
            f"{fqn!r} is a tensor in the checkpoint and a {type(obj).__qualname__} in the state",
            hint="put a tensor of the saved size there, or take the key out of the state",
            key=fqn,
        ) from error
    items = create_read_items_for_chunk_list(fqn, md, local_chunks)
    wanted = sum(math.prod(chunk.sizes) for chunk in local_chunks)
    return items, sum(math.prod(item.lengths) for item in items) >= wanted


def _create_read_item_for_byteio(
    dest_index: MetadataIndex, dest_offset: int, storage_index: MetadataIndex, storage_offset: int, length: int
) -> ReadItem:
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=dest_index,
        dest_offsets=torch.Size((dest_offset,)),
        storage_index=storage_index,
        storage_offsets=torch.Size((storage_offset,)),
        lengths=torch.Size((length,)),
    )


def _create_read_item_for_tensor(
    dest_index: MetadataIndex,
    dest_offsets: Sequence[int],
    storage_index: MetadataIndex,
    storage_offsets: Sequence[int],
    lengths: Sequence[int],
) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=dest_index,
        dest_offsets=torch.Size(dest_offsets),
        storage_index=storage_index,
        storage_offsets=torch.Size(storage_offsets),
        lengths=torch.Size(lengths),
    )
