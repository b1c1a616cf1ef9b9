"""
Whose keys a call uses: those it was given in its options, or those that the environment names. No torch.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.codec.keys import KeyRing, KeySource, RememberedKeys, key_source
from shardkeep.codec.problems import KeyMissing
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
