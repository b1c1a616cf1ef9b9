"""
Which layout a checkpoint has, and opening it: native, torch's, or safetensors files as Hugging Face has them.

A save in one layout takes away what says that a checkpoint of the other exists. A directory that has both was left by a
save that died just before that: what was written last counts. Safetensors files are looked for only where nothing was
committed: data files of the native layout are some, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shardkeep.codecs.coded_store import DecodingStore
from shardkeep.engine import safetensors_source as safetensors_open
from shardkeep.engine import torch_source as torch_open
from shardkeep.engine.codecs import open_chains
from shardkeep.engine.reader import DigestCache, ReadableStore, Source
from shardkeep.errors import BlobNotFound, CheckpointNotFound
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import RECORD_NAME, Record
from shardkeep.layouts import native
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.options import Options
from shardkeep.storage.base import Lists, Opens, Store


class _Looks(Opens, Lists, Protocol):
    """What looking for commits needs of a store."""


def find(store: Store) -> FoundCheckpoint:
    """
    Find the checkpoint of a place, to open it.

    Raises:
        CheckpointNotFound: there is none, of any layout.

    """
    try:
        if not safetensors_open.is_single_file(store):
            return _committed(store)
        missing = CheckpointNotFound(f"{store.url}: no checkpoint")
    except CheckpointNotFound as exc:
        missing = exc
    found = safetensors_open.find_safetensors(store)
    if found is None:
        raise missing
    return found


def _committed(store: Store) -> _FoundNative | torch_open.FoundTorch:
    try:
        record = native.read_record(store)
    except CheckpointNotFound as exc:
        try:
            return torch_open.find_torch(store)
        except BlobNotFound:
            raise exc from None
    return torch_open.find_torch(store) if latest(store) == METADATA_NAME else _FoundNative(store, record)


def read_record(store: Store) -> Record:
    """
    Read what says that a checkpoint was committed: a save into the same place would replace it.

    Raises:
        CheckpointNotFound: there is none. Safetensors files may be there; a save leaves them alone.

    """
    return _committed(store).record


@dataclass(frozen=True)
class _FoundNative:
    """A native checkpoint whose record was read."""

    store: Store
    record: Record

    def open(self, options: Options, headers: DigestCache | None = None) -> Source:
        """Read its index."""
        return open_native(self.store, self.record, options, headers)


FoundCheckpoint = _FoundNative | torch_open.FoundTorch | safetensors_open.FoundSafetensors
"""A checkpoint that is there: its `record`, and how to `open` it without reading again what was read to find it."""


def latest(store: _Looks) -> str | None:
    """Return the name of the later of two commits, where there is one of each layout; else None."""
    for name in (METADATA_NAME, RECORD_NAME):
        try:
            store.open(name).close()
        except BlobNotFound:
            return None
    when = {info.name: info.modified_s for info in store.list() if info.name in (METADATA_NAME, RECORD_NAME)}
    return max(when, key=lambda name: when[name], default=None)


def open_native(store: ReadableStore, record: Record, options: Options, headers: DigestCache | None = None) -> Source:
    """
    Open the native checkpoint that a record is of, through its codecs, with the keys of the options.

    Raises:
        KeyMissing: it is encrypted, and there is no key.
        WrongKey: it is encrypted with another key.
        NotAuthentic: the record was changed by somebody who has not the key.

    """
    if not record.chains:
        return Source(store, record, native.read_index(store, record), headers)
    chains = open_chains(record, options, where=getattr(store, "url", record.save_id))
    plain = DecodingStore(store, [record.index, *record.files], chains)
    chain = None if record.index.chain is None else chains[record.index.chain]
    return Source(plain, record, native.read_index(plain, record, chain), headers)


def open_source(store: Store, record: Record, options: Options, headers: DigestCache | None = None) -> Source:
    """Open the checkpoint that a record, which may be from another rank, is of."""
    if record.format == NATIVE:
        return _FoundNative(store, record).open(options, headers)
    if record.format == safetensors_open.FORMAT:
        return safetensors_open.open_safetensors(store, record, options)
    return torch_open.open_torch(store, record, options)
