"""
The commit record: the small JSON file whose presence makes a checkpoint exist.

It names every other file with its size and checksum, and carries a checksum of itself as its last member, so that no
byte of it can change unnoticed while `cat` and `jq` still read it.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shardkeep.errors import CheckpointError, MalformedFile, StateError, UnsupportedVersion
from shardkeep.format.checksum import checksum_text, digest
from shardkeep.format.data_file import (
    ALIGNMENT,
    MAX_BLOCK_NBYTES,
    MAX_HEADER_NBYTES,
    count_blocks,
    sidecar_nbytes,
)

RECORD_NAME = "shardkeep.json"
FORMAT = "shardkeep"
VERSION = 2
"""The newest that is read, and written where the first cannot say it."""
FIRST_VERSION = 1
"""Of checkpoints without codecs, whose data files hold their own digests: any reader takes them."""
MAX_RECORD_NBYTES = 256 << 20
MOST_CHAINS = 256
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
_MAC = re.compile(r"hmac_sha256:[0-9a-f]{64}")

Recorded = list[dict[str, Any]]
"""What is recorded of a chain of codecs (`codec.frame_chain`)."""


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of a checkpoint. One that went through codecs has all of the last three members, others have none."""

    name: str
    nbytes: int
    """Before codecs, if any."""
    checksum: str
    """Of what stands for all of it. Where its chain has a secret, of a MAC of that: else whoever guesses what is in the
    file could find out without the key that the guess is right."""
    chain: int | None = None
    """Which of the record's chains it went through."""
    stored_nbytes: int | None = None
    """How large it is in the store."""
    table_checksum: str | None = None
    """Of its table of frames and the footer behind it (`format.frames`)."""

    @property
    def at_rest(self) -> list[tuple[str, int]]:
        """Name and size of what lies in the store."""
        return [(self.name, self.nbytes if self.stored_nbytes is None else self.stored_nbytes)]


class FileEntry(Blob, frozen=True, kw_only=True, omit_defaults=True):
    """
    One data file.

    Its checksum is that of its header, which holds the digest of every block: so of every byte of the file. Where digests
    are kept apart, it is that of the file that holds them, and the header's.
    """

    header_nbytes: int
    """Where tensor data begins."""
    block_nbytes: int
    """Tensor data is checksummed in blocks of this size. 0 for a file of another program that took no digests; never in a
    commit record."""
    blocks: str | None = None
    """The file that holds its digests, where its header does not."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of tensor data: everything behind the header."""
        return self.nbytes - self.header_nbytes

    @property
    def at_rest(self) -> list[tuple[str, int]]:
        """Name and size of what lies in the store: itself, and the file that holds its digests."""
        if self.blocks is None:
            return super().at_rest
        blocks = count_blocks(self.nbytes - self.header_nbytes, self.block_nbytes)
        return [*super().at_rest, (self.blocks, sidecar_nbytes(blocks))]


class IndexEntry(Blob, frozen=True, kw_only=True, omit_defaults=True):
    """The index file. Its checksum is of all of it."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the checkpoint, counted."""

    tensors: int
    chunks: int
    values: int
    tensor_bytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the commit record says."""

    format: str = FORMAT
    version: int = FIRST_VERSION
    save_id: str
    step: int | None = None
    saved_at: str
    writer: str
    world_size: int
    meta: dict[str, Any] = {}
    totals: Totals
    index: IndexEntry
    files: list[FileEntry]
    chains: list[Recorded] = []
    """The chains of codecs that files went through."""
    mac: str | None = None
    """Proves, where a chain has a secret, that nobody changed this record who has not the key."""

    @property
    def at_rest(self) -> dict[str, int]:
        """The sizes of the files that make up the checkpoint, but for the record itself, by name."""
        return dict(each for entry in (self.index, *self.files) for each in entry.at_rest)

    @property
    def names(self) -> list[str]:
        """The files that make up the checkpoint, but for the record itself."""
        return list(self.at_rest)

    @property
    def stored_nbytes(self) -> int:
        """What they take in the store."""
        return sum(self.at_rest.values())


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
        body = msgspec.json.format(msgspec.json.encode(_members(record)), indent=2)
    except (TypeError, ValueError, RecursionError) as exc:
        raise StateError(f"meta cannot be written as JSON: {exc}", hint=_META_HINT) from exc
    head = body.rstrip().removesuffix(b"}").rstrip()
    return head + _tail(head)


def authenticated_bytes(record: Record, chains: list[Recorded]) -> bytes:
    """Return what a record's MAC is of: all it says but the MAC itself, with its chains as they are given here."""
    members = _members(msgspec.structs.replace(record, mac=None, chains=chains))
    # By Python itself, whose spelling of fractions is fixed: a MAC has to hold for as long as the checkpoint.
    return json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _members(record: Record) -> dict[str, Any]:
    """Return what is written: what only newer records have is left out where it says nothing."""
    members: dict[str, Any] = msgspec.to_builtins(record)
    return {key: value for key, value in members.items() if value or key not in ("chains", "mac")}


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
    return b',\n  "checksum": "' + checksum_text(digest(head)).encode() + b'"\n}\n'


def _check(record: Record, where: str) -> None:
    if len(record.chains) > MOST_CHAINS:
        raise MalformedFile(
            f"{where}: the commit record has {len(record.chains)} chains of codecs, and {MOST_CHAINS} are the most",
            hint="do not trust this checkpoint",
            file=RECORD_NAME,
        )
    blobs: list[Blob] = [record.index, *record.files]
    sound = (
        all(_CHECKSUM.fullmatch(blob.checksum) and 0 <= blob.nbytes < _MAX_BLOB_NBYTES for blob in blobs)
        and all(_is_sound(blob, len(record.chains)) for blob in blobs)
        and all(
            8 <= file.header_nbytes <= min(file.nbytes, MAX_HEADER_NBYTES)
            and file.block_nbytes in _BLOCK_SIZES
            and (file.blocks is None or file.chain is None)
            for file in record.files
        )
        and (record.mac is None or _MAC.fullmatch(record.mac))
        and (record.version > FIRST_VERSION or not _needs_second(record))
    )
    if sound:
        named = [record.index.name, *(name for file in record.files for name, _ in file.at_rest)]
        sound = all(BLOB_NAME.fullmatch(name) and name != RECORD_NAME for name in named)
        sound = sound and len(set(named)) == len(named)
    if not sound:
        raise MalformedFile(
            f"{where}: the commit record names files in a way no writer does (path tricks, duplicates or sizes)",
            hint="do not trust this checkpoint",
            file=RECORD_NAME,
        )


def _is_sound(blob: Blob, chains: int) -> bool:
    members = (blob.chain, blob.stored_nbytes, blob.table_checksum)
    if blob.chain is None or blob.stored_nbytes is None or blob.table_checksum is None:
        return members == (None, None, None)
    return (
        0 <= blob.chain < chains
        and 0 <= blob.stored_nbytes < _MAX_BLOB_NBYTES
        and _CHECKSUM.fullmatch(blob.table_checksum) is not None
    )


def _needs_second(record: Record) -> bool:
    return bool(record.chains or record.mac or any(file.blocks for file in record.files))


def versioned(record: Record) -> Record:
    """Return the record with the oldest version that can say what it says."""
    return msgspec.structs.replace(record, version=VERSION if _needs_second(record) else FIRST_VERSION)
