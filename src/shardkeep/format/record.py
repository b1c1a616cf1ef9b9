"""
The commit record: the small JSON file whose presence makes a checkpoint exist.

It names every other file with its size and checksum, and ends in a checksum of itself; `cat` and `jq` still read it.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from shardkeep.errors import CheckpointError, MalformedFile, StateError, UnsupportedVersion
from shardkeep.format import data_file
from shardkeep.format.boxes import IntArray
from shardkeep.options import decodable

RECORD_NAME = "shardkeep.json"
FORMAT = "shardkeep"
VERSION = 2
"""The newest version that is read; written only if the first version is not enough."""
FIRST_VERSION = 1
"""For checkpoints without codecs or sidecars, which every version of shardkeep reads."""
MAX_RECORD_NBYTES = 256 << 20
MOST_CHAINS = 256
_MAX_BLOB_NBYTES = 1 << 62
"""So that offsets and sizes fit into 63 bits."""
_BLOCK_SIZES = frozenset(1 << n for n in range(64) if data_file.ALIGNMENT <= 1 << n <= data_file.MAX_BLOCK_NBYTES)
"""Powers of two, so that any read window consists of whole blocks."""

_META_HINT = "meta takes plain JSON only: text, finite numbers of 64 bits, True, False, None, lists, dicts of text"
BLOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}")
"""Valid names of files of a checkpoint: no separators, no leading dot."""
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")
_MAC = re.compile(r"hmac_sha256:[0-9a-f]{64}")

Recorded = list[dict[str, Any]]


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):  # in no cycle, and there are many
    """A file of a checkpoint. A coded file has all of the last three members, others have none of them."""

    name: str
    nbytes: int
    """Size before codecs."""
    checksum: str
    """Checksum of the part that covers the whole file. If the chain has a secret, a checksum of a MAC of it: otherwise a
    guess of the contents could be confirmed without the key."""
    chain: int | None = None
    """The number of its chain in the record."""
    stored_nbytes: int | None = None
    table_checksum: str | None = None
    """With the footer (`format.frames`)."""
    head_nbytes: int | None = None
    """Of an index with parts (`format.index`): how many of its first bytes say where they are."""
    head_checksum: str | None = None
    """Checksum of these bytes."""

    @property
    def at_rest(self) -> list[tuple[str, int]]:
        return [(self.name, self.nbytes if self.stored_nbytes is None else self.stored_nbytes)]


class FileEntry(Blob, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """
    One data file.

    Its checksum is that of its header, which holds the digest of every block, and so covers every byte of the file. If the
    digests are in a sidecar, it is the checksum of the sidecar, which holds the digest of the header, too.
    """

    header_nbytes: int
    """Where the tensor data begin."""
    block_nbytes: int
    """Tensor data have one digest for each block of this size. 0 for a file of another program, which has no digests; never
    in a commit record."""
    blocks: str | None = None
    """The sidecar with its digests, if its header does not hold them."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of tensor data: everything behind the header."""
        return self.nbytes - self.header_nbytes

    @property
    def at_rest(self) -> list[tuple[str, int]]:
        """Name and size of the stored files: the data file and its sidecar."""
        if self.blocks is None:
            return super().at_rest
        blocks = data_file.count_blocks(self.nbytes - self.header_nbytes, self.block_nbytes)
        return [*super().at_rest, (self.blocks, data_file.sidecar_nbytes(blocks))]


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    tensors: int
    chunks: int
    values: int
    tensor_bytes: int


@decodable
class Record(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    version: int = FIRST_VERSION
    save_id: str
    step: int | None = None
    saved_at: str
    writer: str
    world_size: int
    meta: dict[str, Any] = {}
    totals: Totals
    index: Blob
    """The index file; its checksum covers all of it."""
    files: list[FileEntry]
    chains: list[Recorded] = []
    mac: str | None = None
    """If a chain has a secret: proof that the record was written with the key."""

    @property
    def at_rest(self) -> dict[str, int]:
        """The sizes of all files of the checkpoint except the record, by name."""
        return dict(each for entry in (self.index, *self.files) for each in entry.at_rest)

    @property
    def names(self) -> list[str]:
        """The names of all files of the checkpoint except the record."""
        return list(self.at_rest)

    @property
    def stored_nbytes(self) -> int:
        return sum(self.at_rest.values())


def checked_step(step: Any) -> int | None:
    """Return a step as it is recorded; raise `StateError` if it is not a whole number of 64 bits."""
    if step is None:
        return None
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool) or not -(1 << 63) <= number < 1 << 63:
        raise StateError(f"step is {step!r:.80}", hint="give a whole number of 64 bits, or None")
    return number


