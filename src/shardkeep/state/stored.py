"""
Stored state below a name, and the objects that get all of it: `StatefulObject` and `RNG`.

`StoredState` shows the leaves of a checkpoint under the names that a load's `rename` gives them, in the nesting in which
they were saved. An object with `state_dict` and `load_state_dict` (a scheduler, a data loader, a user's class) gets back
exactly what its `state_dict` returned, whatever it holds by now. State that differs between ranks is stored per rank.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from shardkeep.display import format_count
from shardkeep.errors import ReplicasDiffer, StateMismatch, UnsupportedLeaf
from shardkeep.format.dtypes import to_torch
from shardkeep.format.index import Index
from shardkeep.format.values import KeyPath, Part, decode_tree, decode_value, encode_value, part_name, tree_leaves
from shardkeep.state.flatten import flatten, is_per_rank_name, map_leaves
from shardkeep.state.leaves import (
    EveryRank,
    PerRank,
    ShardedBox,
    TreePath,
    describe_leaf,
    is_dtensor,
    is_sharded_tensor,
    is_tensor,
)

Selected = Callable[[str], bool]
_SAMPLES = 16
_SAMPLE_NBYTES = 64 << 10
"""Of tensors above 1 MiB, 16 samples of this size are compared, evenly spaced; hashing a model would take seconds."""


UNFILLED: Final = object()
"""Stands where a stored value will be put."""


class Template(NamedTuple):
    state: Any
    """Containers with memory for tensors and `UNFILLED` for values; `UNFILLED` if the checkpoint has nothing."""
    load: Callable[[Any], None]
    """Gives the object the part of `state` that was filled."""


NOTHING_STORED: Final = Template(UNFILLED, lambda _: None)

_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": dict,
    "odict": OrderedDict,
    "list": list,
    "tuple": tuple,
    "ranks": lambda values: EveryRank(dict(values)),
}


@dataclass(frozen=True)
class StoredLeaf:
    name: str
    path: KeyPath
    row: int
    """Of its tensor, or of its value."""
    is_tensor: bool
    order: int
    empty: str = ""
    """The kind of an empty container, which is stored as a leaf."""


class StoredState:
    def __init__(
        self, index: Index, names: tuple[Mapping[str, int], Mapping[str, int]], rename: Callable[[str], str | None]
    ) -> None:
        self.index = index
        self.renamed = rename
        tensors, values = ({row: name for name, row in rows.items()} for rows in names)
        found = []
        for order, (former, path, empty) in enumerate(tree_leaves(decode_tree(index.tree))):
            row = index.tensor_rows.get(former)
            is_tensor = row is not None
            row = index.value_rows.get(former, -1) if row is None else row
            name = former if empty else (tensors if is_tensor else values).get(row)
            if name is not None:
                found.append(StoredLeaf(name, path, row, is_tensor, order, empty))
        self._leaves = sorted(found, key=lambda leaf: leaf.name)
        self._names = [leaf.name for leaf in self._leaves]

    def below(self, name: str) -> list[StoredLeaf]:
        """Return the leaves whose names begin with `name` and a dot, in the order in which they were saved."""
        first = bisect_left(self._names, f"{name}.")
        # "/" follows "." in ASCII, so every name with the prefix sorts before this.
        last = bisect_left(self._names, f"{name}/", lo=first)
        return sorted(self._leaves[first:last], key=lambda leaf: leaf.order)

    def find(self, name: str) -> StoredLeaf | None:
        at = bisect_left(self._names, name)
        return self._leaves[at] if at < len(self._names) and self._names[at] == name else None

    def has(self, name: str) -> bool:
        return self.find(name) is not None or _any_below(self._names, name)

    @cached_property
    def _former_names(self) -> list[str]:
        return sorted([*self.index.tensor_rows, *self.index.value_rows])

    def was(self, name: str) -> bool:
        """Return True if the checkpoint has anything below this name, before the load renames or drops it."""
        return _any_below(self._former_names, name)

    def shape(self, leaf: StoredLeaf) -> tuple[int, ...]:
        return self.index.shape(leaf.row)

    def dtype(self, leaf: StoredLeaf) -> torch.dtype:
        return to_torch(self.index.dtype(leaf.row))

    def value(self, leaf: StoredLeaf) -> Any:
        """Decode a plain value that decides how the rest is loaded."""
        return decode_value(self.index.value_data.raw(leaf.row), key=leaf.name)

    def nest(self, name: str, make: Callable[[StoredLeaf], Any]) -> Any:
        """Rebuild the containers below a name, calling `make` for each leaf; per-rank state becomes an `EveryRank`."""

        def value_of(leaf: StoredLeaf) -> Any:
            return _CONTAINERS[leaf.empty]([]) if leaf.empty else make(leaf)

        own = self.find(name)
        if own is not None:
            return value_of(own)
        return build_containers([(_tail(leaf, f"{name}."), value_of(leaf)) for leaf in self.below(name)])


def _any_below(names: list[str], name: str) -> bool:
    at = bisect_left(names, f"{name}.")
    return at < len(names) and names[at].startswith(f"{name}.")


def build_containers(leaves: list[tuple[KeyPath, Any]], depth: int = 0) -> Any:
    """Build containers from the paths of their leaves, which are in order."""
    kind = leaves[0][0][depth][0]
    groups: dict[Part, list[tuple[KeyPath, Any]]] = {}
    for path, leaf in leaves:
        groups.setdefault(path[depth][1], []).append((path, leaf))
    made = {
        part: group[0][1] if len(group[0][0]) == depth + 1 else build_containers(group, depth + 1)
        for part, group in groups.items()
    }
    if kind in ("list", "tuple"):
        return _CONTAINERS[kind](made[at] for at in sorted(made))
    return _CONTAINERS[kind](made)


def _tail(leaf: StoredLeaf, prefix: str) -> KeyPath:
    """Return the last steps of a leaf's path, those that spell its name behind the prefix."""
    rest = leaf.name[len(prefix) :]
    for count in range(1, len(leaf.path) + 1):
        if ".".join(part_name(kind, part) for kind, part in leaf.path[-count:]) == rest:
            return leaf.path[-count:]
    return (("dict", rest),)  # renamed in the middle of a key


