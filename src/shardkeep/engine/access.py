"""
What a call opens before it starts: the store, on all ranks, and the keys of encrypted checkpoints. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from shardkeep.codecs.chain import CodecChain
from shardkeep.codecs.keys import CachedKeys, KeyRing, KeySource, key_source
from shardkeep.dist.rendezvous import rendezvous
from shardkeep.dist.world import World
from shardkeep.errors import CheckpointError, KeyMissing
from shardkeep.format.record import Record
from shardkeep.layouts.native import check_signature
from shardkeep.options import Options, setting
from shardkeep.storage.base import Store
from shardkeep.storage.resolve import open_store


def keys_for(options: Options) -> CachedKeys | None:
    """
    Return the source of keys that the options or the environment name, or None.

    Keys are loaded when they are first needed: not for a checkpoint that is not encrypted.
    """
    file, text, given = setting("SHARDKEEP_KEY_FILE"), setting("SHARDKEEP_KEY"), options.keys
    if given is not None:
        return CachedKeys(_LazyKeys(lambda: key_source(given)))
    if file:
        return CachedKeys(_LazyKeys(lambda: KeyRing.from_file(file)))
    if text:
        return CachedKeys(_LazyKeys(lambda: KeyRing.from_text(text, named="SHARDKEEP_KEY")))
    return None


def open_chains(record: Record, options: Options, *, where: str) -> list[CodecChain]:
    """
    Open the codecs of a checkpoint's files, and check that its commit record is the one that was signed.

    Raises:
        KeyMissing: it is encrypted, and there is no key.
        WrongKey: it is encrypted with another key.
        NotAuthentic: the record was changed without the key.
        UnknownCodec: a codec is not installed.

    """
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


class _LazyKeys:
    """Keys that are loaded when they are first needed."""

    def __init__(self, find: Callable[[], KeySource | None]) -> None:
        self._find = find
        self._source: KeySource | None = None

    def _found(self) -> KeySource:
        self._source = self._source or self._find()
        if self._source is None:  # unreachable: there is no key source then
            raise KeyMissing("no key was given")
        return self._source

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        return self._found().wrap(data_key)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        return self._found().unwrap(key_id, wrapped)


def open_on_all_ranks(where: str | os.PathLike[str] | Store, world: World, options: Options, *, doing: str) -> Store:
    """Open a store; if that fails on this rank, the call fails on all ranks."""
    try:
        return open_store(where, direct=options.direct_io)
    except CheckpointError:
        with rendezvous(world, f"{doing} {where!r}"):  # the others wait for this rank
            raise
