"""
Find a checkpoint and open it as a `Source`: native, torch's layout, safetensors files, or files of `torch.save`.

A save in one layout removes the commit marker of the other; if a save died just before that, the later marker counts.
Safetensors files count only where nothing was committed, because data files of the native layout are safetensors files,
too. Of a Hugging Face model that has both, safetensors files count, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shardkeep.codecs.coded_store import DecodingStore
from shardkeep.engine.codecs import open_chains
from shardkeep.engine.reader import FoundCheckpoint, Source
from shardkeep.engine.safetensors_source import FORMAT as SAFETENSORS
from shardkeep.engine.safetensors_source import find_safetensors
from shardkeep.engine.torch_file_source import FORMAT as TORCH_FILE
from shardkeep.engine.torch_file_source import SUFFIXES, find_torch_file, find_torch_model
from shardkeep.engine.torch_source import find_torch
from shardkeep.errors import BlobNotFound, CheckpointError, CheckpointNotFound, DamagedCheckpoint
from shardkeep.format.record import FORMAT as NATIVE
from shardkeep.format.record import RECORD_NAME, Record
from shardkeep.layouts import native
from shardkeep.layouts.safetensors import SUFFIX
from shardkeep.layouts.torch import METADATA_NAME
from shardkeep.options import Options
from shardkeep.storage.base import ReadableStore, Store, exists, is_single_file


def find(store: Store) -> FoundCheckpoint:
    """Find the checkpoint in a place; `CheckpointNotFound` if there is none of any layout."""
    kinds = f"safetensors ({SUFFIX}) or torch.save ({', '.join(SUFFIXES)})"
    hint = f"a checkpoint is a directory, or a single file of {kinds}"
    missing = CheckpointNotFound(f"{store.url}: not a checkpoint that shardkeep can read", hint=hint)
    try:
        if not (is_file := is_single_file(store)):
            return find_committed(store)
    except CheckpointNotFound as exc:
        missing = exc
    try:
        for look in (find_torch_file, find_safetensors, find_torch_model):
            if (found := look(store)) is not None:
                return found
    except DamagedCheckpoint as exc:
        if is_file and not store.url.endswith((SUFFIX, *SUFFIXES)):
            raise missing from exc
        raise
    raise missing


def find_committed(store: Store) -> FoundCheckpoint:
    """Find a checkpoint that was committed, native or of torch's layout; `CheckpointNotFound` if there is none."""
    try:
        record = native.record_in(store)
    except BlobNotFound:
        try:
            return find_torch(store)
        except BlobNotFound as exc:
            raise native.not_found(store) from exc
    if latest(store) == METADATA_NAME:
        return find_torch(store)
    return FoundCheckpoint(record, lambda options: open_native(store, record, options))


def latest(store: Store) -> str | None:
    """Return the name of the later commit marker if there is one of each layout; else None."""
    if not all(exists(store, name) for name in (METADATA_NAME, RECORD_NAME)):
        return None
    when = {info.name: info.modified_s for info in store.list() if info.name in (METADATA_NAME, RECORD_NAME)}
    return max(when, key=lambda name: when[name], default=None)


def open_native(store: ReadableStore, record: Record, options: Options) -> Source:
    """Open the native checkpoint of a record, through its codecs, with the keys of the options."""
    if not record.chains:
        return Source(store, record, native.open_index(store, record))
    chains = open_chains(record, options, where=getattr(store, "url", record.save_id))
    plain = DecodingStore(store, [record.index, *record.files], chains)
    chain = None if record.index.chain is None else chains[record.index.chain]
    return Source(plain, record, native.open_index(plain, record, chain))


Identity = tuple[str, str, bytes]
"""Format, checksum of the index, and the native record (JSON: msgpack cannot hold every `meta`), empty if large."""
_MOST_SENT_NBYTES, _MOST_SENT_IN_ALL_NBYTES = 64 << 10, 64 << 20
"""A record that is longer, or that goes to too many ranks for its size, is read from the store by each rank."""


def identity_of(record: Record, ranks: int) -> Identity:
    """Return what rank 0 sends to all ranks, so that they open the checkpoint that it found."""
    encoded = msgspec.json.encode(record) if record.format == NATIVE else b""
    most = min(_MOST_SENT_NBYTES, _MOST_SENT_IN_ALL_NBYTES // ranks)
    return record.format, record.index.checksum, encoded if len(encoded) <= most else b""


def open_identified(store: Store, identity: Identity, options: Options) -> Source:
    layout, checksum, record = identity
    if record:
        return open_native(store, msgspec.json.decode(record, type=Record), options)
    finders: dict[str, Callable[[Store], FoundCheckpoint | None]] = {
        NATIVE: find_committed,
        TORCH_FILE: lambda store: find_torch_file(store) or find_torch_model(store),
        SAFETENSORS: find_safetensors,
    }
    found = finders.get(layout, find_torch)(store)
    if found is None or found.record.index.checksum != checksum:
        raise CheckpointError(f"{store.url}: another save replaced the checkpoint", hint="open or load it again")
    return found.open(options)
