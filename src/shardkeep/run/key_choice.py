"""
Whose keys a call uses: those it was given in its options, or those that the environment names; and what they open. No
torch.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.codec.frame_chain import Chain
from shardkeep.codec.keys import KeyRing, KeySource, RememberedKeys, key_source
from shardkeep.codec.problems import KeyMissing
from shardkeep.errors import CheckpointError
from shardkeep.format.record import Record
from shardkeep.layout.signing import check_signature
from shardkeep.options import Options, setting


def keys_for(options: Options) -> RememberedKeys | None:
    """
    Return who wraps and unwraps data keys, by the options or the environment; None where nobody was named.

    They are looked for when they are first needed: not for a checkpoint that is not encrypted.
    """
    file, text, given = setting("SHARDKEEP_KEY_FILE"), setting("SHARDKEEP_KEY"), options.keys
    if given is not None:
        return RememberedKeys(_WhenNeeded(lambda: key_source(given)))
    if file:
        return RememberedKeys(_WhenNeeded(lambda: KeyRing.from_file(file)))
    if text:
        return RememberedKeys(_WhenNeeded(lambda: KeyRing.from_text(text, named="SHARDKEEP_KEY")))
    return None


def opened_chains(record: Record, options: Options, *, where: str) -> list[Chain]:
    """
    Open the chains that files of a checkpoint went through, and insist that its record is what was signed.

    Raises:
        KeyMissing: it is encrypted, and there is no key.
        WrongKey: it is encrypted with another key.
        NotAuthentic: the record was changed by somebody who has not the key.
        UnknownCodec: a codec is not known here.

    """
    keys = keys_for(options)
    try:
        # No file goes through the others, which may be of a codec or a key that is not here: they pass for empty ones.
        used = {blob.chain for blob in (record.index, *record.files)}
        chains = [Chain.opened(each if at in used else [], keys=keys) for at, each in enumerate(record.chains)]
        check_signature(record, chains)
    except CheckpointError as exc:
        exc.message = f"{where}: {exc.message}"
        raise
    return chains


class _WhenNeeded:
    """Keys that are looked for when they are first needed."""

    def __init__(self, find: Callable[[], KeySource | None]) -> None:
        self._find = find
        self._source: KeySource | None = None

    def _found(self) -> KeySource:
        self._source = self._source or self._find()
        if self._source is None:  # unreachable: nobody looks where nothing was given
            raise KeyMissing("no key was given")
        return self._source

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        return self._found().wrap(data_key)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        return self._found().unwrap(key_id, wrapped)
