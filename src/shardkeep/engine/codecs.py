"""Codecs of a save, and the keys that a call uses. Data keys go to other ranks only in wrapped form. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from shardkeep.codecs.base import CodecConfig
from shardkeep.codecs.chain import CodecChain, codec_config
from shardkeep.codecs.coded_store import EncodingStore, Seal
from shardkeep.codecs.keys import CachedKeys, KeyRing, KeySource, key_source
from shardkeep.engine.writer import FileJob, file_entry
from shardkeep.errors import CheckpointError, InvalidCodec, StateError
from shardkeep.format.boxes import IntArray
from shardkeep.format.record import MOST_CHAINS, FileEntry, Record, Recorded
from shardkeep.format.values import Node, leaf_keys, part_name, tree_leaves
from shardkeep.layouts.native import check_signature, checksum_of
from shardkeep.options import Options, setting
from shardkeep.plan.save_plan import RankWritePlan
from shardkeep.storage.base import WritableStore


def keys_for(options: Options) -> CachedKeys | None:
    """Return the source of keys that the options or the environment name. Keys are loaded when first needed."""
    file, text, given = setting("SHARDKEEP_KEY_FILE"), setting("SHARDKEEP_KEY"), options.keys
    if given is not None:
        return CachedKeys(lambda: key_source(given))
    if file:
        return CachedKeys(lambda: KeyRing.from_file(file))
    return CachedKeys(lambda: KeyRing.from_text(text, named="SHARDKEEP_KEY")) if text else None


def open_chains(record: Record, options: Options, *, where: str) -> list[CodecChain]:
    """Open the codecs of a checkpoint's files, and check that its commit record is the one that was signed."""
    keys = keys_for(options)
    try:
        # Chains that no file uses may need a codec or a key that is not here: they are opened as empty ones.
        used = {blob.chain for blob in (record.index, *record.files)}
        chains = [CodecChain.opened(each if at in used else [], keys=keys) for at, each in enumerate(record.chains)]
        check_signature(record, chains)
    except CheckpointError as exc:
        exc.message = f"{where}: {exc.message}"
        raise
    return chains


def closest_patterns(names: Sequence[str], tree: Node) -> tuple[dict[str, int | None], list[int]]:
    """
    Return which of the names fits each leaf of a state best, and which of them fit nothing.

    "model" fits all of the model, "model.layers.0" what is below that. A `*` stands for anything, including dots. The name
    with more parts is closer; then the one with fewer `*`; then the one that comes first.
    """
    parts = [name.split(".") for name in names]
    closeness = [(len(each), sum("*" not in part for part in each)) for each in parts]
    order = sorted(range(len(names)), key=closeness.__getitem__, reverse=True)
    # DOTALL: a key may contain line breaks.
    fits = [re.compile(".*".join(map(re.escape, name.split("*"))) + r"(?:\.|\Z)", re.DOTALL).match for name in names]
    by_leaf = {leaf: next((number for number in order if fits[number](leaf)), None) for leaf in leaf_keys(tree)}
    # A name whose leaves all have closer names is no mistake, nor is the name of something that is still empty, or below it, such
    # as an optimizer's state before its first step. Only the part before a `*` counts as below: after it, a typing error
    # would go unnoticed.
    idle = set(order).difference(number for number in by_leaf.values() if number is not None)
    empty = [name for name, _, kind in tree_leaves(tree) if kind] if idle else []
    unfit = [
        number
        for number in sorted(idle)
        if not any(map(fits[number], by_leaf))
        and not any(fits[number](each) or names[number].partition("*")[0].startswith(f"{each}.") for each in empty)
    ]
    return by_leaf, unfit


Codecs = Sequence[str | CodecConfig] | Mapping[Any, Sequence[str | CodecConfig]] | None
"""What a caller asks for: names or configs, for all; or by part of the state (`closest_patterns`). None: no codecs."""


