"""
Objects with `state_dict` and `load_state_dict`: schedulers, data loaders, scalers, whatever a user writes.

An object is given back exactly what its `state_dict` returned, whatever it holds by now. State that differs between
ranks is stored for each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NoReturn

import torch
import xxhash

from shardkeep.errors import ReplicasDiffer, StateMismatch, UnsupportedLeaf
from shardkeep.format.values import encode_value
from shardkeep.state.flatten import flatten
from shardkeep.state.kinds import EveryRank, PerRank, ShardedBox
from shardkeep.state.leaves import describe_leaf, is_tensor
from shardkeep.state.objects.stored import UNFILLED, Selected, Stored, StoredLeaf, is_each_ranks_own
from shardkeep.state.toolkit.recognise import is_dtensor, is_sharded_tensor

_SAMPLES = 16
_SAMPLE_NBYTES = 64 << 10
"""Of tensors of more than 1 MiB so many pieces are compared, spread evenly; to hash a model would take seconds."""


class StatefulObject:
    """How an object with `state_dict` and `load_state_dict` is saved and loaded."""

    def __init__(self, name: str, target: Any, *, rank: int, world_size: int) -> None:
        self.name = name
        self.communicates = False
        self._target = target
        self._rank = rank
        self._world_size = world_size
        self._present: Any = None
        self._in_per_rank = is_each_ranks_own(name, rank)
        # One that knows what to do with all ranks' states is to be given all ranks' states.
        self._per_rank = getattr(type(target), "__per_rank__", False) or hasattr(target, "load_rank_states")

    @cached_property
    def _given(self) -> Mapping[Any, Any]:
        """Asked for once: it may be a costly answer, or another one the next time."""
        return _state_of(self.name, self._target)

    def unsure(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """
        Sum up a state that may differ between ranks.

        One that is in part spread over them is summed up leaf by leaf: as a whole it cannot be each rank's own.
        """
        if self._per_rank or self._in_per_rank:
            return {}
        leaves, _ = flatten(self._given, rank=self._rank, is_tensor=is_tensor)
        own = {
            f"{self.name}.{key}": digest_of(f"{self.name}.{key}", leaf, allow_pickle=allow_pickle)
            for key, leaf in sorted(leaves.items())
            if not _is_spread(leaf) and not is_each_ranks_own(key, self._rank)
        }
        if any(_is_spread(leaf) for leaf in leaves.values()):
            return own
        digest = xxhash.xxh3_128()
        for key, one in own.items():
            digest.update(key.encode() + b"\0" + one)
        return {self.name: digest.digest()}

    def give(self, differing: Collection[str]) -> Any:
        """Return the object's state."""
        if inside := [name for name in differing if name.startswith(f"{self.name}.")]:
            raise ReplicasDiffer(
                f"{inside[0]!r} is not the same on all ranks, in an object whose other tensors are spread over them",
                hint="let state_dict() wrap what differs by rank in sk.PerRank",
                key=inside[0],
            )
        alone = (self._per_rank or self.name in differing) and not self._in_per_rank
        return PerRank(self._given) if alone else self._given

    def template(self, stored: Stored, selected: Selected) -> Any:  # noqa: ARG002 - all of it, or nothing
        """Return what was saved, with places for its leaves; `UNFILLED` where nothing was."""
        if not stored.has(self.name):
            return UNFILLED
        leaf = stored.find(self.name)
        if leaf is not None and not leaf.empty:
            raise StateMismatch(
                f"{self.name!r} is a {type(self._target).__qualname__} in the state, and a single value in the checkpoint",
                hint="load the value under another name, or exclude it",
                key=self.name,
            )
        # Only for how tensors are laid out over ranks; what is in it now is never touched.
        with suppress(Exception):
            self._present = _state_of(self.name, self._target)
        leaves, _ = flatten(self._present or {}, rank=self._rank, is_tensor=is_tensor)
        behind = len(self.name) + 1
        saved = stored.nest(self.name, lambda leaf: place_for(stored, leaf, leaves.get(leaf.name[behind:])))
        if not isinstance(saved, EveryRank):
            return self._own_parts(saved, self.name)
        if set(saved.values) == set(range(self._world_size)):
            return PerRank(self._own_parts(saved.values[self._rank], self.name))
        if not hasattr(self._target, "load_rank_states"):
            self._refuse(self.name, len(saved.values))
        return saved

    def _own_parts(self, value: Any, name: str) -> Any:
        """Keep this rank's value of each `PerRank` that the state itself has."""
        if isinstance(value, EveryRank):
            if set(value.values) != set(range(self._world_size)):
                self._refuse(name, len(value.values))
            return PerRank(value.values[self._rank])
        if isinstance(value, dict):
            for key, child in value.items():
                value[key] = self._own_parts(child, f"{name}.{key}")
        if isinstance(value, (list, tuple)):
            return type(value)(self._own_parts(child, f"{name}.{at}") for at, child in enumerate(value))
        return value

    def _refuse(self, name: str, ranks: int) -> NoReturn:
        raise StateMismatch(
            f"{name!r} was saved by {ranks} ranks, each with its own; this is rank {self._rank} of {self._world_size}",
            hint=f"give {type(self._target).__qualname__} a method load_rank_states(states, rank, world_size) that"
            f" decides what this rank takes, or exclude={self.name!r}",
            key=name,
        )

    def take(self, state: Any) -> None:
        """Give the object what was loaded."""
        if isinstance(state, EveryRank):
            self._target.load_rank_states(state.values, self._rank, self._world_size)
            return
        own = state.value if isinstance(state, PerRank) and not self._in_per_rank else state
        self._target.load_state_dict(_in_classes_of(self._present, own))


