"""
Work that the ranks of a world share: all know the whole of it, each does its part, and rank 0 does what only one may.

A process alone is a team of one. Every step is a phase of one rendezvous, so a failure on any rank is raised on all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardkeep.dist.rendezvous import Rendezvous, rendezvous
from shardkeep.dist.world import World, agree_and_return, current_world
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointExists, RanksDisagree, RanksSilent, WrongSize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    world: World
    meeting: Rendezvous

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    def alike(self, phase: str, work: Callable[[], T], described: Callable[[T], object]) -> T:
        """Do the same on every rank; `RanksDisagree` if what it made is not described alike on all."""
        if self.world.solo:
            return work()

        def describe() -> tuple[T, bytes]:
            made = work()
            return made, blake2b(repr(described(made)).encode("utf-8", "backslashreplace")).digest()

        def compare(digests: list[bytes]) -> list[bytes]:
            odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
            if odd is not None:
                raise RanksDisagree(
                    f"rank {odd} was given other arguments than rank 0, or sees another checkpoint",
                    hint="give all ranks the same arguments, and places that all of them see",
                )
            return digests

        return agree_and_return(self.meeting.agree, phase, describe, compare)[0]

    def on_rank_0(self, phase: str, work: Callable[[], T], kind: type[T]) -> T:
        """Do something on rank 0 only, once all ranks are there; return the result, which is plain data, on all of them."""

        def decide(_: list[bytes]) -> list[bytes]:
            return [msgspec.msgpack.encode(work())] * self.world.size

        return msgspec.msgpack.decode(self.meeting.agree(phase, bytes, decide), type=kind)

    def gather(self, phase: str, work: Callable[[], T], kind: type[T]) -> list[T]:
        """Do something on every rank; return, on rank 0, the results of all, which are plain data."""
        found: list[T] = []

        def decide(payloads: list[bytes]) -> list[bytes]:
            found.extend(msgspec.msgpack.decode(payload, type=kind) for payload in payloads)
            return [b""] * self.world.size

        self.meeting.agree(phase, lambda: msgspec.msgpack.encode(work()), decide)
        return found

    def has_ended(self, error: BaseException) -> bool:
        """Whether no rank does anything any more after this error: all have met, or there is no other."""
        return self.world.solo or (isinstance(error, CheckpointError) and not isinstance(error, RanksSilent))

    def share(self, tasks: Sequence[T], nbytes: Callable[[T], int]) -> list[T]:
        """Return the tasks of this rank: the largest are given away first, each to the rank with least to do."""
        loads, mine = [(0, rank) for rank in range(self.world.size)], set[int]()
        for number in sorted(range(len(tasks)), key=lambda number: -nbytes(tasks[number])):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + nbytes(tasks[number]), rank))
            if rank == self.world.rank:
                mine.add(number)
        return [task for number, task in enumerate(tasks) if number in mine]


SLOWEST_BYTES_PER_S = 50 << 20
"""A rank that moves at least this many bytes does not time out, however much it has to do."""


@contextmanager
def team_of(group: ProcessGroup | World | None, title: str, *, timeout_s: float, nbytes: int = 0) -> Iterator[Team]:
    """
    Begin some work on `nbytes` that all ranks of a group share, and end it together, as in `rendezvous`.

    Without a group this process works alone, even if there is a default group: the others may not make this call.
    """
    world = World(0, 1) if group is None else current_world(group, timeout_s=timeout_s)
    world = replace(world, timeout_s=world.timeout_s + nbytes / SLOWEST_BYTES_PER_S)
    try:
        with rendezvous(world, title) as meeting:
            yield Team(world, meeting)
    except (CheckpointExists, BlobNotFound, WrongSize) as error:  # as of ranks that write to one place, each for itself
        if group is None and current_world(timeout_s=0.0).size > 1:
            share = "if all ranks make this call, pass group=torch.distributed.group.WORLD, and they share the work"
            error.hint = f"{error.hint}; {share}" if error.hint else share
        raise
