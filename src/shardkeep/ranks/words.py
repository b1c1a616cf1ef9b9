"""
What ranks write to each other in a phase, and how it looks on the wire: msgpack, checked when it is read.
"""

from __future__ import annotations

import msgspec

from shardkeep.errors import Failure
from shardkeep.ranks.verdict import Verdict


class Doing(msgspec.Struct, frozen=True, array_like=True):
    """What a rank did last, in case it is never heard of again."""

    call: int
    step: int
    phase: str
    title: str


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says to rank 0 in a phase."""

    title: str
    phase: str
    payload: bytes = b""
    failure: Failure | None = None
    left: bool = False
    """It will not read the answer."""
    gave_up: bool = False
    """It waited for rank 0 and rank 0 did not come."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 says to a rank."""

    body: bytes = b""
    failed: bool = False
    """The body is a verdict."""
    missed: bool = False
    """Rank 0 had stopped waiting for this rank."""
    shared: str = ""
    """Key of the body, where it lies elsewhere."""
    readers: int = 0
    """How many ranks read that key; the last deletes it."""
    present: int = 0
    """How many ranks get an answer they are expected to read."""


encode = msgspec.msgpack.Encoder().encode
decode_word = msgspec.msgpack.Decoder(Word).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode
decode_doing = msgspec.msgpack.Decoder(Doing).decode


def last_seen(note: bytes, *, call: int, title: str) -> str:
    """Say what a rank was doing by its last note, an encoded `Doing` or nothing, seen from a rank in this `call`."""
    seen = decode_doing(note) if note else None
    if seen is None:
        return "it has made no call yet"
    if seen.call != call:
        return f"it has not made call {call}; its last was call {seen.call}, {seen.title!r}"
    if seen.title != title:
        return f"it is in {seen.title!r}"
    if seen.phase:
        return f"it was last seen in {seen.phase!r}"
    return "it has begun this call, but no phase of it"