def place_for(stored: Stored, leaf: StoredLeaf, present: Any = None) -> Any:
    """Make room for a stored leaf: laid out as what is there, if that is spread over ranks, else plain host memory."""
    if not leaf.is_tensor:
        return UNFILLED
    shape, dtype = stored.shape(leaf), stored.dtype(leaf)
    if _is_spread(present) and describe_leaf(leaf.name, present, allow_meta=True).shape == shape:
        # Of a ShardedTensor or a ShardedBox, memory of its own has no other name.
        return torch.empty_like(present, dtype=dtype) if is_dtensor(present) else present
    fresh = torch.empty(shape, dtype=dtype, device="cpu")
    return fresh.numpy() if stored.from_numpy(leaf) else fresh


def _in_classes_of(present: Any, state: Any) -> Any:
    """Rebuild containers in the classes they have in the object now: a Counter is stored as a dict."""
    if isinstance(state, dict) and isinstance(present, dict):
        items = {key: _in_classes_of(present.get(key), value) for key, value in state.items()}
        if isinstance(present, defaultdict):
            return defaultdict(present.default_factory, items)
        return Counter(items) if isinstance(present, Counter) else type(state)(items)
    if isinstance(state, (list, tuple)) and isinstance(present, (list, tuple)) and len(state) == len(present):
        values = [_in_classes_of(one, value) for one, value in zip(present, state, strict=True)]
        make: Any = getattr(type(present), "_make", type(state))
        return make(values)
    return state


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
    return isinstance(leaf, ShardedBox) or is_dtensor(leaf) or is_sharded_tensor(leaf)


def digest_of(key: str, leaf: Any, *, allow_pickle: bool) -> bytes:
    """Sum up a leaf: a plain value or a tensor; of a large tensor, samples."""
    if not is_tensor(leaf):
        return xxhash.xxh3_128_digest(encode_value(leaf, key=key, allow_pickle=allow_pickle))
    described = describe_leaf(key, leaf)
    digest = xxhash.xxh3_128(f"{described.dtype} {described.shape}".encode())
    for _, tensor in described.pieces:
        data = tensor.detach().contiguous().reshape(-1)
        if not data.numel():
            continue
        data = data.view(torch.uint8)
        if len(data) > _SAMPLES * _SAMPLE_NBYTES:
            starts = [at * (len(data) - _SAMPLE_NBYTES) // (_SAMPLES - 1) for at in range(_SAMPLES)]
            data = torch.cat([data[at : at + _SAMPLE_NBYTES] for at in starts])
        digest.update(data.cpu().numpy().data)
    return digest.digest()
