"""Values a user wraps around a leaf to say what kind of state it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class PerRank:
    """
    State that belongs to one rank: RNG, data loader position. Every rank's value is stored under its own rank.

    `value` may be anything a state may hold, dicts and tensors included. Loading replaces `value` by what the same
    rank number saved.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class ShardedBox:
    """
    Local pieces of a tensor that some framework shards in its own way: each a tensor and where it begins.

    ``ShardedBox(local, offsets=(4, 0), shape=(8, 16))`` is one piece; `ShardedBox.of` takes any number, none
    included. Pieces of all ranks together must tile `shape` exactly; equal pieces on several ranks are replicas.
    """

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, local: torch.Tensor, *, offsets: Sequence[int], shape: Sequence[int]) -> None:
        self.pieces: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ((local, tuple(offsets)),)
        self.shape = tuple(shape)
        self.dtype = local.dtype

    @classmethod
    def of(
        cls,
        pieces: Iterable[tuple[torch.Tensor, Sequence[int]]],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> ShardedBox:
        """Build from any number of `(tensor, offsets)`, which share one dtype."""
        box = cls.__new__(cls)
        box.pieces = tuple((tensor, tuple(offsets)) for tensor, offsets in pieces)
        box.shape = tuple(shape)
        box.dtype = dtype
        return box

    def __repr__(self) -> str:
        where = ", ".join(f"{tuple(t.shape)} at {o}" for t, o in self.pieces)
        return f"ShardedBox(shape={self.shape}, dtype={self.dtype}, pieces=[{where}])"