def checked_meta(meta: Any) -> dict[str, Any]:
    """Return meta as it is recorded, tuples as lists; raise `StateError` for what JSON would change."""
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise StateError(f"meta is a {type(meta).__name__}", hint=_META_HINT)
    try:
        plain: dict[str, Any] = _plain(meta, "meta")
        msgspec.json.encode(plain)
    except (ValueError, RecursionError) as exc:  # text with surrogates, or nested too deep
        raise StateError(f"meta cannot be written as JSON: {exc}", hint=_META_HINT) from exc
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
    body = msgspec.json.format(msgspec.json.encode(_members(record)), indent=2)
    head = body.rstrip().removesuffix(b"}").rstrip()
    return head + _tail(head)


def authenticated_bytes(record: Record, chains: list[Recorded]) -> bytes:
    """Return the bytes that a record's MAC covers: everything except the MAC, with these chains instead of its own."""
    members = msgspec.to_builtins(_members(msgspec.structs.replace(record, mac=None, chains=chains)))
    # By the json module, whose spelling of fractions is fixed: the MAC must stay valid for as long as the checkpoint.
    return json.dumps(members, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _members(record: Record) -> dict[str, Any]:
    """Return the members to write, those of newer versions only if they are not empty."""
    members = msgspec.structs.asdict(record)
    return {key: value for key, value in members.items() if value or key not in ("chains", "mac")}


def decode_record(data: bytes, where: str) -> Record:
    """Check and decode a record; `where` is named in errors."""
    head, mark, _ = data.rpartition(b',\n  "checksum":')
    if not mark or data != head + _tail(head):
        raise MalformedFile(
            f"{where}: the commit record is damaged: it does not end in its own checksum",
            hint="restore the file from a copy, or use another checkpoint",
            file=RECORD_NAME,
        )
    try:
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        peek = {name: msgspec.json.decode(parts[name]) for name in ("format", "version", "writer") if name in parts}
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
        record = msgspec.json.decode(data, type=Record)
    except CheckpointError:
        raise
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise MalformedFile(f"{where}: the commit record cannot be read: {exc}", file=RECORD_NAME) from exc
    _check(record, where)
    return record


def _tail(head: bytes) -> bytes:
    return b',\n  "checksum": "' + data_file.checksum_text(data_file.digest(head)).encode() + b'"\n}\n'


def _check(record: Record, where: str) -> None:
    blobs: list[Blob] = [record.index, *record.files]
    sound = (
        len(record.chains) <= MOST_CHAINS
        and all(_CHECKSUM.fullmatch(blob.checksum) and 0 <= blob.nbytes < _MAX_BLOB_NBYTES for blob in blobs)
        and all(_is_sound(blob, len(record.chains)) for blob in blobs)
        and all(
            8 <= file.header_nbytes <= min(file.nbytes, data_file.MAX_HEADER_NBYTES)
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
            f"{where}: the commit record names files or codecs in a way no writer does (path tricks, duplicates or sizes)",
            hint="do not trust this checkpoint",
            file=RECORD_NAME,
        )


def _is_sound(blob: Blob, chains: int) -> bool:
    if (blob.head_nbytes is None) != (blob.head_checksum is None):
        return False
    if not 0 <= (blob.head_nbytes or 0) <= blob.nbytes or not _CHECKSUM.fullmatch(blob.head_checksum or blob.checksum):
        return False
    if blob.chain is None or blob.stored_nbytes is None or blob.table_checksum is None:
        return (blob.chain, blob.stored_nbytes, blob.table_checksum) == (None, None, None)
    return (
        0 <= blob.chain < chains
        and 0 <= blob.stored_nbytes < _MAX_BLOB_NBYTES
        and _CHECKSUM.fullmatch(blob.table_checksum) is not None
    )


def _needs_second(record: Record) -> bool:
    return bool(record.chains or record.mac or any(file.blocks for file in record.files))


def versioned(record: Record) -> Record:
    """Return the record with the oldest version number that supports its contents."""
    return msgspec.structs.replace(record, version=VERSION if _needs_second(record) else FIRST_VERSION)


def data_sizes(record: Record) -> IntArray:
    return np.array([file.data_nbytes for file in record.files], np.int64)
