"""
The commit record: the small JSON file whose presence makes a checkpoint exist.

It names every other file with its size and checksum, and carries a checksum of itself as its last member, so that no
byte of it can change unnoticed while `cat` and `jq` still read it.
"""

from __future__ import annotations

import re
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

_BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One data file."""

    name: str
    nbytes: int
    header_nbytes: int
    """Where tensor data begins."""
    block_nbytes: int
    """Tensor data is checksummed in blocks of this size; the digests are in the file's header."""
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


def encode_record(record: Record) -> bytes:
    """Write a record as JSON that ends in its own checksum."""
    try:
        body = msgspec.json.format(msgspec.json.encode(record), indent=2)
    except (TypeError, ValueError, RecursionError) as exc:
        raise StateError(f"meta cannot be written as JSON: {exc}", hint="meta takes plain JSON values only") from exc
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
        all(_BLOB_NAME.fullmatch(name) and name != RECORD_NAME for name in names)
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
