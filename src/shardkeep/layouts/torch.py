"""
Torch's layout: which files a checkpoint of it is made of, and the digests we keep beside them.

    .metadata               what there is and where it lies; written last, it makes the checkpoint exist
    __<rank>_<n>.distcp     items, end to end
    __<rank>_<n>.distcp.sums    digests of the blocks of that file; torch does not look at them
    __<rank>.metadata       instead of `.metadata`, where each rank saved on its own
    .metadata.<digest>.columns  a copy of `.metadata` that older versions of shardkeep wrote; nothing reads it

`.metadata` names the files, so a save that replaces another one writes files of other names: what is committed stays
whole until the new `.metadata` takes its place.
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
    """Tell whether a file makes a checkpoint, or a rank's part of one, exist."""
    return name == METADATA_NAME or _RANKS_OWN.fullmatch(name) is not None


def writer_rank(name: str) -> int | None:
    """Tell which rank wrote a data file, by its name."""
    found = _WRITER.match(name)
    return int(found[1]) if found else None


def metadata_name(rank: int | None) -> str:
    """Name the metadata of a checkpoint, or of what a rank saved on its own."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


class Sums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is known of a data file; travels to the coordinator and stands in the metadata."""

    nbytes: int
    block_nbytes: int
    checksum: str
    """Of the file with the digests."""


class _SumsFile(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: str
    nbytes: int
    block_nbytes: int
    digests: bytes


def encode_sums(nbytes: int, block_nbytes: int, digests: bytes) -> tuple[Sums, bytes]:
    """Make the file of digests that belongs to a data file, and what is to be known of both."""
    file = _SumsFile(algorithm=ALGORITHM, nbytes=nbytes, block_nbytes=block_nbytes, digests=digests)
    data = msgspec.msgpack.encode(file)
    return Sums(nbytes=nbytes, block_nbytes=block_nbytes, checksum=checksum_text(digest(data))), data


def read_sums(store: Gets, name: str, sums: Sums) -> bytes | None:
    """
    Read the digests of a data file; None where they are gone.

    Raises:
        ChecksumMismatch: the file of digests is not what was saved.

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
