"""
The commit record: the small JSON file whose presence makes a checkpoint exist.

It names every other file with its size and checksum, and carries a checksum of itself as its last member, so that no
byte of it can change unnoticed while `cat` and `jq` still read it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shardkeep.errors import CheckpointError, MalformedFile, StateError, UnsupportedVersion
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.header import ALIGNMENT, MAX_BLOCK_NBYTES, MAX_HEADER_NBYTES

RECORD_NAME = "shardkeep.json"
FORMAT = "shardkeep"
VERSION = 1
MAX_RECORD_NBYTES = 256 << 20
_MAX_BLOB_NBYTES = 1 << 62
"""Offsets and sizes stay numbers of 63 bits."""
_BLOCK_SIZES = frozenset({ALIGNMENT << n for n in range((MAX_BLOCK_NBYTES // ALIGNMENT).bit_length())})
"""Powers of two, so that any window of reads is whole blocks."""

_META_HINT = (
    "meta takes plain JSON values only: text, finite numbers of 64 bits, True, False, None, lists, dicts of text"
)
BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")
"""What a file of a checkpoint may be called: no separators, no dot first."""
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One data file."""

    name: str
    nbytes: int
    header_nbytes: int
    """Where tensor data begins."""
    block_nbytes: int
    """Tensor data is checksummed in blocks of this size; the digests are in the file's header. 0 for a file of another
    program that took none; never in a commit record."""
    checksum: str
    """Of the header, which holds the digest of every block: so of every byte of the file."""


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The index file."""

    name: str
    nbytes: int
    checksum: str


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the checkpoint, counted."""

    tensors: int
    chunks: int
    values: int
    tensor_bytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the commit record says."""

    format: str = FORMAT
    version: int = VERSION
    save_id: str
    step: int | None = None
    saved_at: str
    writer: str
    world_size: int
    meta: dict[str, Any] = {}
    totals: Totals
    index: IndexEntry
    files: list[FileEntry]

    @property
    def names(self) -> list[str]:
        """The files that make up the checkpoint, but for the record itself."""
        return [self.index.name, *(file.name for file in self.files)]


def checked_step(step: Any) -> int | None:
    """Return a step as the record keeps it; raise `StateError` for one that is no whole number of 64 bits."""
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool) or not -(1 << 63) <= number < 1 << 63:
        raise StateError(f"step is {step!r}", hint="give a whole number of 64 bits, or None")
    return number


def checked_meta(meta: Any) -> dict[str, Any]:
    """Return meta as the record gives it back, tuples as lists; raise `StateError` for what JSON would change."""
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise StateError(f"meta is a {type(meta).__name__}", hint=_META_HINT)
    try:
        plain: dict[str, Any] = _plain(meta, "meta")
        same = msgspec.json.decode(msgspec.json.encode(plain)) == plain
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
        raise StateError(f"meta cannot be written as JSON: {exc}", hint=_META_HINT) from exc
    if not same:
        raise StateError("meta cannot be written as JSON: it would come back changed", hint=_META_HINT)
    return plain


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise StateError(f"{path} cannot be written as JSON: it has the key {key!r}", hint=_META_HINT)
        return {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{at}]") for at, item in enumerate(value)]
    if (
        value is None
        or type(value) in (str, bool)
        or (type(value) is int and -(1 << 63) <= value < 1 << 64)
        or (type(value) is float and math.isfinite(value))
    ):
        return value
    shown = repr(value) if isinstance(value, (int, float)) else f"a {type(value).__name__}"
    raise StateError(f"{path} cannot be written as JSON: it is {shown}", hint=_META_HINT)


def encode_record(record: Record) -> bytes:
    """Write a record as JSON that ends in its own checksum."""
    try:
        body = msgspec.json.format(msgspec.json.encode(record), indent=2)
    except (TypeError, ValueError, RecursionError) as exc:
        raise StateError(f"meta cannot be written as JSON: {exc}", hint=_META_HINT) from exc
    head = body.rstrip().removesuffix(b"}").rstrip()
    return head + _tail(head)


def decode_record(data: bytes, where: str) -> Record:
    """Check and read a record; `where` is named in errors."""
    head, mark, _ = data.rpartition(b',\n  "checksum":')
    if not mark or data != head + _tail(head):
        raise MalformedFile(
            f"{where}: the commit record is damaged: it does not end in its own checksum",
            hint="restore the file from a copy, or use another checkpoint",
            file=RECORD_NAME,
        )
    try:
        peek = msgspec.json.decode(data, type=dict[str, Any])
        if peek.get("format") != FORMAT:
            raise MalformedFile(f"{where}: not a shardkeep commit record", file=RECORD_NAME)
        if not isinstance(peek.get("version"), int) or peek["version"] > VERSION:
            raise UnsupportedVersion(
                f"{where}: format version {peek.get('version')!r}, written by {peek.get('writer')!r};"
                f" this shardkeep reads up to {VERSION}",
                hint="upgrade shardkeep",
            )
        if peek["version"] < 1:
            raise MalformedFile(f"{where}: there never was a format version {peek['version']}", file=RECORD_NAME)
        record = msgspec.convert(peek, Record)
    except CheckpointError:
        raise
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise MalformedFile(f"{where}: the commit record cannot be read: {exc}", file=RECORD_NAME) from exc
    _check(record, where)
    return record


def _tail(head: bytes) -> bytes:
    return b',\n  "checksum": "' + text_of(digest(head)).encode() + b'"\n}\n'


def _check(record: Record, where: str) -> None:
    blobs: list[IndexEntry | FileEntry] = [record.index, *record.files]
    names = [blob.name for blob in blobs]
    sound = (
        all(BLOB_NAME.fullmatch(name) and name != RECORD_NAME for name in names)
        and len(set(names)) == len(names)
        and all(_CHECKSUM.fullmatch(blob.checksum) and 0 <= blob.nbytes < _MAX_BLOB_NBYTES for blob in blobs)
        and all(
            8 <= file.header_nbytes <= min(file.nbytes, MAX_HEADER_NBYTES) and file.block_nbytes in _BLOCK_SIZES
            for file in record.files
        )
    )
    if not sound:
        raise MalformedFile(
            f"{where}: the commit record names files in a way no writer does (path tricks, duplicates or sizes)",
            hint="do not trust this checkpoint",
            file=RECORD_NAME,
        )
