"""
Codecs in a save: what the caller asked for becomes chains, once, on rank 0; every rank opens them with its own keys.

Data keys do not travel between ranks: orders carry what is recorded, in which they are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from shardkeep.codec.codecs import CodecConfig
from shardkeep.codec.frame_chain import Chain
from shardkeep.codec.keys import KeySource, RememberedKeys
from shardkeep.codec.known import config_of
from shardkeep.codec.problems import InvalidCodec
from shardkeep.errors import StateError
from shardkeep.format.record import FileEntry, Recorded
from shardkeep.format.tree import Container, decode_tree, part_name
from shardkeep.layout.coded_store import EncodingStore, checksum_of
from shardkeep.layout.frame_writer import Seal
from shardkeep.run.orders import Orders
from shardkeep.run.write import FileJob, Writes, entry_of

Codecs = Sequence[str | CodecConfig] | Mapping[str, Sequence[str | CodecConfig]] | None
"""What a caller asks for: names or configs, for all; or by top-level key of the state. Nothing: as it is."""


@dataclass(frozen=True)
class Begun:
    """The chains of a new checkpoint, and what goes through which."""

    chains: list[Chain] = field(default_factory=list)
    by_top: Mapping[str, int] | None = None
    """By top-level key of the state; None: everything goes through the first, if there is one."""

    def chain_of(self, key: str, group: str) -> int | None:
        """Say which chain a tensor goes through, by its key and the top-level container it is in."""
        if self.by_top is None:
            return 0 if self.chains else None
        # Tensors that are in no container are one group, too, which is called as a container may be.
        top = key if group == "state" and not key.startswith("state.") else group
        return self.by_top.get(top)

    @property
    def of_index(self) -> int | None:
        """Say which chain the index goes through: the first that has a secret, as names and values may be some."""
        secret = [number for number, chain in enumerate(self.chains) if chain.is_secret]
        return next(iter([*secret, *range(len(self.chains))]), None)


def begin_codecs(codecs: Codecs, *, tops: Callable[[], Collection[str]], keys: KeySource | None) -> Begun:
    """
    Begin the chains of a new checkpoint.

    Args:
        codecs: what the caller asked for.
        tops: gives the top-level keys of the state.
        keys: who wraps data keys.

    Raises:
        StateError: codecs were asked for a top-level key that the state has not.
        InvalidCodec: what was given are not codecs.

    """
    if not codecs:
        return Begun()
    if not isinstance(codecs, Mapping):
        return Begun([Chain.begin(_configs(codecs), keys=keys)])
    if unknown := sorted(map(str, set(codecs) - set(tops()))):
        raise StateError(
            f"codecs were asked for {unknown[0]!r}, which is no top-level key of the state",
            hint=f"its top-level keys are {', '.join(sorted(tops())[:20])}",
        )
    different: list[list[CodecConfig]] = []
    by_top: dict[str, int] = {}
    for top, wanted in codecs.items():
        if configs := _configs(wanted):
            if configs not in different:
                different.append(configs)
            by_top[top] = different.index(configs)
    return Begun([Chain.begin(configs, keys=keys) for configs in different], by_top)


def top_keys(tree: bytes) -> list[str]:
    """Return the top-level keys of a state, as they are spelt in names."""
    root = decode_tree(tree)
    return [part_name(root.kind, part) for part, _ in root.children] if isinstance(root, Container) else []


def _configs(codecs: Sequence[str | CodecConfig] | None) -> list[CodecConfig]:
    if isinstance(codecs, (str, CodecConfig)):
        codecs = [codecs] if codecs else []
    try:
        return [config_of(each) for each in codecs or ()]
    except TypeError as exc:
        raise InvalidCodec(f"codecs={codecs!r}", hint='give a list, such as ["float", "aes"]') from exc


class FileCoding:
    """What a rank's files go through. May be used by several threads."""

    def __init__(self, orders: Orders, keys: RememberedKeys | None) -> None:
        """Open the chains that rank 0 has begun."""
        self.chains = [Chain.opened(each, keys=keys) for each in orders.chains]
        self._number = {name: chain for (name, _, _), chain in zip(orders.files, orders.chain, strict=True)}
        self._by_name = {name: self.chains[number] for name, number in self._number.items() if number is not None}
        self._keys = keys
        self.seals: dict[str, Seal] = {}
        """What stands for each coded file that is written."""

    def over(self, store: Writes) -> Writes:
        """Return a store to write files to, as they go through their chains."""
        if not self._by_name:
            return store
        coded = EncodingStore(store, self._by_name)
        self.seals = coded.seals
        return coded

    def told(self, name: str) -> tuple[Recorded, dict[str, str]] | None:
        """Return what another process needs to code a file: what is recorded, and data keys; None: it is not coded."""
        chain = self._by_name.get(name)
        return None if chain is None else (chain.recorded, self._keys.known if self._keys else {})

    def entry_of(self, job: FileJob) -> FileEntry:
        """Say what the commit record says of a file that was written."""
        entry, chain = entry_of(job), self._by_name.get(job.name)
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
