"""
The ranks that take part in a call: this process alone, or the ranks of a process group.

A `World` says which rank this is, how many there are, and through which key-value store they communicate. It is the store that
torch made when the default group was initialised, so nothing here depends on the backend (nccl, gloo, fake): no collective
is issued and no process group is built.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from shardkeep.errors import RanksDisagree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class World:
    """The ranks that make a call together. `World(0, 1)` is a process on its own."""

    rank: int
    size: int
    store: Store | None = None
    """The key-value store the ranks communicate through, with keys of their own. None for a single rank."""
    timeout_s: float = 0.0
    """How long rank 0 waits for the others once its own part is done; they wait twice as long for it."""
    alone_s: float = 0.0
    """How much longer they wait for it while it does work that they do not have."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not within a world of {self.size}")
        if self.size > 1 and self.store is None:
            raise ValueError(f"a world of {self.size} ranks needs a store to talk through")

    @property
    def solo(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == 1

    def with_prefix(self, prefix: str) -> World:
        """Return the same ranks with keys of their own in the key-value store."""
        if self.store is None:
            return self
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded: there is a store

        return replace(self, store=PrefixStore(prefix, self.store))


def current_world(group: ProcessGroup | World | None = None, *, timeout_s: float) -> World:
    """
    Find the ranks this process belongs to.

    Args:
        group: The ranks that take part; None for all ranks, or for this process alone where torch.distributed has
            not been initialised. A `World` that the caller made is taken as it is.
        timeout_s: How long rank 0 waits for the others once its own part is done.

    Raises:
        RanksDisagree: this process is not a member of `group`.

    """
    if isinstance(group, World):
        return group
    # A program that has initialised a process group has imported torch.distributed; importing it here would take seconds.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise RanksDisagree("a process group was given, but torch.distributed is not initialised in this process")
        return World(0, 1, timeout_s=timeout_s)
    return _world_of(group, timeout_s)


def _world_of(group: ProcessGroup | None, timeout_s: float) -> World:
    import torch.distributed as dist  # noqa: PLC0415 - already imported, or we would not be here
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

    rank = dist.get_rank(group)
    if rank < 0:
        raise RanksDisagree(
            f"rank {dist.get_rank()} of the default group is not a member of the process group it was given",
            hint="call this only on the ranks of the group",
        )
    size = dist.get_world_size(group)
    if size == 1:
        return World(0, 1, timeout_s=timeout_s)
    members = group if group is not None else c10d._get_default_group()
    ranks = dist.get_process_group_ranks(members)
    # torch may give one name to several disjoint groups (split_group), so the members are part of the prefix.
    digest = blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    prefix = f"shardkeep/{c10d._get_process_group_name(members)}/{digest}"
    return World(rank, size, c10d.PrefixStore(prefix, c10d._get_default_store()), timeout_s)
