"""
What is to be written and read, as plain values: items, and the plans of a rank that are made of them.

The kinds of items are equal to torch's members of the same names, with the same hashes: torch's readers and writers
compare items of ours with their own enums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from shardkeep.protocol.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, is_torchs


class _ItemType(Enum):
    """Members equal to those of torch's enum with the name of ours."""

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self is other
        if isinstance(other, Enum) and is_torchs(other, type(self).__name__):
            return self.name == other.name
        return NotImplemented

    def __hash__(self) -> int:
        # As every enum's: hash-equal to torch's member.
        return hash(self._name_)


class WriteItemType(_ItemType):
    """What an item writes: a whole tensor, a shard of one, or bytes."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(_ItemType):
    """What an item reads: a box of a tensor, or bytes."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """How much an object will take, where it is known."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """Which box of which tensor is written."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size
    """Of the whole tensor."""


@dataclass(frozen=True)
class WriteItem:
    """Something that is written in one piece."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the bytes of the *whole* tensor this is a piece of, as torch does; None for other objects."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """A box that is read from one stored piece into one place."""

    type: LoadItemType
    dest_index: MetadataIndex
    """The value, or the shard of it, that is filled."""
    dest_offsets: torch.Size
    """Where the box begins there."""
    storage_index: MetadataIndex
    """The stored piece."""
    storage_offsets: torch.Size
    """Where the box begins in it."""
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What a rank writes."""

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    """False where the plan of the previous save holds."""


@dataclass
class LoadPlan:
    """What a rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


def chunk_nbytes(item: WriteItem) -> int:
    """Return the bytes that an item itself writes; 1 where nobody knows."""
    if item.tensor_data is not None:
        return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 1
