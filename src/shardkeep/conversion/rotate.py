"""Rotates keys: only the record is rewritten, whose signature does not cover the wrapped data keys, so it stays valid."""

from __future__ import annotations

import os

from msgspec.structs import replace

from shardkeep.codecs.chain import rewrapped
from shardkeep.engine.codecs import keys_for, open_chains
from shardkeep.engine.sources import find
from shardkeep.errors import CheckpointExists, KeyMissing, StateError
from shardkeep.format.record import FORMAT, RECORD_NAME, encode_record
from shardkeep.layouts import native
from shardkeep.options import Options
from shardkeep.storage.base import Store, put_if_unchanged
from shardkeep.storage.resolve import open_store


def rotate_keys(where: str | os.PathLike[str] | Store, *, options: Options | None = None) -> bool:
    r"""
    Wrap the data keys of an encrypted checkpoint with the first of your keys; its files stay as they are.

    Put the new key before the old one (in the key file, or in `KeyRing`), rotate every checkpoint, then remove the old
    key. A copy of the old commit record still opens with the old key, so if a key leaked, save again instead.

    Args:
        where: a native checkpoint.
        options: `keys`, else what SHARDKEEP_KEY_FILE or SHARDKEEP_KEY names.

    Returns:
        Whether anything had to be done.

    Raises:
        StateError: the checkpoint is not encrypted.
        KeyMissing: there are no keys.
        WrongKey: none of the keys opens it.
        NotAuthentic: its commit record was changed without the key.
        CheckpointExists: another save replaced it meanwhile.

    Example:
        >>> import shardkeep as sk, tempfile, torch
        >>> where, old, new = tempfile.mkdtemp() + "/step-1", sk.new_key(), sk.new_key()
        >>> keys = sk.Options(keys=sk.KeyRing.from_text(old))
        >>> _ = sk.save({"w": torch.ones(4)}, where, codecs=["aes"], options=keys)
        >>> both = sk.KeyRing.from_text(f"{new}\n{old}")
        >>> sk.rotate_keys(where, options=sk.Options(keys=both))
        True
        >>> keys = sk.Options(keys=sk.KeyRing.from_text(new))
        >>> sk.open(where, options=keys)["w"].shape
        (4,)

    """
    options = options or Options()
    store = open_store(where, direct=options.direct_io)
    plain = StateError(f"{store.url} is not encrypted: it has no keys to rotate")
    if find(store).record.format != FORMAT:  # only the native layout is ever encrypted
        raise plain
    version = store.version(RECORD_NAME)
    record = native.read_record(store)
    if not any(chain.is_secret for chain in open_chains(record, options, where=store.url)):
        raise plain
    keys = keys_for(options)
    if keys is None:  # and yet it was opened: a codec has its own
        raise KeyMissing("there are no keys", hint="set SHARDKEEP_KEY_FILE, the new key on its first line")
    renewed = replace(record, chains=[rewrapped(each, keys) for each in record.chains])
    if renewed == record:
        return False
    open_chains(renewed, options, where=store.url)  # asks for the keys again
    if not put_if_unchanged(store, RECORD_NAME, encode_record(renewed), version):
        raise CheckpointExists(
            f"{store.url}: another save has replaced the checkpoint meanwhile", hint="rotate its keys again"
        )
    return True
