"""
One rank's part of a load: compare its state with the index, fill its tensors, put into the state what is new.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from shardkeep.dist.world import World
from shardkeep.engine.fill import fill
from shardkeep.engine.match import (
    LoadFilter,
    Match,
    RankFindings,
    compare_kinds,
    match_state,
    merge_findings,
    raise_if_wrong,
)
from shardkeep.engine.reader import Source
from shardkeep.engine.save_session import check_same_objects
from shardkeep.engine.shared_reads import (
    Channel,
    Destinations,
    Sharing,
    all_agree,
    new_tag,
    open_channel,
    remaining_reads,
    shared_requests,
)
from shardkeep.engine.sources import FoundCheckpoint, find, open_source
from shardkeep.errors import RanksDisagree
from shardkeep.format.index import Index
from shardkeep.format.record import Record
from shardkeep.format.values import decode_value
from shardkeep.options import Options
from shardkeep.plan.sharing import plan_sharing
from shardkeep.state.describe import Description, describe, describe_leaves
from shardkeep.state.flatten import refill
from shardkeep.state.leaves import materialize, meta_signature, needs_memory, synchronize_devices
from shardkeep.state.objects import Objects, is_tensor_or_object
from shardkeep.state.stored import StoredState
from shardkeep.storage.base import Store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_encode = msgspec.msgpack.encode


class LoadSession:
    """One rank's part of a load."""

    def __init__(
        self,
        store: Store,
        wishes: LoadFilter,
        world: World,
        options: Options,
        group: ProcessGroup | World | None,
        *,
        allow_pickle: bool,
    ) -> None:
        self.store = store
        self.options = options
        self.wishes = wishes
        self.world = world
        self.allow_pickle = allow_pickle
        self.in_place_of: dict[str, Any] = {}
        self.new_leaves: dict[str, Any] = {}
        self.bytes_read = self.bytes_received = 0
        self.group = group
        self.orders = b""
        """This rank's part in sharing the reads; nothing where they are not shared."""
        # Known after `look`, `open`, `prepare`, `match` and `offer`.
        self.objects: Objects
        self.record: Record
        self.communicates: bool
        self.stored: StoredState | None = None
        self.found: FoundCheckpoint | None = None
        self.source: Source
        self.index: Index
        self.description: Description
        self.matched: Match
        self.shares: bool
        self.channel: Channel | str | None = None
        self.sharing: Sharing
        self.destinations: Destinations | None = None

    def look(self, state: MutableMapping[str, Any]) -> bytes:
        """Find the objects in this rank's state."""
        self.objects = Objects(state, rank=self.world.rank, world_size=self.world.size)
        word: str | None = None
        if self.options.share_reads:
            self.channel = open_channel(self.group, size=self.world.size, timeout_s=self.world.timeout_s)
            word = self.channel if isinstance(self.channel, str) else ""
        return _encode((self.objects.names, self.objects.communicates, word))

    def tell(self, payloads: list[bytes]) -> list[bytes]:
        """On rank 0: give everyone the commit record, if all ranks have the same objects."""
        seen = [msgspec.msgpack.decode(payload, type=tuple[list[str], bool, str | None]) for payload in payloads]
        check_same_objects([names for names, _, _ in seen])
        self.found = find(self.store)
        record = msgspec.json.encode(self.found.record)  # as it is stored: its meta may be beyond msgpack
        shares = all_agree([word for _, _, word in seen])
        return [_encode((record, any(talks for _, talks, _ in seen), shares))] * len(payloads)

    def open(self, told: bytes) -> None:
        """Take the commit record from rank 0."""
        record, self.communicates, self.shares = msgspec.msgpack.decode(told, type=tuple[bytes, bool, bool])
        self.record = msgspec.json.decode(record, type=Record)

    def prepare(self) -> bytes:
        """Read the index, and ask those objects what they need that ask no other rank."""
        self.wishes = self.wishes.checked()
        found, self.found = self.found, None  # of rank 0, which has read it
        self.source = found.open(self.options) if found else open_source(self.store, self.record, self.options)
        self.index = self.source.index
        if self.objects:
            self.stored = StoredState(self.index, *self.wishes.names(self.index), self.wishes.renamed)
            self.in_place_of = self.objects.templates(self.stored, self.wishes.selects(), communicating=False)
        return b""

    def match(self, state: MutableMapping[str, Any]) -> bytes:
        """Compare this rank's state with the index."""
        if not self.communicates:
            self.prepare()
        selected = self.wishes.selects()
        if self.stored is not None:
            self.in_place_of = self.objects.templates(self.stored, selected, communicating=True)
        self.description = describe(
            state, rank=self.world.rank, in_place_of=self.in_place_of, filling=True, selected=selected
        )
        self.matched = match_state(self.index, self.description, self.wishes)
        # Values are decoded before a tensor is touched: one that is refused leaves the state as it was.
        other_kinds: list[str] = []
        for key, row in self.matched.values.items():
            like = self.description.values[key]
            data = self.index.value_data.raw(row)
            self.new_leaves[key] = decode_value(data, key=key, allow_pickle=self.allow_pickle, like=like)
            other_kinds += compare_kinds(key, like, self.new_leaves[key])
        # So does a container that cannot take what is new.
        made = {key: torch.empty(0) for key in self.matched.tensors if needs_memory(self.description.leaves[key])}
        self._refill(state, self.new_leaves | made, dry=True)
        return _encode(msgspec.structs.replace(self.matched.findings, other_kinds=other_kinds))

    def _refill(self, state: MutableMapping[str, Any], leaves: dict[str, Any], *, dry: bool = False) -> None:
        refill(
            state,
            leaves,
            rank=self.world.rank,
            is_tensor=is_tensor_or_object,
            in_place_of=self.in_place_of,
            dry=dry,
        )

    def place(self, state: MutableMapping[str, Any]) -> None:
        """Put into the state what was not filled where it was, and give objects what is theirs."""
        self._refill(state, self.new_leaves)
        self.objects.take({*self.matched.tensors, *self.matched.values})

    def judge(self, payloads: list[bytes], *, strict: bool, where: str) -> list[bytes]:
        """On rank 0: raise if the checkpoint does not fit, and tell everyone what was found."""
        findings = [msgspec.msgpack.decode(payload, type=RankFindings) for payload in payloads]
        verdict = merge_findings(self.index, findings, self.wishes)
        raise_if_wrong(self.index, findings, verdict, self.wishes, strict=strict, where=where)
        return [_encode(verdict)] * len(payloads)

    def offer(self) -> bytes:
        """Tell rank 0 what this rank wants."""
        to = self._find_destinations()
        if not isinstance(self.channel, Channel):  # unreachable: then reads are not shared
            raise RanksDisagree("this rank cannot share its reads")
        wants = shared_requests(self.source, to)
        self.sharing = Sharing(self.channel, wants, budget_nbytes=self.options.host_budget_bytes)
        return self.sharing.offer()

    def share_out(self, payloads: list[bytes]) -> list[bytes]:
        """On rank 0: say who reads what. Nothing where there is nothing to share."""
        return plan_sharing(payloads, first_tag=new_tag()) or [b""] * len(payloads)

    def read(self, *, first_file: float) -> None:
        """Fill every tensor, as far as other ranks do not read it for this one."""
        to = self._find_destinations()
        if self.orders:
            to = remaining_reads(to, *self.sharing.take(self.orders))
        synchronize_devices(to.into)
        self.bytes_read = fill(
            self.source,
            to.tensor,
            to.boxes,
            to.into,
            threads=self.options.io_threads,
            budget_nbytes=self.options.host_budget_bytes,
            first_file=first_file,
        )
        synchronize_devices(to.into)
        # The bytes went past autograd, which must not take what it saved from these tensors for still valid.
        torch.autograd.graph.increment_version(to.into)

    def exchange(self) -> None:
        """Send the others what this rank has read for them, and receive what they have read for it."""
        self.bytes_received = self.sharing.exchange()

    def _find_destinations(self) -> Destinations:
        """Give meta tensors memory, and return all that is to be filled."""
        if self.destinations is None:
            tensors, description = self._materialized()
            # One memory is filled once, however many keys it has.
            rows = np.flatnonzero(description.alias[description.row_tensor] == description.row_tensor)
            row_of = np.array([tensors[key] for key in description.keys], np.int64)
            self.destinations = Destinations(
                row_of[description.row_tensor[rows]],
                description.boxes.take(rows),
                [description.pieces[row] for row in rows.tolist()],
            )
        return self.destinations

    def _materialized(self) -> tuple[dict[str, int], Description]:
        tensors = self.matched.tensors
        present = self.description.leaves
        made: dict[tuple[Any, ...], Any] = {}
        leaves: dict[str, Any] = {}
        for key, row in tensors.items():
            leaves[key] = leaf = present[key]
            if needs_memory(leaf):
                # Tied in the checkpoint, and both ask for the same: tied again.
                form = (int(self.index.tensors.alias[row]), *meta_signature(leaf))
                if form not in made:
                    made[form] = materialize(key, leaf)
                leaves[key] = self.new_leaves[key] = made[form]
        if not made and len(leaves) == len(present):
            return tensors, self.description
        return tensors, describe_leaves(leaves, filling=True)
