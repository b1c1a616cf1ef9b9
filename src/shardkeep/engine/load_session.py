"""
The steps of a load on one rank: open, match, read, place. Each is one meeting of all ranks, and fails on all or on
none.

The target says what is filled: a state of `sk.load` (`engine.match`), or a flat state dict of `dcp.load`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from shardkeep.dist.world import Agree, World, agree_and_return
from shardkeep.engine.fill import fill
from shardkeep.engine.peers import Peers, make_teams, peers_of
from shardkeep.engine.reader import FoundCheckpoint, Source
from shardkeep.engine.report import LOAD_WORK, CommonMoment, LoadReport, Phases, SentPhases, find_slowest, unlogged
from shardkeep.engine.sources import Identity, find, identity_of, open_identified
from shardkeep.events import RankPhases
from shardkeep.format.boxes import Boxes, IntArray
from shardkeep.options import Options, local_ranks
from shardkeep.plan.load_plan import tensor_nbytes
from shardkeep.state.describe import Description, describe_leaves
from shardkeep.state.leaves import materialize, meta_signature, needs_memory, synchronize_devices
from shardkeep.storage.base import Store, is_remote, prefetches

T = TypeVar("T")
_encode = msgspec.msgpack.encode


class MatchedState(NamedTuple):
    """After `match`: how this rank's state and the checkpoint fit."""

    source: Source
    description: Description
    tensors: dict[str, int]
    """The tensors to fill: the row in the index of each, by its key in the state."""
    found: Any
    """What the target keeps for `place`."""
    answer: bytes = b""


class LoadTarget(Protocol):
    """The state that a load fills. A target that derives from this need not have the steps that have a body here."""

    def begin(self) -> tuple[list[str], bool]:
        """Return the names of its objects, which must be the same on all ranks, and whether they communicate."""

    def check_begun(self, names: list[list[str]]) -> None:  # noqa: ARG002 - for targets
        """On rank 0: check that these names fit together."""
        return

    def prepare(self, source: Source) -> Any:
        """Do what can fail on this rank alone, before objects communicate."""

    def compare(self, source: Source, prepared: Any) -> tuple[MatchedState, bytes]:
        """Compare the state with the index; nothing is changed. Also return what rank 0 gets of it."""

    def decide(self, source: Source, found: list[bytes]) -> bytes:  # noqa: ARG002 - for targets
        """On rank 0: judge what all ranks found; return the answer to all of them."""
        return b""

    def place(self, matched: MatchedState, made: dict[str, Any]) -> None:
        """Put new tensors and values into the state."""


class OpenedLoad(NamedTuple):
    """After `open`: which checkpoint all ranks load."""

    open: Callable[[Options], Source]
    """Opens what rank 0 found in the store."""
    has_objects: bool
    peers: Peers | None
    prepared: tuple[Source, Any] | None
    """Prepared in a meeting of its own, if objects communicate with other ranks."""


Destinations = tuple[IntArray, Boxes, list[torch.Tensor]]
"""Tensors to fill, and before them for each one: the row of a tensor in the index, and a box of it."""


class ReadTensors(NamedTuple):
    """After `read`: the tensors that are new, the bytes that were read, and those that came from other ranks."""

    made: dict[str, Any]
    nbytes: int
    received_nbytes: int