def allocate_leaf(stored: StoredState, leaf: StoredLeaf, present: Any = None) -> Any:
    """Return memory for a stored leaf: laid out like `present` if that is sharded, else plain host memory."""
    if not leaf.is_tensor:
        return UNFILLED
    shape, dtype = stored.shape(leaf), stored.dtype(leaf)
    if is_sharded_leaf(present) and describe_leaf(leaf.name, present, allow_meta=True).shape == shape:
        # There is no simple way to make new memory for a ShardedTensor or a ShardedBox.
        return torch.empty_like(present, dtype=dtype) if is_dtensor(present) else present
    fresh = torch.empty(shape, dtype=dtype, device="cpu")
    return fresh.numpy() if stored.index.tensors.origin[leaf.row] else fresh


def is_sharded_leaf(leaf: Any) -> bool:
    return isinstance(leaf, ShardedBox) or is_dtensor(leaf) or is_sharded_tensor(leaf)


def digest_of(key: str, leaf: Any, *, allow_pickle: bool) -> bytes:
    """Return a digest of a leaf, a plain value or a tensor; of a large tensor, samples are hashed."""
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


class Adapter:
    name: str
    communicates = False
    """Whether its methods communicate with other ranks, which must then all call them."""

    def digests(self, *, allow_pickle: bool) -> dict[str, bytes]:  # noqa: ARG002
        """Return, by name, digests of state that may be shared or per rank, which only a comparison of ranks can tell."""
        return {}

    def state(self, differing: Collection[str]) -> Any:
        """Return the state to save: a mapping, or a `PerRank` of one; of the digests, `differing` are per rank."""
        raise NotImplementedError

    def template(self, stored: StoredState, selected: Selected) -> Template:
        raise NotImplementedError


