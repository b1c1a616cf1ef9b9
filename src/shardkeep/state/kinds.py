"""Values a user wraps around a leaf to say what kind of state it is."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardkeep.errors import InvalidShards

if TYPE_CHECKING:
    import torch


class PerRank:
    """
    State that belongs to one rank: RNG, data loader position. Every rank's value is stored under its own rank.

    `value` may be anything a state may hold, dicts and tensors included. Loading replaces `value` by what the same
    rank number saved: a plain value may be None before, and a dict, or a list of tensors, needs the same nesting, as
    everywhere in a state.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class EveryRank(PerRank):
    """What all ranks saved under a `PerRank`, for one that is to be given all of it."""

    __slots__ = ("values",)

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(None)
        self.values = values


class ShardedBox:
    """
    Local pieces of a tensor that some framework shards in its own way: each a tensor and where it begins.

    ``ShardedBox(local, offsets=(4, 0), shape=(8, 16))`` is one piece; `ShardedBox.of` takes any number, none
    included. Pieces of all ranks together must tile `shape` exactly; equal pieces on several ranks are replicas.
    """

    __slots__ = ("dtype", "pieces", "shape")

    def __init__(self, local: torch.Tensor, *, offsets: Sequence[int], shape: Sequence[int]) -> None:
        loaded = sys.modules.get("torch")  # to import it takes seconds, and where it is not loaded there is no tensor
        if loaded is None or not isinstance(local, loaded.Tensor):
            raise InvalidShards(f"ShardedBox: local is a {type(local).__qualname__}, expected a torch.Tensor")
        self.pieces: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ((local, _ints("offsets", offsets)),)
        self.shape = _ints("shape", shape)
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
        box.pieces = tuple((tensor, _ints("offsets", offsets)) for tensor, offsets in pieces)
        box.shape = _ints("shape", shape)
        box.dtype = dtype
        return box

    def __repr__(self) -> str:
        where = ", ".join(f"{tuple(t.shape)} at {o}" for t, o in self.pieces)
        return f"ShardedBox(shape={self.shape}, dtype={self.dtype}, pieces=[{where}])"


def _ints(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError as exc:
        raise InvalidShards(
            f"ShardedBox: {name}={values!r}, expected integers, one for each dimension of the whole tensor"
        ) from exc
