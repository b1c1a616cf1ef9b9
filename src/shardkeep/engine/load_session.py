"""
The steps of a load on one rank: open, match, share, read, exchange, place.

Each step is one meeting of all ranks, and raises on all of them if it failed on any. What it finds, the next ones use.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from shardkeep.dist.rendezvous import Rendezvous
from shardkeep.dist.world import World
from shardkeep.engine import match as matching
from shardkeep.engine import shared_reads
from shardkeep.engine.fill import fill
from shardkeep.engine.reader import Source
from shardkeep.engine.report import Phases, SentPhases
from shardkeep.engine.sources import Identity, find, identity_of, open_identified
from shardkeep.format.values import decode_value
from shardkeep.options import Options
from shardkeep.plan.sharing import plan_sharing
from shardkeep.state.describe import Description, describe, describe_leaves
from shardkeep.state.flatten import refill
from shardkeep.state.leaves import materialize, meta_signature, needs_memory, synchronize_devices
from shardkeep.state.objects import Objects, check_same_objects, is_tensor_or_object
from shardkeep.state.patterns import renamer
from shardkeep.state.stored import StoredState
from shardkeep.storage.base import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

State = MutableMapping[str, Any]

_encode = msgspec.msgpack.encode


@dataclass
class LoadSession:
    """One rank's part of a load; the steps are called in their order."""

    state: State
    store: Store
    load_filter: matching.LoadFilter
    world: World
    ranks: Rendezvous
    phases: Phases
    options: Options
    group: ProcessGroup | World | None
    allow_pickle: bool
    strict: bool

    objects: Objects = field(init=False)
    """In this rank's state."""
    source: Source = field(init=False)
    """The checkpoint that all ranks load."""
    matched: matching.Match = field(init=False)
    """How this rank's state and the checkpoint fit."""
    missing: list[str] = field(default_factory=list)
    """On any rank."""
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_received: int = 0

    _open: Callable[[Options], Source] = field(init=False)
    """Opens what rank 0 found in the store."""
    _channel: shared_reads.Channel | None = None
    """Carries bytes between ranks, if all of them share their reads."""
    _stored: StoredState | None = None
    """What objects are given, if there are any."""
    _templates: dict[str, Any] | None = None
    """What stands in the state for objects; None until the index is read."""
    _description: Description = field(init=False)
    _values: dict[str, Any] = field(default_factory=dict)
    """Plain values to put into the state."""
    _to: shared_reads.Destinations | None = None
    """The tensors to fill."""
    _made: dict[str, Any] = field(default_factory=dict)
    """Those among them that are new."""
    _requests: list[shared_reads.SharedRequest] = field(default_factory=list)
    _share_plan: bytes = b""
    """Rank 0's plan of who reads what; empty where ranks have nothing in common."""
    _exchange: shared_reads.Exchange | None = None
    """What is still to be exchanged with other ranks."""

    def open(self) -> None:
        """Find the checkpoint: rank 0 reads the commit record, so that all ranks load the same save."""

        def look() -> bytes:
            self.objects = Objects(self.state, rank=self.world.rank, world_size=self.world.size)
            cannot_share = None
            if self.options.share_reads:
                found = shared_reads.open_channel(self.group, size=self.world.size, timeout_s=self.world.timeout_s)
                self._channel, cannot_share = (None, found) if isinstance(found, str) else (found, "")
            return _encode((self.objects.names, self.objects.communicates, cannot_share))

        def decide(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=tuple[list[str], bool, str | None]) for payload in payloads]
            check_same_objects([names for names, _, _ in said])
            found = find(self.store)
            self._open = found.open
            reasons = [cannot_share for _, _, cannot_share in said]
            shares = any(reason is not None for reason in reasons) and shared_reads.all_agree(reasons)
            communicates = any(communicates for _, communicates, _ in said)
            return [_encode((identity_of(found.record), communicates, shares))] * len(payloads)

        answer = self.ranks.agree("open", look, decide)
        identity, communicates, shares = msgspec.msgpack.decode(answer, type=tuple[Identity, bool, bool])
        if self.world.rank:
            self._open = partial(open_identified, self.store, identity)
        if not shares:
            self._channel = None
        if communicates:
            # What can fail on a single rank must come before ranks wait for each other inside their objects.
            self.ranks.agree("prepare", self._prepare, lambda done: done)

    def _prepare(self) -> bytes:
        """Read the index, check the arguments, and ask those objects for their templates that ask no other rank."""
        wishes = self.load_filter = self.load_filter.checked()
        self.source = self._open(self.options)
        self._templates = {}
        if self.objects:
            self._stored = StoredState(self.source.index, *wishes.names(self.source.index), renamer(wishes.rename))
            self._templates = self.objects.templates(self._stored, wishes.selects(), communicating=False)
        return b""

    def match(self) -> None:
        """Compare the state of every rank with the index, before anything is changed."""

        def compare() -> bytes:
            with self.phases.phase("plan"):
                if self._templates is None:
                    self._prepare()
                return self._compare()

        def decide(payloads: list[bytes]) -> list[bytes]:
            findings = [msgspec.msgpack.decode(payload, type=matching.RankFindings) for payload in payloads]
            keys = matching.merge_findings(
                self.source.index, findings, self.load_filter, strict=self.strict, where=self.store.url
            )
            return [_encode(keys)] * len(payloads)

        answer = self.ranks.agree("match", compare, decide)
        self.missing, self.unexpected = msgspec.msgpack.decode(answer, type=tuple[list[str], list[str]])

    def _compare(self) -> bytes:
        index, selected = self.source.index, self.load_filter.selects()
        if self._stored is not None:
            self._templates = self.objects.templates(self._stored, selected, communicating=True)
        self._description = description = describe(
            self.state, rank=self.world.rank, in_place_of=self._templates, filling=True, selected=selected
        )
        self.matched = matching.match_state(index, description, self.load_filter)
        # Values must be decoded before any tensor is changed: a value that is refused leaves the state as it was.
        other_kinds: list[str] = []
        for key, row in self.matched.values.items():
            like, data = description.values[key], index.value_data.raw(row)
            self._values[key] = decode_value(data, key=key, allow_pickle=self.allow_pickle, like=like)
            other_kinds += matching.compare_kinds(key, like, self._values[key])
        # So does a container that cannot be changed.
        made = {key: torch.empty(0) for key in self.matched.tensors if needs_memory(description.leaves[key])}
        self._refill(self._values | made, dry=True)
        return _encode(msgspec.structs.replace(self.matched.findings, other_kinds=other_kinds))

    def share(self) -> bool:
        """Divide what several ranks want between them; return whether they have something to exchange."""
        if self._channel is None:
            return False

        def offer() -> bytes:
            self._requests = shared_reads.shared_requests(self.source, self._find_targets())
            return shared_reads.make_offer(self._requests, budget_nbytes=self.options.host_budget_bytes)

        self._share_plan = self.ranks.agree("share", offer, lambda said: plan_sharing(said) or [b""] * len(said))
        return bool(self._share_plan)

    def read(self, *, place: bool) -> None:
        """Fill every tensor, except for what other ranks read for this one."""

        def work() -> None:
            began_s = self.phases.now()
            to = self._to or self._find_targets()
            if self._share_plan and self._channel:
                cuts, self._exchange = shared_reads.accept_plan(self._channel, self._requests, self._share_plan)
                to = shared_reads.remaining_reads(to, cuts)
            synchronize_devices(to.into)
            self.bytes_read = fill(self.source, *to, self.options, first_file=self.world.rank / self.world.size)
            synchronize_devices(to.into)
            # The bytes bypassed autograd, which must not take what it saved of these tensors for still valid.
            torch.autograd.graph.increment_version(to.into)
            self.phases.add("read", began_s, self.phases.now(), self.bytes_read)
            if place:
                self._place()

        self._timed("read", work)

    def exchange(self, *, place: bool) -> None:
        """Exchange what ranks have read for each other, once all of them have read."""

        def work() -> None:
            with self.phases.phase("exchange"):
                self.bytes_received = self._exchange.run() if self._exchange else 0
            if place:
                self._place()

        self._timed("exchange", work)

    def place(self) -> None:
        """Put new leaves into the state, and give objects what is theirs, once no rank can have failed to read."""
        self._timed("place", self._place)

    def _place(self) -> None:
        with self.phases.phase("place"):
            self._refill(self._values | self._made)
            self.objects.load({*self.matched.tensors, *self.matched.values})

    def _refill(self, leaves: dict[str, Any], *, dry: bool = False) -> None:
        refill(
            self.state,
            leaves,
            rank=self.world.rank,
            is_tensor=is_tensor_or_object,
            in_place_of=self._templates or {},
            dry=dry,
        )

    def _timed(self, phase: str, work: Callable[[], None]) -> None:
        """Run a step whose ranks send rank 0 their timings."""

        def run() -> bytes:
            work()
            return _encode(self.phases.sent())

        def collect(payloads: list[bytes]) -> list[bytes]:
            self.phases.collect([msgspec.msgpack.decode(payload, type=SentPhases) for payload in payloads])
            return [b""] * len(payloads)

        self.ranks.agree(phase, run, collect)

    def _find_targets(self) -> shared_reads.Destinations:
        """Allocate memory for tensors on the meta device, and return all tensors to fill."""
        description, index = self._description, self.source.index
        shared: dict[tuple[Any, ...], Any] = {}
        leaves: dict[str, Any] = {}
        for key, row in self.matched.tensors.items():
            leaves[key] = leaf = description.leaves[key]
            if needs_memory(leaf):
                # Tensors that are tied in the checkpoint and have the same form in the state are tied again.
                form = (int(index.tensors.alias[row]), *meta_signature(leaf))
                if form not in shared:
                    shared[form] = materialize(key, leaf)
                leaves[key] = self._made[key] = shared[form]
        if self._made or len(leaves) != len(description.leaves):
            description = describe_leaves(leaves, filling=True)
        # Memory that several keys share is filled once.
        rows = np.flatnonzero(description.alias[description.row_tensor] == description.row_tensor)
        row_of = np.array([self.matched.tensors[key] for key in description.keys], np.int64)
        into = [description.pieces[row] for row in rows.tolist()]
        self._to = shared_reads.Destinations(row_of[description.row_tensor[rows]], description.boxes.take(rows), into)
        return self._to
