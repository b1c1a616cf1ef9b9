"""
The steps of a load on one rank: open, match, share, read, exchange, place.

Each step is one meeting of all ranks. It returns a value that the next steps take, and raises on all ranks if it failed
on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from shardkeep.dist.rendezvous import Rendezvous
from shardkeep.dist.world import World
from shardkeep.engine import match as matching
from shardkeep.engine import shared_reads
from shardkeep.engine.fill import fill
from shardkeep.engine.reader import FoundCheckpoint, Source
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

T = TypeVar("T")
State = MutableMapping[str, Any]

_encode = msgspec.msgpack.encode


class OpenedLoad(NamedTuple):
    """After `open`: which checkpoint all ranks load, and the objects in this rank's state."""

    open: Callable[[Options], Source]
    """Opens what rank 0 found in the store."""
    objects: Objects
    channel: shared_reads.Channel | None
    """Carries bytes between ranks, if all of them share their reads."""
    prepared: PreparedLoad | None
    """Prepared in a meeting of its own, if objects communicate with other ranks."""


class PreparedLoad(NamedTuple):
    """The index, the checked arguments, and what objects that ask no other rank need."""

    source: Source
    load_filter: matching.LoadFilter
    stored: StoredState | None
    templates: dict[str, Any]


class MatchedState(NamedTuple):
    """After `match`: how this rank's state and the checkpoint fit, and the plain values to put into the state."""

    opened: OpenedLoad
    source: Source
    templates: dict[str, Any]
    description: Description
    match: matching.Match
    values: dict[str, Any]
    missing: list[str]
    """On any rank."""
    unexpected: list[str]


class SharedLoad(NamedTuple):
    """After `share`: the tensors to fill, those among them that are new, and rank 0's plan of who reads what."""

    destinations: shared_reads.Destinations
    made: dict[str, Any]
    requests: list[shared_reads.SharedRequest]
    plan: bytes
    """Empty where ranks have nothing in common."""


class ReadTensors(NamedTuple):
    """After `read`: the tensors that were filled."""

    made: dict[str, Any]
    nbytes: int
    exchange: shared_reads.Exchange | None
    """What is still to be exchanged with other ranks, if reads are shared."""


