"""
What a state has besides tensors, kept in the header of a safetensors file: nesting, plain values, ties, arrays of numpy.

Tools that know safetensors read the tensors and pass over this text. It is JSON; plain values and the nesting stand in
it in the encoding of `format.values` and `format.tree`, as base64, so that they come back exactly, and no pickle is
needed for them.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from shardkeep.errors import MalformedFile, UnsupportedVersion

STATE_KEY = "shardkeep.state"
_VERSION = 1


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a state but its tensors."""

    version: int = _VERSION
    step: int | None = None
    meta: dict[str, Any] = {}
    """From the commit record."""
    tree: str
    """The skeleton, encoded."""
    values: dict[str, str]
    """Plain values by flat name, encoded."""
    numpy: list[str] = []
    """Tensors that were arrays of numpy."""
    ties: dict[str, str] = {}
    """Names of tensors that share the memory of another one, which is the one in the file."""


def encode_state(state: KeptState) -> str:
    """Write it as the text that stands in a header."""
    return msgspec.json.encode(state).decode()


def decode_state(text: str, *, where: str) -> KeptState:
    """Read it; `where` is named in errors."""
    try:
        found = msgspec.json.decode(text, type=KeptState)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise MalformedFile(f"{where}: {STATE_KEY} cannot be read: {exc}", file=where) from exc
    if found.version > _VERSION:
        raise UnsupportedVersion(
            f"{where}: {STATE_KEY} is of version {found.version}; this shardkeep reads up to {_VERSION}",
            hint="upgrade shardkeep",
        )
    return found


def to_text(raw: bytes) -> str:
    """Spell bytes."""
    return base64.b64encode(raw).decode()


def to_bytes(text: str, *, where: str) -> bytes:
    """Return the bytes that a text spells."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as exc:
        raise MalformedFile(f"{where}: {STATE_KEY} holds what is no base64", file=where) from exc
