"""
Torch's layout: the files of a checkpoint, and the digests that we store beside them.

    .metadata               what the checkpoint holds and where; written last, it makes the checkpoint exist
    __<rank>_<n>.distcp     items, end to end
    __<rank>_<n>.distcp.sums    digests of the blocks of that file; torch ignores them
    __<rank>.metadata       instead of `.metadata`, if each rank saved on its own
    .metadata.<digest>.columns  a copy of `.metadata` that older versions of shardkeep wrote; nothing reads it

`.metadata` names the data files. A save that replaces a checkpoint writes files with other names, so that the committed
checkpoint stays complete until the new `.metadata` takes its place.
"""

from __future__ import annotations

import re

import msgspec

from shardkeep.errors import BlobNotFound, ChecksumMismatch, MalformedFile
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, checksum_text, digest
from shardkeep.format.data_file import count_blocks
from shardkeep.storage.base import Gets

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
SUMS_SUFFIX = ".sums"
MAX_METADATA_NBYTES = 4 << 30
_MAX_SUMS_NBYTES = 1 << 30
_MAX_BLOCK_NBYTES = 1 << 30
_OURS = re.compile(r"__\d+_\d+\.distcp(\.sums)?|(__\d+)?\.metadata\.[0-9a-f]{32}\.columns")
_RANKS_OWN = re.compile(r"__\d+\.metadata")
_WRITER = re.compile(r"__(\d{1,9})_")


def is_data(name: str) -> bool:
    """Say whether a name is that of a data file, its digests, or a copy of the metadata; all of them may be removed."""
    return _OURS.fullmatch(name) is not None


def is_metadata(name: str) -> bool:
    """Return whether a file is the metadata of a checkpoint, or of what one rank saved."""
    return name == METADATA_NAME or _RANKS_OWN.fullmatch(name) is not None


def writer_rank(name: str) -> int | None:
    """Return the rank that wrote a data file, by its name."""
    found = _WRITER.match(name)
    return int(found[1]) if found else None


def metadata_name(rank: int | None) -> str:
    """Return the name of the metadata of a checkpoint, or of what one rank saved on its own."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


class Sums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Size and checksum of a data file; sent to the coordinator and stored in the metadata."""

    nbytes: int
    block_nbytes: int
    checksum: str
    """Checksum of the file with the digests."""


class _SumsFile(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: str
    nbytes: int
    block_nbytes: int
    digests: bytes


def encode_sums(nbytes: int, block_nbytes: int, digests: bytes) -> tuple[Sums, bytes]:
    """Return what the metadata say of a data file, and the contents of the file with its digests."""
    file = _SumsFile(algorithm=ALGORITHM, nbytes=nbytes, block_nbytes=block_nbytes, digests=digests)
    data = msgspec.msgpack.encode(file)
    return Sums(nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum_text(digest(data))), data


def read_sums(store: Gets, name: str, sums: Sums) -> bytes | None:
    """
    Read the digests of a data file; None if their file is missing.

    Raises:
        ChecksumMismatch: the file with the digests is damaged.

    """
    own = f"{name}{SUMS_SUFFIX}"
    try:
        data = store.get(own, limit=_MAX_SUMS_NBYTES)
    except BlobNotFound:
        return None
    if checksum_text(digest(data)) != sums.checksum:
        raise ChecksumMismatch(
            f"{own}: the digests are not what was saved",
            hint=f"delete {own} to read {name} without checking it",
            file=own,
            offset=0,
        )
    try:
        file = msgspec.msgpack.decode(data, type=_SumsFile)
    except msgspec.MsgspecError as exc:
        raise MalformedFile(f"{own}: not a file of digests: {exc}", file=own) from exc
    if (
        file.algorithm != ALGORITHM
        or not 0 < file.block_nbytes <= _MAX_BLOCK_NBYTES
        or (file.nbytes, file.block_nbytes) != (sums.nbytes, sums.block_nbytes)
        or len(file.digests) != count_blocks(file.nbytes, file.block_nbytes) * DIGEST_NBYTES
    ):
        raise MalformedFile(f"{own}: these are not the digests of {name}", file=own)
    return file.digests
