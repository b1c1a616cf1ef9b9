"""
Codecs in a save: what the caller asked for becomes chains, once, on rank 0; every rank opens them with its own keys.

Data keys do not travel between ranks: orders carry what is recorded, in which they are wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.coded_store import EncodingStore, Seal, checksum_of
from shardkeep.codecs.keys import CachedKeys, KeySource
from shardkeep.codecs.registry import codec_config
from shardkeep.engine.rank_plan import RankWritePlan
from shardkeep.engine.writer import FileJob, WritableStore, file_entry
from shardkeep.errors import InvalidCodec, StateError
from shardkeep.format.boxes import IntArray
from shardkeep.format.record import MOST_CHAINS, FileEntry, Recorded
from shardkeep.format.tree import Node, join, leaf_keys, part_name

# Parts of a state, named by the beginnings of flat names: "model" is all of it, "model.layers.0" what is below that.
#
# A `*` stands for anything, dots too: "optimizer.state.*.exp_avg". Where several names fit a leaf, the closest
# counts.


def closest_patterns(names: Sequence[str], tree: Node) -> tuple[dict[str, int | None], list[int]]:
    """
    Say which of the names fits each leaf of a state best, and which of them fit nothing.

    The more parts a name has, the closer it is; then the fewer with a `*`; then the one that comes first.
    """
    order = sorted(range(len(names)), key=lambda number: _closeness(names[number]), reverse=True)
    patterns = [(number, _pattern(names[number]).match) for number in order]
    by_leaf = {leaf: next((number for number, fits in patterns if fits(leaf)), None) for leaf in leaf_keys(tree)}
    # One that always gives way to closer names is no mistake, nor one of something that is not there yet.
    idle = set(order).difference(number for number in by_leaf.values() if number is not None)
    empty = list(_empty(tree, None)) if idle else []
    unfit = [
        number
        for number, fits in patterns
        if number in idle and not any(map(fits, by_leaf)) and not _fits_empty(names[number], empty)
    ]
    return by_leaf, sorted(unfit)


def _fits_empty(name: str, empty: list[str]) -> bool:
    """
    Say whether a name is that of something empty, or is below it: an optimizer's state before its first step.

    Below it by its parts without a `*` alone: that stands for anything, and a slip behind it would pass unnoticed.
    """
    fits, certain = _pattern(name).match, name.partition("*")[0]
    return any(fits(each) or certain.startswith(f"{each}.") for each in empty)


def _closeness(name: str) -> tuple[int, int]:
    parts = name.split(".")
    return len(parts), sum("*" not in part for part in parts)


def _pattern(name: str) -> re.Pattern[str]:
    # All lines: there is nothing that a key may not hold.
    return re.compile(".*".join(map(re.escape, name.split("*"))) + r"(?:\.|\Z)", re.DOTALL)


def _empty(node: Node, name: str | None) -> Iterator[str]:
    """Give the flat names of containers that have nothing in them."""
    if node is None:
        return
    if not node.children and name is not None:
        yield name
    for part, child in node.children:
        yield from _empty(child, join(name, node.kind, part))


Codecs = Sequence[str | CodecConfig] | Mapping[Any, Sequence[str | CodecConfig]] | None
"""What a caller asks for: names or configs, for all; or by part of the state (`named_parts`). Nothing: as it is."""


@dataclass(frozen=True)
class CodecPlan:
    """The chains of a new checkpoint, and what goes through which."""

    chains: list[CodecChain] = field(default_factory=list)
    by_leaf: Mapping[str, int | None] | None = None
    """By flat name, of every leaf of the state; None: everything goes through the first, if there is one."""

    def chain_of(self, keys: Sequence[str], alias: IntArray) -> list[int | None]:
        """
        Say which chain each tensor goes through; `alias` says which tensor's memory stands for it.

        Memory of several names is written once: through a chain that has a secret, if that was asked for any of them.

        Raises:
            StateError: a tensor is not in the tree of the state, so that nobody can say what was asked for it.

        """
        if self.by_leaf is None:
            return [0 if self.chains else None] * len(keys)
        if unknown := [key for key in keys if key not in self.by_leaf]:
            raise StateError(
                f"nobody can say which codecs were asked for {unknown[0]!r}: it is in no part of the state",
                hint="nothing was written; give codecs for all of the state, and please report this",
                key=unknown[0],
            )
        found = [self.by_leaf[key] for key in keys]
        for row in np.flatnonzero(alias != np.arange(len(keys))).tolist():
            owner = int(alias[row])
            found[owner] = self._safer(found[owner], found[row])
        return found

    def _safer(self, one: int | None, other: int | None) -> int | None:
        """Return the one of two chains that has a secret; else the first that there is."""
        asked = [number for number in (one, other) if number is not None]
        return next((number for number in asked if self.chains[number].is_secret), asked[0] if asked else None)

    @property
    def of_index(self) -> int | None:
        """Say which chain the index goes through: the first that has a secret, as names and values may be some."""
        secret = [number for number, chain in enumerate(self.chains) if chain.is_secret]
        return next(iter([*secret, *range(len(self.chains))]), None)


def plan_codecs(codecs: Codecs, *, tree: Callable[[], Node], keys: KeySource | None) -> CodecPlan:
    """
    Begin the chains of a new checkpoint.

    Args:
        codecs: what the caller asked for.
        tree: gives the skeleton of the state.
        keys: who wraps data keys.

    Raises:
        StateError: codecs were asked for a part that the state has not, or twice for one.
        InvalidCodec: what was given are not codecs.

    """
    if not codecs:
        return CodecPlan()
    if not isinstance(codecs, Mapping):
        return CodecPlan([CodecChain.begin(_configs(codecs), keys=keys)])
    names = [str.__str__(part) if isinstance(part, str) else part_name("dict", part) for part in codecs]
    closest_to, unfit = closest_patterns(names, root := tree())
    twice = [number for number, name in enumerate(names) if names.index(name) < number]
    for number in [*twice, *unfit]:
        what = "twice" if number in twice else "which is no part of the state"
        raise StateError(
            f"codecs were asked for {list(codecs)[number]!r}, {what}",
            hint=f"its top-level keys are {_tops_of(root)}; numbers may be spelt as text, and * stands for anything",
        )
    different: list[list[CodecConfig]] = []
    chain_of: list[int | None] = []
    for wanted in codecs.values():
        configs = _configs(wanted)
        if configs and configs not in different:
            different.append(configs)
        chain_of.append(different.index(configs) if configs else None)
    if len(different) > MOST_CHAINS:
        raise StateError(f"{len(different)} different chains of codecs were asked for; {MOST_CHAINS} are the most")
    by_leaf = {leaf: None if number is None else chain_of[number] for leaf, number in closest_to.items()}
    return CodecPlan([CodecChain.begin(configs, keys=keys) for configs in different], by_leaf)


def _tops_of(root: Node) -> str:
    tops = [part_name(root.kind, part) for part, _ in root.children] if root is not None else []
    return ", ".join(map(repr, sorted(tops)[:20]))


def _configs(codecs: Sequence[str | CodecConfig] | None) -> list[CodecConfig]:
    if isinstance(codecs, (str, CodecConfig)):
        codecs = [codecs] if codecs else []
    try:
        return [codec_config(each) for each in codecs or ()]
    except TypeError as exc:
        raise InvalidCodec(f"codecs={codecs!r}", hint='give a list, such as ["float", "aes"]') from exc


class FileCodecs:
    """What a rank's files go through. May be used by several threads."""

    def __init__(self, orders: RankWritePlan, keys: CachedKeys | None) -> None:
        """Open the chains that rank 0 has begun."""
        self.chains = [CodecChain.opened(each, keys=keys) for each in orders.chains]
        self._number = {name: chain for (name, _, _), chain in zip(orders.files, orders.chain, strict=True)}
        self._by_name = {name: self.chains[number] for name, number in self._number.items() if number is not None}
        self._keys = keys
        self.seals: dict[str, Seal] = {}
        """What stands for each coded file that is written."""

    def over(self, store: WritableStore) -> WritableStore:
        """Return a store to write files to, as they go through their chains."""
        if not self._by_name:
            return store
        coded = EncodingStore(store, self._by_name)
        self.seals = coded.seals
        return coded

    def spec_of(self, name: str) -> tuple[Recorded, dict[str, str]] | None:
        """Return what another process needs to code a file: what is recorded, and data keys; None: it is not coded."""
        chain = self._by_name.get(name)
        return None if chain is None else (chain.recorded, self._keys.known if self._keys else {})

    def entry_of(self, job: FileJob) -> FileEntry:
        """Say what the commit record says of a file that was written."""
        entry, chain = file_entry(job), self._by_name.get(job.name)
        if chain is None:
            return entry
        seal = self.seals[job.name]
        return replace(
            entry,
            checksum=checksum_of(job.header, chain),
            chain=self._number[job.name],
            stored_nbytes=seal.stored_nbytes,
            table_checksum=seal.table_checksum,
        )
