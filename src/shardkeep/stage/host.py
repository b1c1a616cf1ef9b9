"""
Host memory for snapshots: pinned or shared where that was asked for, and used again once nobody holds it.

Sizes go in; storages come out, each piece with its place. A storage is free again when the last tensor over it is
gone, so that a snapshot which is still being written is never overwritten by the next one. Pinning and sharing cost
by the piece (a call into the driver, a file descriptor), so there many pieces lie in one storage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from shardkeep.state.toolkit.offload import PinningRefused, _register

log = logging.getLogger("shardkeep")

_ALIGNMENT: Final = 64
_SLABS: Final = 128
"""About how many storages a snapshot is spread over, where many pieces lie in one."""
_LEAST_SLAB_BYTES: Final = 8 << 20
_KEPT_FOR: Final = 2
"""A storage that so many snapshots in a row had no use for is given back."""


@dataclass(frozen=True)
class Place:
    """Where a piece lies in host memory."""

    storage: torch.UntypedStorage
    offset: int


class HostMemory:
    """Storages in host memory. May be used by several threads."""

    def __init__(self, *, pinned: bool = False, shared: bool = False, pinned_from: int = 0) -> None:
        self._pinned = pinned
        self._shared = shared
        self._pinned_from = pinned_from
        self._kept: dict[int, list[_Kept]] = {}
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> list[Place]:
        """Find memory for pieces of these sizes, whose values are undefined."""
        slabs = _pack(sizes) if self._pinned or self._shared else [[index] for index in range(len(sizes))]
        places: dict[int, Place] = {}
        with self._lock:
            self._taken += 1
            for slab in slabs:
                offsets, end = _offsets([sizes[index] for index in slab])
                storage = self._storage(end)
                places |= {index: Place(storage, at) for index, at in zip(slab, offsets, strict=True)}
            self._drop_unused()
        return [places[index] for index in range(len(sizes))]

    def release(self) -> None:
        """Give all memory back; what tensors still hold is freed with them."""
        with self._lock:
            self._kept.clear()

    @property
    def kept_bytes(self) -> int:
        """How much memory is held, in use or waiting for the next snapshot."""
        with self._lock:
            return sum(size * len(kept) for size, kept in self._kept.items())

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        kept = self._kept.setdefault(nbytes, [])
        for each in kept:
            if each.used_in != self._taken and each.free():
                break
        else:
            each = _Kept(self._new(nbytes))
            kept.append(each)
        each.used_in = self._taken
        return each.storage

    def _drop_unused(self) -> None:
        oldest = self._taken - _KEPT_FOR
        for size, kept in list(self._kept.items()):
            self._kept[size] = [each for each in kept if each.used_in >= oldest]
            if not self._kept[size]:
                del self._kept[size]

    def _new(self, nbytes: int) -> torch.UntypedStorage:
        pinned = self._pinned and nbytes >= max(1, self._pinned_from)
        if pinned and not self._shared and not torch.cuda.is_available():
            # Only CUDA can pin memory that exists already; others have their own allocator.
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).untyped_storage()
        make: Any = torch.UntypedStorage._new_shared if self._shared else torch.UntypedStorage
        storage: torch.UntypedStorage = make(nbytes)
        if pinned:
            self._pin(storage)
        return storage

    def _pin(self, storage: torch.UntypedStorage) -> None:
        try:
            _register(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        except PinningRefused as refused:
            # Pinned memory is faster and nothing else: a save must not fail for it.
            self._pinned = False
            log.warning("staging goes on without pinned memory: %s", refused)


class _Kept:
    """A storage, and the last snapshot it was used in."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.used_in = 0

    def free(self) -> bool:
        """Say whether no tensor is over it: the one reference to it is ours."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) == 1


def _pack(sizes: Sequence[int]) -> list[list[int]]:
    """Put pieces together until there are not many storages; large ones stay alone."""
    slab_bytes = max(_LEAST_SLAB_BYTES, sum(sizes) // _SLABS)
    slabs: list[list[int]] = []
    filling: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size >= slab_bytes // 4:
            slabs.append([index])
            continue
        if filled + size > slab_bytes:
            slabs.append(filling)
            filling, filled = [], 0
        filling.append(index)
        filled += size
    return [*slabs, filling] if filling else slabs


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + size
    return offsets, end
