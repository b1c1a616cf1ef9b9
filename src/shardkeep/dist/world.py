"""
The ranks that take part in a call: this process alone, or the ranks of a process group.

They communicate through the key-value store that torch made when the default group was initialised, so nothing here depends
on the backend (nccl, gloo, fake): no collective is issued and no process group is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from shardkeep.errors import RanksDisagree
from shardkeep.options import setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


T = TypeVar("T")
Decide = Callable[[list[bytes]], list[bytes]]
Agree = Callable[[str, Callable[[], bytes], Decide], bytes]
"""`Rendezvous.agree`, or what does the same: runs a phase of a call on all ranks."""


def agree_and_return(agree: Agree, phase: str, work: Callable[[], tuple[T, bytes]], decide: Decide) -> tuple[T, bytes]:
    """Run a phase; return what `work` made on this rank besides its contribution, and what was decided for this rank."""
    made: list[T] = []

    def contribute() -> bytes:
        result, payload = work()
        made.append(result)
        return payload

    answer = agree(phase, contribute, decide)
    return made[0], answer


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

    @property
    def solo(self) -> bool:
        return self.size == 1

    def with_prefix(self, prefix: str) -> World:
        if self.store is None:
            return self
        from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded: there is a store

        return replace(self, store=PrefixStore(prefix, self.store))


def is_initialised() -> bool:
    # A program that has initialised a process group has imported torch.distributed; importing it here would take seconds.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def collision_hint(otherwise: str) -> str:
    """Return the hint for a process that meets another one where it saves: perhaps both are ranks of one job."""
    size = setting("WORLD_SIZE") or ""
    if is_initialised() or not size.isdecimal() or int(size) < 2:
        return otherwise
    return f"WORLD_SIZE is {size}, but there is no process group: call torch.distributed.init_process_group first"


def current_world(group: ProcessGroup | World | None = None, *, timeout_s: float) -> World:
    """Return the ranks of `group`, by default all; this process alone if torch.distributed is not initialised."""
    if isinstance(group, World):
        return group
    if not is_initialised():
        if group is not None:
            raise RanksDisagree("a process group was given, but torch.distributed is not initialised in this process")
        return World(0, 1, timeout_s=timeout_s)
    dist = sys.modules["torch.distributed"]
    if dist.get_rank(group) < 0:
        raise RanksDisagree(
            f"rank {dist.get_rank()} of the default group is not a member of the process group it was given",
            hint="call this only on the ranks of the group",
        )
    members = group if group is not None else dist.group.WORLD
    name = dist.distributed_c10d._get_process_group_name(members)
    return world_of_ranks(name, dist.get_process_group_ranks(members), timeout_s)


def world_of_ranks(name: str, ranks: Sequence[int], timeout_s: float) -> World:
    """Return the world of these ranks of the default group, this process among them."""
    from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415 - loaded: there is a process group

    if len(ranks) == 1:
        return World(0, 1, timeout_s=timeout_s)
    # torch may give one name to several disjoint groups (split_group), so the members are part of the prefix.
    digest = blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    store = c10d.PrefixStore(f"shardkeep/{name}/{digest}", c10d._get_default_store())
    return World(ranks.index(c10d.get_rank()), len(ranks), store, timeout_s)