@dataclass(frozen=True)
class CodecPlan:
    """The codec chains of a new checkpoint, and which tensors use which."""

    chains: list[CodecChain] = field(default_factory=list)
    by_leaf: Mapping[str, int | None] | None = None
    """The chain of every leaf of the state, by flat name; None: all use the first, if there is one."""

    def chain_of(self, keys: Sequence[str], alias: IntArray) -> list[int | None]:
        """Return the chain of each tensor. Memory with several names is encrypted if that was asked for any of them."""
        if self.by_leaf is None:
            return [0 if self.chains else None] * len(keys)
        if unknown := [key for key in keys if key not in self.by_leaf]:  # converted from a damaged index
            raise StateError(f"the codecs of {unknown[0]!r} are unknown: it is in no part of the state", key=unknown[0])
        found = [self.by_leaf[key] for key in keys]
        for row in np.flatnonzero(alias != np.arange(len(keys))).tolist():
            owner = int(alias[row])
            asked = [number for number in (found[owner], found[row]) if number is not None]
            secret = [number for number in asked if self.chains[number].is_secret]
            found[owner] = next(iter([*secret, *asked]), None)
        return found

    @property
    def of_index(self) -> int | None:
        """The chain of the index: the first that encrypts, because names and values may be secret."""
        secret = [number for number, chain in enumerate(self.chains) if chain.is_secret]
        return next(iter([*secret, *range(len(self.chains))]), None)


def plan_codecs(codecs: Codecs, *, tree: Callable[[], Node], keys: KeySource | None) -> CodecPlan:
    """Start the codec chains of a new checkpoint, from what the caller asked for and the tree of the state."""
    if not codecs:
        return CodecPlan()
    if not isinstance(codecs, Mapping):
        return CodecPlan([CodecChain.begin(_configs(codecs), keys=keys)])
    names = [str.__str__(part) if isinstance(part, str) else part_name("dict", part) for part in codecs]
    closest_to, unfit = closest_patterns(names, root := tree())
    twice = [number for number, name in enumerate(names) if names.index(name) < number]
    for number in [*twice, *unfit]:
        what = "twice" if number in twice else "which is no part of the state"
        tops = sorted(part_name(root.kind, part) for part, _ in root.children) if root is not None else []
        raise StateError(
            f"codecs were asked for {list(codecs)[number]!r}, {what}",
            hint=f"its top-level keys are {', '.join(map(repr, tops[:20]))}; numbers may be spelt as text, and * stands for"
            " anything",
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


def _configs(codecs: Sequence[str | CodecConfig] | None) -> list[CodecConfig]:
    if isinstance(codecs, (str, CodecConfig)):
        codecs = [codecs] if codecs else []
    try:
        return [codec_config(each) for each in codecs or ()]
    except TypeError as exc:
        raise InvalidCodec(f"codecs={codecs!r}", hint='give a list, such as ["float", "aes"]') from exc


class FileCodecs:
    """The codecs of a rank's files. Thread-safe."""

    def __init__(self, writes: RankWritePlan, names: Sequence[str], keys: CachedKeys | None) -> None:
        self.chains = [CodecChain.opened(each, keys=keys) for each in writes.chains]
        self._number = {name: file.chain for name, file in zip(names, writes.files, strict=True)}
        self._by_name = {name: self.chains[number] for name, number in self._number.items() if number is not None}
        self._keys = keys
        self.seals: dict[str, Seal] = {}

    def over(self, store: WritableStore) -> WritableStore:
        return EncodingStore(store, self._by_name, self.seals) if self._by_name else store

    def spec_of(self, name: str) -> tuple[Recorded, dict[str, str]] | None:
        """Return what another process needs to apply a file's codecs: what is recorded, and data keys; None: no codecs."""
        chain = self._by_name.get(name)
        return None if chain is None else (chain.recorded, self._keys.known if self._keys else {})

    def entry_of(self, job: FileJob) -> FileEntry:
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
