"""The ranks of a job, as a Checkpointer sees them: found when first needed, and sure to be of one mind."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from shardkeep.errors import RanksDisagree
from shardkeep.manage.agreement import Agreement
from shardkeep.manage.seams import Seams
from shardkeep.ranks.agree import meet
from shardkeep.ranks.world import World, current_world
from shardkeep.store.roots import Root

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Job:
    """What one rank knows of its job."""

    def __init__(
        self,
        root: Root,
        seams: Seams,
        *,
        group: ProcessGroup | World | None,
        timeout_s: float,
        talks: bool,
        told: list[Any],
    ) -> None:
        """
        Talk to nobody yet.

        Args:
            root: where it saves.
            seams: clocks.
            group: the ranks.
            timeout_s: how long they wait for each other.
            talks: whether there is anything to agree on but by the number of a step.
            told: what the Checkpointer was told, which must be the same on all ranks.

        """
        self.talks = talks
        self._root = root
        self._seams = seams
        self._group = group
        self._timeout_s = timeout_s
        self._told = told
        self._world: World | None = None
        self._agreement: Agreement | None = None

    @property
    def world(self) -> World:
        """The ranks, which meet apart from those that save or load."""
        if self._world is None:
            world = current_world(self._group, timeout_s=self._timeout_s)
            if world.store is not None:
                from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loaded: there is a store

                world = replace(world, store=PrefixStore("checkpointers", world.store))
            self._world = world
        return self._world

    @property
    def agreement(self) -> Agreement:
        """
        What is decided at some steps; asked for by all ranks at the same time, at first.

        Raises:
            RanksDisagree: their Checkpointers were told different things.

        """
        if self._agreement is None:
            session = ""
            if not self.world.solo:
                with meet(self.world, f"steps of {self._root.url}") as meeting:
                    mine = msgspec.json.encode(self._told)
                    session = meeting.agree("begin", lambda: mine, self._same).decode()
            seams = self._seams
            self._agreement = Agreement(self.world, session, interval_s=seams.interval_s, clock=seams.clock)
        return self._agreement

    @staticmethod
    def _same(told: list[bytes]) -> list[bytes]:
        for rank, each in enumerate(told):
            if each != told[0]:
                raise RanksDisagree(
                    f"the Checkpointer of rank {rank} was made with {each.decode()}, that of rank 0 with {told[0].decode()}",
                    hint="make it with the same arguments on all ranks",
                )
        return [secrets.token_hex(8).encode()] * len(told)
