"""
The shards that a `CheckpointableTensor` holds. The functions have torch's names.

A tensor's description is checked whenever its shards are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardkeep.errors import InvalidShards, NoSuchValue
from shardkeep.layouts.torch_values import CheckpointableTensor, ChunkStorageMetadata, MetadataIndex

if TYPE_CHECKING:
    from collections.abc import Sequence


def _get_checkpointable_tensor_chunks(tensor: CheckpointableTensor) -> list[ChunkStorageMetadata]:
    _validate_checkpointable_tensor_metadata(tensor)
    boxes = zip(tensor.global_offsets, tensor.local_sizes, strict=True)
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def _get_checkpointable_tensor_shard(tensor: CheckpointableTensor, index: MetadataIndex) -> torch.Tensor:
    _validate_checkpointable_tensor_metadata(tensor)
    offsets = [torch.Size(each) for each in tensor.global_offsets]
    if index.offset is None:
        if len(offsets) != 1:
            raise NoSuchValue(
                f"{index.fqn!r} holds {len(offsets)} shards, and there is no offset in the index", key=index.fqn
            )
        at = 0
    elif index.index is not None and 0 <= index.index < len(offsets) and offsets[index.index] == index.offset:
        at = index.index
    elif index.offset in offsets:
        at = offsets.index(index.offset)
    else:
        raise NoSuchValue(f"{index.fqn!r} has no shard at {tuple(index.offset)} on this rank", key=index.fqn)
    box = zip(tensor.local_offsets[at], tensor.local_sizes[at], strict=True)
    shard: torch.Tensor = tensor[tuple(slice(start, start + size) for start, size in box)]  # type: ignore[index]
    return shard


def _validate_checkpointable_tensor_metadata(tensor: CheckpointableTensor) -> None:
    shape: Sequence[int] = tensor.shape  # type: ignore[attr-defined]  # it is a tensor, as the caller has checked
    names = ("global_offsets", "local_offsets", "local_sizes")
    counts = {name: len(getattr(tensor, name)) for name in names}
    if len(set(counts.values())) > 1:
        raise InvalidShards(f"a tensor of {tuple(shape)} must describe each of its shards three times, not {counts}")
    for n, (offsets, starts, sizes) in enumerate(
        zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True)
    ):
        for name, begin, within in (("global_offsets", offsets, tensor.global_shape), ("local_offsets", starts, shape)):
            if not len(begin) == len(sizes) == len(within) or not all(
                start >= 0 and size >= 0 and start + size <= most
                for start, size, most in zip(begin, sizes, within, strict=True)
            ):
                raise InvalidShards(
                    f"shard {n} of a tensor, at {tuple(begin)} of {name} with local_sizes {tuple(sizes)}, is not inside"
                    f" {tuple(within)}"
                )
