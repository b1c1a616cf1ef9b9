"""
The draft: what one rank says about its state, as columns that cross ranks without pickle.

A rank sends its draft to rank 0 once a save. Equal parts of many ranks' drafts (keys, tree, values) are equal bytes,
so that rank 0 decodes each different one once.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.format.boxes import IntArray


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a state. Arrays travel as little-endian bytes."""

    axes: int
    """Width of the box matrices."""
    names: bytes
    """`TensorNames`, encoded: equal on ranks that hold the same tensors."""
    shape: bytes
    alias: bytes
    """For each tensor, the position of the first one that is the same memory here; -1: this rank holds none of it."""
    row_tensor: bytes
    """For each shard, the tensor it is of: a position in the names."""
    row_offsets: bytes
    row_sizes: bytes
    check_replicas: bool
    row_digest: bytes
    """A 16-byte digest for each shard, or nothing where replicas are trusted."""
    tree: bytes
    """The state's skeleton (`format.tree`)."""
    values: bytes
    """`PlainValues`, encoded."""


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a rank's state, apart from where they lie."""

    keys: list[str]
    groups: list[str]
    """The file group of each tensor: the top-level key it is under."""
    dtype: bytes
    ndim: bytes
    origin: bytes


class PlainValues(msgspec.Struct, frozen=True, kw_only=True):
    """The plain values of a rank's state."""

    keys: list[str]
    data: list[bytes]


encode = msgspec.msgpack.encode


def decode_manifest(data: bytes) -> RankManifest:
    """Read a draft that another rank sent."""
    return msgspec.msgpack.decode(data, type=RankManifest)


def decode_names(data: bytes) -> TensorNames:
    """Read a draft's tensor names."""
    return msgspec.msgpack.decode(data, type=TensorNames)


def decode_values(data: bytes) -> PlainValues:
    """Read a draft's plain values."""
    return msgspec.msgpack.decode(data, type=PlainValues)


def ints(data: bytes) -> IntArray:
    """View bytes as 64-bit integers."""
    return np.frombuffer(data, "<i8")


def small_ints(data: bytes) -> npt.NDArray[np.uint8]:
    """View bytes as 8-bit integers."""
    return np.frombuffer(data, np.uint8)