@dataclass(frozen=True)
class LoadSession:
    target: LoadTarget
    store: Store
    world: World
    agree: Agree
    phases: Phases
    options: Options
    complete: bool = True
    """Whether the checkpoint must hold all of every tensor to fill."""
    logged: Callable[[Callable[..., Any], str], Callable[..., Any]] = unlogged
    """Wraps the steps, by torch's names."""

    def load(self, opened: OpenedLoad) -> tuple[MatchedState, LoadReport]:
        """Fill the target; the report counts the tensors of this rank, and no key that is missing or unexpected."""
        try:
            matched = self.match(opened)
            met = self.phases.met()
            # New leaves are placed when they are filled. Objects are placed in a step of their own.
            read, ranks = self.read(opened, matched, met, place=not opened.has_objects)
        finally:
            if opened.peers:
                opened.peers.close()
        if opened.has_objects:
            ranks = self.place(matched, read, met)
        record, ranks = matched.source.record, self.phases.all_ranks(ranks)
        return matched, LoadReport(
            where=self.store.url,
            save_id=record.save_id,
            step=record.step,
            meta=record.meta,
            missing=[],
            unexpected=[],
            tensors=len(matched.tensors),
            bytes_filled=tensor_nbytes(matched.source.index, np.array(list(matched.tensors.values()), np.int64)),
            bytes_read=read.nbytes,
            bytes_received=read.received_nbytes,
            seconds=self.phases.now(),
            phases=self.phases.spans,
            ranks=ranks,
            slowest=find_slowest(ranks, LOAD_WORK),
        )

    def open(self, find: Callable[[Store], FoundCheckpoint] = find) -> OpenedLoad:
        """Find the checkpoint: rank 0 reads the commit record, so that all ranks load the same save."""
        on_rank_0: list[FoundCheckpoint] = []
        peers = None if self.world.solo else peers_of(self.store, self.world, self.options)
        store = peers.store if peers else self.store

        def look() -> tuple[list[str], bytes]:
            names, communicates = self.target.begin()
            return names, _encode((names, communicates))

        def decide(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(each, type=tuple[list[str], bool]) for each in payloads]
            self.target.check_begun([names for names, _ in said])
            on_rank_0.append(find(store))
            identity = identity_of(on_rank_0[0].record, len(payloads))
            return [_encode((identity, any(communicates for _, communicates in said)))] * len(payloads)

        with self.phases.phase("open"):
            names, answer = agree_and_return(self.agree, "open", look, decide)
            identity, communicates = msgspec.msgpack.decode(answer, type=tuple[Identity, bool])
            open_found = on_rank_0[0].open if on_rank_0 else partial(open_identified, store, identity)
            opened = OpenedLoad(open_found, bool(names), peers, None)
            if not communicates:
                return opened
            # What can fail on a single rank must come before ranks wait for each other inside their objects.
            prepared, _ = agree_and_return(
                self.agree, "prepare", lambda: (self._prepare(opened), b""), lambda done: done
            )
            return opened._replace(prepared=prepared)

    def _prepare(self, opened: OpenedLoad) -> tuple[Source, Any]:
        source = opened.open(self.options)
        return source, self.target.prepare(source)

    def match(self, opened: OpenedLoad) -> MatchedState:
        """Compare the state of every rank with the index, before anything is changed."""
        on_rank_0: list[Source] = []

        def compare() -> tuple[MatchedState, bytes]:
            with self.phases.phase("plan"):
                source, prepared = opened.prepared or self._prepare(opened)
                on_rank_0.append(source)
                matched, found = self.target.compare(source, prepared)
                offer = opened.peers.offer(_wants(self.store.url, matched)) if opened.peers else b""
                return matched, _encode((found, offer))

        def decide(payloads: list[bytes]) -> list[bytes]:
            said = [msgspec.msgpack.decode(each, type=tuple[bytes, bytes]) for each in payloads]
            answer = self.target.decide(on_rank_0[0], [found for found, _ in said])
            offers = [offer for _, offer in said]
            return [_encode((answer, team)) for team in (make_teams(offers) if any(offers) else offers)]

        logged = self.logged
        matched: MatchedState
        matched, sent = agree_and_return(
            self.agree, "match", logged(compare, "local_step"), logged(decide, "global_step")
        )
        answer, team = msgspec.msgpack.decode(sent, type=tuple[bytes, bytes])
        if opened.peers:
            opened.peers.join(team)
        return matched._replace(answer=answer)

    def read(
        self, opened: OpenedLoad, matched: MatchedState, met: CommonMoment, *, place: bool
    ) -> tuple[ReadTensors, list[RankPhases]]:
        def work() -> ReadTensors:
            began_s = self.phases.now()
            to, made = _find_targets(matched)
            synchronize_devices(into := to[-1])
            first, options = _first_file(self.store, self.world), self.options
            if opened.peers and opened.peers.team:
                first, options = 0.0, opened.peers.remaining(options)
            nbytes = fill(matched.source, *to, options, first_file=first, complete=self.complete)
            synchronize_devices(into)
            # The bytes bypassed autograd, which must not take what it saved of these tensors for still valid.
            torch.autograd.graph.increment_version(into)
            self.phases.add("read", began_s, self.phases.now(), nbytes)
            if place:
                self._place(matched, made)
            received_nbytes = opened.peers.received_nbytes if opened.peers else 0
            return ReadTensors(made, nbytes - received_nbytes, received_nbytes)

        return self._timed("read", self.logged(work, "read_data"), met)

    def place(self, matched: MatchedState, read: ReadTensors, met: CommonMoment) -> list[RankPhases]:
        """Put new leaves into the state, and give objects what is theirs, once no rank can have failed to read."""
        return self._timed("place", lambda: self._place(matched, read.made), met)[1]

    def _place(self, matched: MatchedState, made: dict[str, Any]) -> None:
        with self.phases.phase("place"):
            self.target.place(matched, made)

    def _timed(self, phase: str, work: Callable[[], T], met: CommonMoment) -> tuple[T, list[RankPhases]]:
        """Run a step whose ranks send rank 0 their timings; return these, on rank 0."""
        did: list[RankPhases] = []

        def collect(payloads: list[bytes]) -> list[bytes]:
            did.extend(met.of_ranks([msgspec.msgpack.decode(payload, type=SentPhases) for payload in payloads]))
            return [b""] * len(payloads)

        return agree_and_return(self.agree, phase, lambda: (work(), _encode(met.sent())), collect)[0], did


def _first_file(store: Store, world: World) -> float:
    # From 0 to 1. Ranks that share a page cache begin with the same file: while the disk is busy with the next blocks,
    # all of them copy what one of them has read ahead. Files of a local disk are read by no other machine.
    if not prefetches(store):
        return world.rank / world.size
    return world.rank // local_ranks() * local_ranks() / world.size if is_remote(store) else 0.0


def _wants(url: str, matched: MatchedState) -> bytes:
    """Return a digest that is equal on ranks that fill the same boxes of the same tensors of one save."""
    description, rows = matched.description, matched.tensors
    row_of = np.array([rows.get(key, -1) for key in description.keys], np.int64)
    digest = blake2b(f"{url} {matched.source.record.save_id}".encode(), digest_size=16)
    for column in (row_of[description.row_tensor], description.boxes.offsets, description.boxes.sizes):
        digest.update(np.ascontiguousarray(column, np.int64).tobytes())
    return digest.digest()


def _find_targets(matched: MatchedState) -> tuple[Destinations, dict[str, Any]]:
    """Allocate memory for tensors on the meta device; return all tensors to fill, and the new ones among them."""
    tensors, present, index = matched.tensors, matched.description.leaves, matched.source.index
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
    return (row_of[description.row_tensor[rows]], description.boxes.take(rows), into), made
