"""Which file of a rank each item goes to: objects in turn, tensors where there is least so far, the largest first."""

from __future__ import annotations

import heapq
import math

from shardkeep.protocol.plans import WriteItem, WriteItemType


def _item_size(item: WriteItem) -> int:
    """Return the bytes that an item writes of its tensor; 0 for an object."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """Spread items over this many files."""
    if bins == 1:
        return [items]
    buckets: list[list[WriteItem]] = [[] for _ in range(bins)]
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    for number, item in enumerate(objects):
        buckets[number % bins].append(item)
    sizes = [(0, number) for number in range(bins)]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    for item in sorted(tensors, key=_item_size, reverse=True):
        size, number = sizes[0]
        buckets[number].append(item)
        heapq.heapreplace(sizes, (size + _item_size(item), number))
    return buckets
