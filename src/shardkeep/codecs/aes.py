"""
Encryption with AES-256-GCM, frame by frame.

Every checkpoint has a data key of its own (`keys`). Each file has a key derived from it and from the file's name; each
frame has a nonce of 96 random bits, stored before it. The place of a frame is authenticated with it: a frame that was
changed, cut, moved within its file, or taken from another file or checkpoint is an error. Random nonces are safe even
if a process is restored from an image and writes the same frames again with other contents.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from functools import lru_cache
from typing import Any

import numpy as np

from shardkeep.codecs.base import WRAPPED, Codec, CodecConfig, CodecRecord, FramePlace, invalid_record, require_module
from shardkeep.codecs.keys import KEY_NBYTES, KeySource
from shardkeep.errors import KeyMissing, NotAuthentic, WrongKey

_NONCE_NBYTES = 12
_TAG_NBYTES = 16
_SALT_NBYTES = 32
_CIPHERS = "hazmat.primitives.ciphers"
_PLACE = struct.Struct("<QQQ")
_HINT = "it was damaged or tampered with: use another checkpoint, or another copy of this one"
_KEY_HINT = "set SHARDKEEP_KEY_FILE to a file with {}, or pass one in the options"


class Aes(CodecConfig, frozen=True):
    """Encrypts with AES-256-GCM. Put it last, because encrypted bytes do not shrink. Needs the package `cryptography`."""

    name = "aes"

    def begin(self, keys: KeySource | None) -> CodecRecord:
        """Choose the data key of a checkpoint, and record it wrapped by the user's key."""
        _cryptography(_CIPHERS)
        if keys is None:
            raise KeyMissing(
                "the codec 'aes' encrypts, and no key was given",
                hint=_KEY_HINT.format("a key") + "; shardkeep.new_key() makes one",
            )
        key_id, wrapped = keys.wrap(secrets.token_bytes(KEY_NBYTES))
        salt, written = secrets.token_hex(_SALT_NBYTES), {"key_id": key_id, "key": wrapped.hex()}
        return {**super().begin(keys), "salt": salt, WRAPPED: written}

    @classmethod
    def open(cls, recorded: CodecRecord, keys: KeySource | None) -> Codec:
        _cryptography(_CIPHERS)
        try:
            salt = bytes.fromhex(recorded["salt"])
        except (KeyError, TypeError, ValueError) as exc:
            raise invalid_record(cls.name, "'salt' is missing or malformed") from exc
        return _AesCodec(_data_key(recorded, keys), salt)

    @classmethod
    def rewrap(cls, recorded: CodecRecord, keys: KeySource) -> CodecRecord:
        key_id, wrapped = keys.wrap(_data_key(recorded, keys))
        return {**recorded, WRAPPED: {"key_id": key_id, "key": wrapped.hex()}}


class _AesCodec:
    def __init__(self, data_key: bytes, salt: bytes) -> None:
        # HKDF (RFC 5869) with SHA-256; every derived key is one block long.
        self._root = hmac.digest(salt, data_key, "sha256")
        self._file_key = lru_cache(maxsize=256)(lambda file: self._derived(b"file\0" + file.encode()))

    def bound(self, nbytes: int) -> int:
        return nbytes + _NONCE_NBYTES + _TAG_NBYTES

    def encode(self, data: memoryview, place: FramePlace) -> memoryview:
        stored = np.empty(self.bound(data.nbytes), np.uint8).data  # a bytearray would be zeroed
        nonce = os.urandom(_NONCE_NBYTES)
        work = self._cipher(place, nonce).encryptor()
        work.authenticate_additional_data(_bound_to(place, data.nbytes))
        stored[:_NONCE_NBYTES] = nonce
        work.update_into(data, stored[_NONCE_NBYTES:])
        work.finalize()
        stored[-_TAG_NBYTES:] = work.tag
        return stored

    def decode(self, data: memoryview, place: FramePlace, most_nbytes: int) -> memoryview:  # noqa: ARG002 - it cannot grow
        plain = np.empty(max(data.nbytes - _NONCE_NBYTES - _TAG_NBYTES, 0), np.uint8).data
        self.decode_into(data, place, plain)
        return plain

    def decode_into(self, data: memoryview, place: FramePlace, into: memoryview) -> int:
        nbytes = data.nbytes - _NONCE_NBYTES - _TAG_NBYTES
        if nbytes < 0 or nbytes > into.nbytes:
            raise NotAuthentic(f"encrypted {place.named} does not have the size it was written with", hint=_HINT)
        nonce, tag = bytes(data[:_NONCE_NBYTES]), bytes(data[data.nbytes - _TAG_NBYTES :])
        work = self._cipher(place, nonce, tag).decryptor()
        work.authenticate_additional_data(_bound_to(place, nbytes))
        try:
            work.update_into(data[_NONCE_NBYTES : data.nbytes - _TAG_NBYTES], into)
            work.finalize()
        except _cryptography("exceptions").InvalidTag as exc:
            message = f"encrypted {place.named} failed authentication: it is not what was written there"
            raise NotAuthentic(message, hint=_HINT, file=place.file, offset=place.offset) from exc
        return nbytes

    def mac(self, data: bytes) -> bytes:
        return hmac.digest(self._derived(b"mac"), data, "sha256")

    def _derived(self, purpose: bytes) -> bytes:
        return hmac.digest(self._root, b"shardkeep aes/1 " + purpose + b"\x01", "sha256")

    def _cipher(self, place: FramePlace, nonce: bytes, tag: bytes | None = None) -> Any:
        ciphers = _cryptography(_CIPHERS)
        return ciphers.Cipher(ciphers.algorithms.AES(self._file_key(place.file)), ciphers.modes.GCM(nonce, tag))


def _cryptography(module: str) -> Any:
    return require_module(f"cryptography.{module}", package="shardkeep[crypto]", wanted_by="the codec 'aes'")


def _data_key(recorded: CodecRecord, keys: KeySource | None) -> bytes:
    try:
        key_id, wrapped = str(recorded[WRAPPED]["key_id"]), bytes.fromhex(recorded[WRAPPED]["key"])
    except (KeyError, TypeError, ValueError) as exc:
        raise invalid_record(Aes.name, f"{WRAPPED!r} is missing or malformed") from exc
    if keys is None:
        raise KeyMissing(
            f"the checkpoint is encrypted with the key {key_id}, and no key was given",
            hint=_KEY_HINT.format("that key"),  # a new key would not decrypt it
            key_id=key_id,
        )
    data_key = keys.unwrap(key_id, wrapped)
    if len(data_key) != KEY_NBYTES:
        raise WrongKey(f"the key {key_id} unwraps a data key of {len(data_key)} bytes, expected {KEY_NBYTES}")
    return data_key


def _bound_to(place: FramePlace, nbytes: int) -> bytes:
    # `nbytes` is the size of what is encrypted, which differs from the plain size if an earlier codec compressed it.
    return _PLACE.pack(place.number, place.offset, place.nbytes) + nbytes.to_bytes(8, "little") + place.file.encode()
