"""
The user's keys, which wrap the data key of each checkpoint.

Every checkpoint is encrypted with a data key of its own. The data key is stored with the checkpoint, wrapped (encrypted)
by the user's key, which never encrypts data itself. So one key serves any number of checkpoints, can stay inside a key
management service, and is rotated by wrapping data keys again, without rewriting data.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Union, runtime_checkable

from shardkeep.codecs.base import require_module
from shardkeep.errors import InvalidKey, KeyMissing, WrongKey

KEY_NBYTES = 32
_HEX = re.compile(rf"[0-9a-fA-F]{{{2 * KEY_NBYTES}}}")
_LIKE_KEY = re.compile(r"[0-9A-Za-z+/_-]{40,}=*")
"""A key in hex or base64, perhaps with some characters missing or added. Shorter text counts as a file name."""


@runtime_checkable
class KeySource(Protocol):
    """Wraps and unwraps data keys: a `KeyRing`, or a user's object that calls a key management service."""

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        """Encrypt a data key; return the id of the wrapping key, and the result."""

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """Return the data key, or raise `WrongKey` if it was wrapped by another key."""


class KeyRing:
    """Keys in memory: the first wraps, all of them unwrap. To rotate, put a new key before the old ones."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys: dict[str, bytes] = {}
        for key in keys:
            if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_NBYTES:
                # The value is not shown: it may be most of a key.
                raise InvalidKey(f"a key must have {KEY_NBYTES} bytes", hint="make one with shardkeep.new_key()")
            # The id: a hash of 256 random bits reveals nothing; the prefix separates it from other uses of the key.
            key_id = hashlib.sha256(b"shardkeep key id\0" + key).hexdigest()[:16]
            self._keys.setdefault(key_id, bytes(key))
        if not self._keys:
            raise InvalidKey("no key was given", hint="make one with shardkeep.new_key()")

    @classmethod
    def from_text(cls, text: str, *, named: str = "the text") -> KeyRing:
        """
        Read keys from text: one per line, in hex or base64; empty lines and lines that begin with "#" are ignored.

        Raises:
            InvalidKey: a line is not a key, or there is none. The message has the number of the line, not its text.

        """
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        keys = [_key_of(line, f"line {number} of {named}") for number, line in lines if line and line[0] != "#"]
        if not keys:
            raise InvalidKey(f"there is no key in {named}", hint="make one with shardkeep.new_key()")
        return cls(keys)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> KeyRing:
        """
        Read keys from a file; see `from_text`.

        Raises:
            KeyMissing: the file cannot be read.
            InvalidKey: it does not contain keys; or it does not exist, and the path may be a key itself.

        """
        named = f"the key file {os.fspath(path)}"
        try:
            with open(path, encoding="ascii") as file:
                return cls.from_text(file.read(), named=named)
        except OSError as exc:
            if _may_be_key(os.fspath(path)):
                # Without the cause, whose text contains the path.
                raise InvalidKey(
                    "there is no such key file; its path is not shown, because it may be a key",
                    hint="pass the path of a key file, or KeyRing.from_text(text) for a key",
                ) from None
            raise KeyMissing(f"{named} cannot be read: {exc.strerror or exc}") from exc
        except UnicodeDecodeError as exc:
            raise InvalidKey(f"{named} is not text", hint="write one key per line, in hex or base64") from exc

    @property
    def ids(self) -> list[str]:
        return list(self._keys)

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        """AES key wrap, RFC 3394."""
        key_id, key = next(iter(self._keys.items()))
        return key_id, _keywrap().aes_key_wrap(key, data_key)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        key = self._keys.get(key_id)
        if key is None:
            raise WrongKey(
                f"the checkpoint is encrypted with the key {key_id}; the given keys are {', '.join(self._keys)}",
                hint="add the key with this id to the key file, after the others",
                key_id=key_id,
            )
        keywrap = _keywrap()
        try:
            data_key: bytes = keywrap.aes_key_unwrap(key, wrapped)
        except (keywrap.InvalidUnwrap, ValueError) as exc:
            raise WrongKey(
                f"the data key was not wrapped by the key {key_id}, as the record says, or was changed since",
                hint="the commit record was edited or damaged: use another checkpoint",
                key_id=key_id,
            ) from exc
        return data_key

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._keys)})"


class CachedKeys:
    """A key source that asks once per data key. Its cache is secret: it may go through pipes, never to files."""

    def __init__(self, find: Callable[[], KeySource | None] = lambda: None, known: Mapping[str, str] = {}) -> None:
        """`find` returns the source when a key is first needed: not for a checkpoint that is not encrypted."""
        self._find = find
        self.known = dict(known)
        """Data keys by their wrapped form, both in hex."""

    @functools.cached_property
    def _source(self) -> KeySource | None:
        return self._find()

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        if self._source is None:
            raise KeyMissing("there is no key to encrypt with")
        key_id, wrapped = self._source.wrap(data_key)
        self.known[wrapped.hex()] = data_key.hex()
        return key_id, wrapped

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        found = self.known.get(wrapped.hex())
        if found is not None:
            return bytes.fromhex(found)
        if self._source is None:
            raise KeyMissing(f"the checkpoint is encrypted with the key {key_id}, and no key was given")
        data_key = self._source.unwrap(key_id, wrapped)
        self.known[wrapped.hex()] = data_key.hex()
        return data_key

    def __repr__(self) -> str:
        return f"CachedKeys({len(self.known)} known)"


Keys = Union[KeySource, Callable[[], str | bytes], "os.PathLike[str]", str, None]
"""What a user may pass: a key source, a function that returns a key or key text, or the path of a key file."""


def key_source(keys: Keys) -> KeySource | None:
    """Return the key source for what a user passed; a function returns a key (32 bytes), or text as in a key file."""
    if keys is None or isinstance(keys, KeySource):
        return keys
    if isinstance(keys, (str, os.PathLike)):
        return KeyRing.from_file(keys)
    if callable(keys):
        given: object = keys()
        if not isinstance(given, (str, bytes, bytearray)):
            what = "None" if given is None else f"a {type(given).__name__}"
            raise KeyMissing(
                f"the function for keys returned {what}",
                hint="it must return a key of 32 bytes, or text as in a key file; is what it reads set on this machine?",
            )
        return KeyRing.from_text(given) if isinstance(given, str) else KeyRing([bytes(given)])
    raise InvalidKey(
        f"a {type(keys).__name__} is not a source of keys",
        hint="pass KeyRing.from_file(path), KeyRing.from_text(text), a function, or an object with wrap and unwrap",
    )


def new_key() -> str:
    """Return a new key as a line of a key file: 64 hex digits."""
    return secrets.token_hex(KEY_NBYTES)


def _key_of(line: str, where: str) -> bytes:
    try:
        plain = line.replace("-", "+").replace("_", "/")
        key = bytes.fromhex(line) if _HEX.fullmatch(line) else base64.b64decode(plain, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_NBYTES:
        raise InvalidKey(
            f"{where} is not a key: {KEY_NBYTES} bytes in hex or base64", hint="make one with shardkeep.new_key()"
        )
    return key


def _may_be_key(path: str) -> bool:
    """Return whether a path may be a key: not if the file exists, or its directory does."""
    folder = os.path.dirname(path)
    if os.path.lexists(path) or (os.path.isdir(folder) and folder.strip("/")):  # base64 may begin with "/"
        return False
    return any(_LIKE_KEY.fullmatch(line.strip()) for line in path.splitlines())


def _keywrap() -> Any:
    return require_module("cryptography.hazmat.primitives.keywrap", package="shardkeep[crypto]", wanted_by="encryption")
