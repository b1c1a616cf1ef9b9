"""
Objects with `state_dict` and `load_state_dict`: schedulers, data loaders, scalers, whatever a user writes.

An object is given back exactly what its `state_dict` returned, whatever it holds by now. State that differs between
ranks is stored for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
import xxhash

from shardkeep.errors import StateMismatch, UnsupportedLeaf
from shardkeep.format.tree import encode_tree
from shardkeep.format.values import encode_value
from shardkeep.state.flatten import flatten
from shardkeep.state.kinds import EveryRank, PerRank, ShardedBox
from shardkeep.state.leaves import describe_leaf, is_tensor
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored, StoredLeaf

_LARGE_NBYTES = 1 << 20
"""Larger tensors are taken for replicas, as they are everywhere in a state; to hash a model would take seconds."""


class StatefulObject:
    """How an object with `state_dict` and `load_state_dict` is saved and loaded."""

    def __init__(self, name: str, target: Any, *, rank: int, world_size: int) -> None:
        self.name = name
        self._target = target
        self._rank = rank
        self._world_size = world_size
        self._per_rank = bool(getattr(type(target), "__per_rank__", False))

    @cached_property
    def _given(self) -> Mapping[Any, Any]:
        """Asked for once: it may be a costly answer, or another one the next time."""
        return _state_of(self.name, self._target)

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Sum up a state that may differ between ranks. One that is spread over them says itself what belongs where."""
        if self._per_rank or f"@{self._rank}" in self.name.split("."):
            return {}
        leaves, tree = flatten(self._given, rank=self._rank, is_tensor=is_tensor)
        if any(_is_spread(leaf) for leaf in leaves.values()):
            return {}
        digest = xxhash.xxh3_128(encode_tree(tree))
        for key, leaf in leaves.items():
            digest.update(digest_of(f"{self.name}.{key}", leaf, allow_pickle=allow_pickle))
        return {self.name: digest.digest()}

    def give(self, differing: Collection[str]) -> Any:
        """Return the object's state."""
        return PerRank(self._given) if self._per_rank or self.name in differing else self._given

    def template(self, stored: Stored, selected: Selected) -> Any:  # noqa: ARG002 - all of it, or nothing
        """Return what was saved, with places for its leaves; `UNFILLED` where nothing was."""
        if not stored.has(self.name):
            return UNFILLED
        present = _state_of(self.name, self._target)
        leaves, _ = flatten(present, rank=self._rank, is_tensor=is_tensor)
        saved = stored.nest(
            self.name, lambda leaf: place_for(stored, leaf, leaves.get(leaf.name[len(self.name) + 1 :]))
        )
        if not isinstance(saved, EveryRank):
            return saved
        if set(saved.values) == set(range(self._world_size)):
            return PerRank(saved.values[self._rank])
        if not hasattr(self._target, "load_rank_states"):
            raise StateMismatch(
                f"{self.name!r} was saved by {len(saved.values)} ranks, each with its own; this is rank {self._rank} of"
                f" {self._world_size}",
                hint=f"give {type(self._target).__qualname__} a method load_rank_states(states, rank, world_size) that"
                f" decides what this rank takes, or exclude={self.name!r}",
                key=self.name,
            )
        return saved

    def take(self, state: Any) -> None:
        """Give the object what was loaded."""
        if isinstance(state, EveryRank):
            self._target.load_rank_states(state.values, self._rank, self._world_size)
        else:
            self._target.load_state_dict(state.value if isinstance(state, PerRank) else state)


def place_for(stored: Stored, leaf: StoredLeaf, present: Any) -> Any:
    """Return where a stored leaf can be put: the tensor that is there if it fits, else a new one."""
    if not leaf.is_tensor:
        return UNFILLED
    shape, dtype = stored.shape(leaf), stored.dtype(leaf)
    if is_tensor(present):
        described = describe_leaf(leaf.name, present, allow_meta=True)
        if described.shape == shape and described.dtype == dtype:
            return present
    fresh = torch.empty(shape, dtype=dtype, device="cpu")
    return fresh.numpy() if stored.from_numpy(leaf) else fresh


def _state_of(name: str, target: Any) -> Mapping[Any, Any]:
    state = target.state_dict()
    if not isinstance(state, Mapping):
        raise UnsupportedLeaf(
            f"{name!r}: state_dict() of {type(target).__qualname__} returned a {type(state).__qualname__}",
            hint="return a dict",
            key=name,
        )
    return state


def _is_spread(leaf: Any) -> bool:
    return is_tensor(leaf) and (isinstance(leaf, ShardedBox) or hasattr(leaf, "placements") or _is_sharded_tensor(leaf))


def _is_sharded_tensor(leaf: Any) -> bool:
    return callable(getattr(leaf, "local_shards", None))


def digest_of(key: str, leaf: Any, *, allow_pickle: bool) -> bytes:
    """Sum up a leaf: a plain value, or a tensor that is not large."""
    if not is_tensor(leaf):
        return xxhash.xxh3_128_digest(encode_value(leaf, key=key, allow_pickle=allow_pickle))
    described = describe_leaf(key, leaf)
    digest = xxhash.xxh3_128(f"{described.dtype} {described.shape}".encode())
    for _, tensor in described.pieces:
        if 0 < tensor.nbytes <= _LARGE_NBYTES:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