@dataclass(frozen=True)
class LoadSession:
    """One rank's part of a load."""

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

    def open(self) -> OpenedLoad:
        """Find the checkpoint: rank 0 reads the commit record, so that all ranks load the same save."""
        on_rank_0: list[FoundCheckpoint] = []

        def look() -> tuple[tuple[Objects, shared_reads.Channel | None], bytes]:
            objects = Objects(self.state, rank=self.world.rank, world_size=self.world.size)
            channel, cannot_share = None, None
            if self.options.share_reads:
                found = shared_reads.open_channel(self.group, size=self.world.size, timeout_s=self.world.timeout_s)
                channel, cannot_share = (None, found) if isinstance(found, str) else (found, "")
            return (objects, channel), _encode((objects.names, objects.communicates, cannot_share))

        def decide(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(payload, type=tuple[list[str], bool, str | None]) for payload in payloads]
            check_same_objects([names for names, _, _ in said])
            on_rank_0.append(find(self.store))
            identity = identity_of(on_rank_0[0].record)
            reasons = [cannot_share for _, _, cannot_share in said]
            shares = any(reason is not None for reason in reasons) and shared_reads.all_agree(reasons)
            return [_encode((identity, any(communicates for _, communicates, _ in said), shares))] * len(payloads)

        (objects, channel), answer = self._agree("open", look, decide)
        identity, communicates, shares = msgspec.msgpack.decode(answer, type=tuple[Identity, bool, bool])
        open_found = on_rank_0[0].open if on_rank_0 else partial(open_identified, self.store, identity)
        opened = OpenedLoad(open_found, objects, channel if shares else None, None)
        if not communicates:
            return opened
        # What can fail on a single rank must come before ranks wait for each other inside their objects.
        prepared, _ = self._agree("prepare", lambda: (self._prepare(opened), b""), lambda done: done)
        return opened._replace(prepared=prepared)

    def _prepare(self, opened: OpenedLoad) -> PreparedLoad:
        """Read the index, and ask those objects for their templates that ask no other rank."""
        load_filter = self.load_filter.checked()
        source = opened.open(self.options)
        if not opened.objects:
            return PreparedLoad(source, load_filter, None, {})
        stored = StoredState(source.index, *load_filter.names(source.index), renamer(load_filter.rename))
        templates = opened.objects.templates(stored, load_filter.selects(), communicating=False)
        return PreparedLoad(source, load_filter, stored, templates)

    def match(self, opened: OpenedLoad) -> MatchedState:
        """Compare the state of every rank with the index, before anything is changed."""
        on_rank_0: list[PreparedLoad] = []

        def compare() -> tuple[MatchedState, bytes]:
            with self.phases.phase("plan"):
                prepared = opened.prepared or self._prepare(opened)
                on_rank_0.append(prepared)
                return self._compare(opened, prepared)

        def decide(payloads: list[bytes]) -> list[bytes]:
            index, load_filter = on_rank_0[0].source.index, on_rank_0[0].load_filter
            findings = [msgspec.msgpack.decode(payload, type=matching.RankFindings) for payload in payloads]
            keys = matching.merge_findings(index, findings, load_filter, strict=self.strict, where=self.store.url)
            return [_encode(keys)] * len(payloads)

        matched, answer = self._agree("match", compare, decide)
        missing, unexpected = msgspec.msgpack.decode(answer, type=tuple[list[str], list[str]])
        return matched._replace(missing=missing, unexpected=unexpected)

    def _compare(self, opened: OpenedLoad, prepared: PreparedLoad) -> tuple[MatchedState, bytes]:
        source, load_filter, stored, templates = prepared
        selected = load_filter.selects()
        if stored is not None:
            templates = opened.objects.templates(stored, selected, communicating=True)
        description = describe(self.state, rank=self.world.rank, in_place_of=templates, filling=True, selected=selected)
        match = matching.match_state(source.index, description, load_filter)
        # Values must be decoded before any tensor is changed: a value that is refused leaves the state as it was.
        values: dict[str, Any] = {}
        other_kinds: list[str] = []
        for key, row in match.values.items():
            like = description.values[key]
            data = source.index.value_data.raw(row)
            values[key] = decode_value(data, key=key, allow_pickle=self.allow_pickle, like=like)
            other_kinds += matching.compare_kinds(key, like, values[key])
        matched = MatchedState(opened, source, templates, description, match, values, [], [])
        # So does a container that cannot be changed.
        made = {key: torch.empty(0) for key in match.tensors if needs_memory(description.leaves[key])}
        self._refill(matched, values | made, dry=True)
        return matched, _encode(msgspec.structs.replace(match.findings, other_kinds=other_kinds))

    def share(self, matched: MatchedState) -> SharedLoad | None:
        """Divide what several ranks want between them; None if reads are not shared."""
        if matched.opened.channel is None:
            return None

        def offer() -> tuple[SharedLoad, bytes]:
            to, made = _find_targets(matched)
            requests = shared_reads.shared_requests(matched.source, to)
            offered = shared_reads.make_offer(requests, budget_nbytes=self.options.host_budget_bytes)
            return SharedLoad(to, made, requests, b""), offered

        shared, plan = self._agree("share", offer, lambda offers: plan_sharing(offers) or [b""] * len(offers))
        return shared._replace(plan=plan)

    def read(self, matched: MatchedState, shared: SharedLoad | None, *, place: bool) -> ReadTensors:
        """Fill every tensor, except for what other ranks read for this one."""

        def work() -> ReadTensors:
            began_s = self.phases.now()
            to, made = (shared.destinations, shared.made) if shared else _find_targets(matched)
            exchange = None
            if shared and shared.plan and matched.opened.channel:
                cuts, exchange = shared_reads.accept_plan(matched.opened.channel, shared.requests, shared.plan)
                to = shared_reads.remaining_reads(to, cuts)
            synchronize_devices(to.into)
            nbytes = fill(matched.source, *to, self.options, first_file=self.world.rank / self.world.size)
            synchronize_devices(to.into)
            # The bytes bypassed autograd, which must not take what it saved of these tensors for still valid.
            torch.autograd.graph.increment_version(to.into)
            self.phases.add("read", began_s, self.phases.now(), nbytes)
            if place:
                self._place(matched, made)
            return ReadTensors(made, nbytes, exchange)

        return self._timed("read", work)

    def exchange(self, matched: MatchedState, read: ReadTensors, *, place: bool) -> int:
        """Exchange what ranks have read for each other, once all of them have read; return the bytes received."""

        def work() -> int:
            with self.phases.phase("exchange"):
                received = read.exchange.run() if read.exchange else 0
            if place:
                self._place(matched, read.made)
            return received

        return self._timed("exchange", work)

    def place(self, matched: MatchedState, read: ReadTensors) -> None:
        """Put new leaves into the state, and give objects what is theirs, once no rank can have failed to read."""
        self._timed("place", lambda: self._place(matched, read.made))

    def _place(self, matched: MatchedState, made: dict[str, Any]) -> None:
        with self.phases.phase("place"):
            self._refill(matched, matched.values | made)
            matched.opened.objects.load({*matched.match.tensors, *matched.match.values})

    def _refill(self, matched: MatchedState, leaves: dict[str, Any], *, dry: bool = False) -> None:
        refill(
            self.state,
            leaves,
            rank=self.world.rank,
            is_tensor=is_tensor_or_object,
            in_place_of=matched.templates,
            dry=dry,
        )

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        """Run a step whose ranks send rank 0 their timings."""

        def collect(payloads: list[bytes]) -> list[bytes]:
            self.phases.collect([msgspec.msgpack.decode(payload, type=SentPhases) for payload in payloads])
            return [b""] * len(payloads)

        return self._agree(phase, lambda: (work(), _encode(self.phases.sent())), collect)[0]

    def _agree(
        self, phase: str, work: Callable[[], tuple[T, bytes]], decide: Callable[[list[bytes]], list[bytes]]
    ) -> tuple[T, bytes]:
        """Run a step on all ranks; return this rank's own result, and what rank 0 decided for it."""
        own: list[T] = []

        def run() -> bytes:
            result, payload = work()
            own.append(result)
            return payload

        answer = self.ranks.agree(phase, run, decide)
        return own[0], answer


def _find_targets(matched: MatchedState) -> tuple[shared_reads.Destinations, dict[str, Any]]:
    """Allocate memory for tensors on the meta device; return all tensors to fill, and the new ones among them."""
    tensors, present, index = matched.match.tensors, matched.description.leaves, matched.source.index
    shared: dict[tuple[Any, ...], Any] = {}
    made: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    for key, row in tensors.items():
        leaves[key] = leaf = present[key]
        if needs_memory(leaf):
            # Tensors that are tied in the checkpoint and have the same form in the state are tied again.
            form = (int(index.tensors.alias[row]), *meta_signature(leaf))
            if form not in shared:
                shared[form] = materialize(key, leaf)
            leaves[key] = made[key] = shared[form]
    description = matched.description
    if made or len(leaves) != len(present):
        description = describe_leaves(leaves, filling=True)
    # Memory that several keys share is filled once.
    rows = np.flatnonzero(description.alias[description.row_tensor] == description.row_tensor)
    row_of = np.array([tensors[key] for key in description.keys], np.int64)
    into = [description.pieces[row] for row in rows.tolist()]
    return shared_reads.Destinations(row_of[description.row_tensor[rows]], description.boxes.take(rows), into), made