class StatefulObject(Adapter):
    def __init__(self, name: str, target: Any, *, rank: int, world_size: int) -> None:
        self.name = name
        self._target = target
        self._rank = rank
        self._world_size = world_size
        self._in_per_rank = is_per_rank_name(name, rank)
        # An object that can load all ranks' states must get all ranks' states.
        self._per_rank = getattr(type(target), "__per_rank__", False) or hasattr(target, "load_rank_states")

    @cached_property
    def _state(self) -> Mapping[Any, Any]:
        """The object's state; read once, because it may be costly to make, or different the next time."""
        return _state_of(self.name, self._target)

    def digests(self, *, allow_pickle: bool) -> dict[str, bytes]:
        """Return a digest of a state that may differ between ranks; of one that is partly sharded, a digest for each leaf."""
        if self._per_rank or self._in_per_rank:
            return {}
        leaves = flatten(self._state, rank=self._rank, is_tensor=is_tensor).by_name()
        own = {
            f"{self.name}.{key}": digest_of(f"{self.name}.{key}", leaf, allow_pickle=allow_pickle)
            for key, leaf in sorted(leaves.items())
            if not is_sharded_leaf(leaf) and not is_per_rank_name(key, self._rank)
        }
        if any(is_sharded_leaf(leaf) for leaf in leaves.values()):
            return own
        joined = b"".join(key.encode() + b"\0" + one for key, one in own.items())
        return {self.name: xxhash.xxh3_128_digest(joined)}

    def state(self, differing: Collection[str]) -> Any:
        if inside := [name for name in differing if name.startswith(f"{self.name}.")]:
            raise ReplicasDiffer(
                f"{inside[0]!r} is not the same on all ranks, in an object that has sharded tensors too",
                hint="let state_dict() wrap what differs by rank in sk.PerRank",
                key=inside[0],
            )
        alone = (self._per_rank or self.name in differing) and not self._in_per_rank
        return PerRank(self._state) if alone else self._state

    def template(self, stored: StoredState, selected: Selected) -> Template:  # noqa: ARG002 - all of it, or nothing
        leaf = stored.find(self.name)
        if leaf is not None and not leaf.empty:
            raise StateMismatch(
                f"{self.name!r} is a {type(self._target).__qualname__} in the state, and a single value in the checkpoint",
                hint="load the value under another name, or exclude it",
                key=self.name,
            )
        # Only for the layout of tensors and the classes of containers; its values are never touched.
        present: Mapping[Any, Any] = {}
        with suppress(Exception):
            present = _state_of(self.name, self._target)
        leaves = flatten(present, rank=self._rank, is_tensor=is_tensor).by_name()
        behind = len(self.name) + 1
        saved = stored.nest(self.name, lambda leaf: allocate_leaf(stored, leaf, leaves.get(leaf.name[behind:])))
        other_world = isinstance(saved, EveryRank) and set(saved.values) != set(range(self._world_size))
        all_ranks = other_world and hasattr(self._target, "load_rank_states")
        state = saved if all_ranks else map_leaves(saved, self._own_part, keep_ordered=True)
        return Template(state, partial(self._load, present))

    def _own_part(self, path: TreePath, leaf: Any) -> Any:
        if not isinstance(leaf, EveryRank):
            return leaf
        if set(leaf.values) != set(range(self._world_size)):
            name = ".".join([self.name, *map(str, path)])
            raise StateMismatch(
                f"{name!r} was saved per rank by {format_count(len(leaf.values), 'rank')}; this is rank {self._rank} of {self._world_size}",
                hint=f"give {type(self._target).__qualname__} a method load_rank_states(states, rank, world_size) that"
                f" decides what this rank takes, or exclude={self.name!r}",
                key=name,
            )
        return PerRank(leaf.values[self._rank])

    def _load(self, present: Any, state: Any) -> None:
        if isinstance(state, EveryRank):
            self._target.load_rank_states(state.values, self._rank, self._world_size)
            return
        own = state.value if isinstance(state, PerRank) and not self._in_per_rank else state
        self._target.load_state_dict(_in_classes_of(present, own))


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


class RNG:
    """
    The random number generators of Python, NumPy, torch, and this process's accelerator, saved per rank.

    Put one into the state, under a name of your choice: ``{"model": model, "rng": sk.RNG()}``. Each rank gets back what
    the same rank number saved. On more ranks than saved, the new ranks are seeded from rank 0's state and their own
    number: the same on every resume, and different from each other. On fewer ranks, the surplus states are dropped.
    """

    __per_rank__ = True

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what scripts use
        state = {
            "python": {"version": version, "words": np.array(words, np.int64), "gauss": gauss},
            "numpy": {
                "kind": legacy["bit_generator"],
                "words": legacy["state"]["key"].copy(),
                "position": legacy["state"]["pos"],
                "has_gauss": legacy["has_gauss"],
                "gauss": legacy["gauss"],
            },
            "torch": torch.get_rng_state(),
        }
        if (device := _accelerator()) is not None:
            state["accelerator"] = device.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set every generator; an accelerator's only if there was one, and is one now."""
        python, numpy = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(np.asarray(python["words"]).tolist()), python["gauss"]))
        np.random.set_state(  # noqa: NPY002
            (numpy["kind"], np.asarray(numpy["words"]), numpy["position"], numpy["has_gauss"], numpy["gauss"])
        )
        torch.set_rng_state(torch.as_tensor(state["torch"]))
        device = _accelerator()
        if device is not None and "accelerator" in state:
            device.set_rng_state(torch.as_tensor(state["accelerator"]))

    def load_rank_states(self, states: Mapping[int, Mapping[str, Any]], rank: int, world_size: int) -> None:  # noqa: ARG002
        """Load this rank's own state, or seed the generators if this rank did not exist when it was saved."""
        if rank in states:
            self.load_state_dict(states[rank])
            return
        if not states:
            raise StateMismatch("the checkpoint holds no generator's state", hint="exclude the RNG from this load")
        first = torch.as_tensor(states[min(states)]["torch"]).numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(first + rank.to_bytes(8, "little")).digest()[:8], "little")
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002
        torch.manual_seed(seed % (1 << 63))


def _accelerator() -> Any:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)
