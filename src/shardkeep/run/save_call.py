"""
A save on this rank, step by step; the same whether its caller waits for it or not.

    describe    what this rank holds, as columns; talks to other ranks only where objects in the state differ or talk
    plan        every rank sends that, and learns what it is to write
    write       every rank writes
    commit      every rank gives its files out of its hands, and rank 0 publishes

A failure anywhere, on any rank, reaches all of them, removes what was written, and leaves whatever checkpoint was there
before as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep.codec.keys import RememberedKeys
from shardkeep.errors import CheckpointError
from shardkeep.format.record import FileEntry
from shardkeep.layout import leftovers
from shardkeep.plan.draft import encode
from shardkeep.ranks.agree import Meeting, meet
from shardkeep.ranks.world import World
from shardkeep.run.coding import Codecs, FileCoding
from shardkeep.run.coordinating import Coordinator, Outcome, discard
from shardkeep.run.deciding import differing_state
from shardkeep.run.drafting import make_draft
from shardkeep.run.orders import Orders
from shardkeep.run.phases import Phases, Sent
from shardkeep.state.describe import Description, describe
from shardkeep.state.objects.find import Objects
from shardkeep.store.giving_up import briefly
from shardkeep.store.protocol import Store


@dataclass(frozen=True)
class Label:
    """What the caller wants in the commit record."""

    step: int | None
    meta: Mapping[str, Any] | None


class _Written(msgspec.Struct, frozen=True):
    """What a rank says when it has written."""

    files: list[FileEntry]
    spans: Sent


class SaveCall:
    """One save of one rank. Used by one thread at a time."""

    def __init__(
        self,
        store: Store,
        world: World,
        label: Label,
        phases: Phases,
        *,
        overwrite: bool,
        allow_pickle: bool,
        check_replicas: bool,
        codecs: Codecs = None,
        keys: RememberedKeys | None = None,
    ) -> None:
        self.store = store
        self.world = world
        self.phases = phases
        self._label = label
        self._allow_pickle = allow_pickle
        self._check_replicas = check_replicas
        self._keys = keys
        self._coordinator = Coordinator(store, overwrite=overwrite, codecs=codecs, keys=keys)
        self._given = False
        # Known inside `made`.
        self._meeting: Meeting
        # Known after `describe`.
        self.objects: Objects
        self.description: Description
        # Known after `write`.
        self.written: list[FileEntry] = []
        self.written_s: float
        """From the call until every rank had written."""

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Make the call together with the other ranks; all steps are made inside."""
        with leftovers.claiming(self._coordinator.save_id), meet(self.world, f"save to {self.store.url}") as meeting:
            self._meeting = meeting
            try:
                yield
            except BaseException:
                # What takes long is left behind: its claim goes last, and stays for the next save to find.
                briefly(self._take_back, f"take back {self.store.url}")
                raise
            finally:  # an error that is kept has functions in its frames that know this call: not the state with it
                vars(self).pop("description", None)
                vars(self).pop("objects", None)
        if self.world.rank == 0:
            self._coordinator.tidy()

    def _take_back(self) -> None:
        """Remove what was written of a save that failed."""
        if not self._given:
            discard(self.store, [name for entry in self.written for name, _ in entry.at_rest])
        if self.world.rank == 0:
            self._coordinator.withdraw()

    def describer(self, state: Mapping[str, Any]) -> Callable[[], bytes]:
        """
        Find the objects in the state, agree on what differs between ranks, and return what describes the state.

        All that can fail on a rank alone comes before ranks wait for each other.
        """
        self.objects = _objects_of(state, self.world)
        # Where there are objects, ranks meet.
        with self.phases.phase("plan") if self.objects and self.world.size > 1 else contextlib.nullcontext():
            differing = differing_state(self.objects, self._meeting, self.world.size, allow_pickle=self._allow_pickle)
        in_place_of: dict[str, Any] = {}

        def prepare() -> bytes:
            self._coordinator.label(self._label.step, self._label.meta)
            in_place_of.update(self.objects.give(differing, communicating=False))
            return b""

        def draft() -> bytes:
            if self.objects.communicates:
                in_place_of.update(self.objects.give(differing, communicating=True))
            else:
                prepare()
            self.description = describe(state, rank=self.world.rank, in_place_of=in_place_of)
            drawn = make_draft(self.description, allow_pickle=self._allow_pickle, check_replicas=self._check_replicas)
            return encode(drawn)

        if self.objects.communicates:
            self._meeting.agree("prepare", self._timed("describe", prepare), lambda done: done)
        return self._timed("describe", draft)

    def _timed(self, phase: str, work: Callable[[], bytes]) -> Callable[[], bytes]:
        def working() -> bytes:
            with self.phases.phase(phase):
                return work()

        return working

    def plan(self, draft: Callable[[], bytes]) -> Orders:
        """Send what this rank holds, and return what it is to write."""
        began_s = 0.0

        def drafting() -> bytes:
            nonlocal began_s
            drawn = draft()
            began_s = self.phases.now()
            return drawn

        told = self._meeting.agree("plan", drafting, self._coordinator.plan)
        self.phases.add("plan", began_s, self.phases.meet())
        return msgspec.msgpack.decode(told, type=Orders)

    def coding(self, orders: Orders) -> FileCoding:
        """Open the codecs that this rank's files go through."""
        return FileCoding(orders, self._keys)

    def write(self, work: Callable[[], list[FileEntry]]) -> None:
        """Write this rank's files, and wait for the others to have written theirs."""
        began_s = ended_s = self.phases.now()

        def writing() -> bytes:
            nonlocal ended_s
            try:
                self.written.extend(work())
            finally:
                ended_s = self.phases.now()
                self.phases.add("write", began_s, ended_s, sum(entry.nbytes for entry in self.written))
            return encode(_Written(self.written, self.phases.sent()))

        def collect(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=_Written) for payload in payloads]
            self.phases.collect([each.spans for each in said])
            return self._coordinator.collect([each.files for each in said])

        self._meeting.agree("write", writing, collect)
        self.written_s = self.phases.now()
        self.phases.add("wait", ended_s, self.written_s)

    def commit(self) -> Outcome:
        """Publish the checkpoint."""
        # From here on this rank's files may be part of a committed checkpoint, and only rank 0 knows.
        self._given = True
        with self.phases.phase("commit"):
            told = self._meeting.agree("commit", bytes, self._coordinator.commit)
        return msgspec.msgpack.decode(told, type=Outcome)


def _objects_of(state: Mapping[str, Any], world: World) -> Objects:
    """Find the objects in a state; none in one that cannot be walked, which describing it says to all ranks."""
    try:
        return Objects(state, rank=world.rank, world_size=world.size)
    except CheckpointError:
        return Objects({}, rank=world.rank, world_size=world.size)
