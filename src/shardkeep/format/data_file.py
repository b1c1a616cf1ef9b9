"""
The header of a data file: a valid safetensors header that also carries the digest of every block of the data.

Tensor names, dtypes and offsets are known before a byte is written, so the header is built first with room for the
digests, which are filled in when the last block has been hashed. The header is padded with spaces, as the format
allows, so that data begins on a page and direct I/O works.

A store that takes bytes only in order has no place for digests that are known last: there they are kept apart, in a small
file beside the data file.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import NamedTuple

from shardkeep.errors import MalformedFile, StateError
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, digest

ALIGNMENT = 4096
MIN_BLOCK_NBYTES = 64 << 10
MAX_BLOCK_NBYTES = 1 << 20
MOST_BLOCKS = 4096
"""Blocks grow with the file until there are at most this many, or they are MAX_BLOCK_NBYTES."""
MAX_HEADER_NBYTES = 100_000_000
"""The limit every safetensors reader has."""

_MARK = b'"shardkeep.blocks":"'
_APART_MAGIC = b"SKBLOCK1"
_LARGE_BLOCKS = 128


class HeaderEntry(NamedTuple):
    """One tensor of a data file."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    start: int
    stop: int


def block_nbytes_for(data_nbytes: int) -> int:
    """Choose the block size for a file: small enough that one row is cheap to read, large enough to index."""
    block = MIN_BLOCK_NBYTES
    while block < MAX_BLOCK_NBYTES and data_nbytes > block * MOST_BLOCKS:
        block *= 2
    return block


def count_blocks(data_nbytes: int, block_nbytes: int) -> int:
    """Return how many blocks a file's data has."""
    return -(-data_nbytes // block_nbytes)


def build_header(
    entries: Iterable[HeaderEntry], *, save_id: str, data_nbytes: int, block_nbytes: int, apart: bool = False
) -> bytearray:
    """Write the header with zero digests, which `seal_header` fills in; or without, where they are kept apart."""
    quote = json.encoder.encode_basestring_ascii
    room = "A" * len(base64.b64encode(bytes(DIGEST_NBYTES * count_blocks(data_nbytes, block_nbytes))))
    digests = "" if apart else f',{_MARK.decode()}{room}"'
    metadata = (
        f'{{"format":"pt","shardkeep.checksum":"{ALGORITHM}","shardkeep.save_id":"{save_id}",'
        f'"shardkeep.block_nbytes":"{block_nbytes}"{digests}}}'
    )
    parts = [f'{{"__metadata__":{metadata}']
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise StateError(f"two tensors of one file would be called {entry.name!r}", hint="rename one of them")
        names.add(entry.name)
        shape = ",".join(map(str, entry.shape))
        parts.append(
            f',{quote(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{shape}],"data_offsets":[{entry.start},{entry.stop}]}}'
        )
    parts.append("}")
    text = "".join(parts).encode()
    # Apart, windows of a large file can then begin where the parts of an upload do.
    unit = block_nbytes if apart and data_nbytes >= _LARGE_BLOCKS * block_nbytes else ALIGNMENT
    total = -(-(8 + len(text)) // unit) * unit
    if total > MAX_HEADER_NBYTES:
        raise StateError(
            f"a file with {len(names):,} tensors needs a header of {total:,} bytes, more than safetensors allows"
        )
    header = bytearray((total - 8).to_bytes(8, "little") + text)
    header.extend(b" " * (total - len(header)))
    return header


def seal_header(header: bytearray, digests: bytes | bytearray) -> None:
    """Put the digests of all blocks into a header built for that many."""
    at = header.index(_MARK) + len(_MARK)
    encoded = base64.b64encode(digests)
    header[at : at + len(encoded)] = encoded


def read_block_digests(header: bytes | bytearray | memoryview, *, blocks: int, where: str) -> bytes:
    """Take the digests out of a header whose own checksum was already checked."""
    raw = bytes(header)
    at = raw.find(_MARK)
    end = raw.find(b'"', at + len(_MARK))
    try:
        digests = base64.b64decode(raw[at + len(_MARK) : end], validate=True)
    except (binascii.Error, ValueError):
        digests = b""
    if at < 0 or end < 0 or len(digests) != blocks * DIGEST_NBYTES:
        raise MalformedFile(f"{where}: the header holds no digests for its {blocks} blocks", file=where)
    return digests


def sidecar_nbytes(blocks: int) -> int:
    """Return how large the file is that holds the digests of so many blocks, and the header's."""
    return len(_APART_MAGIC) + DIGEST_NBYTES * (1 + blocks)


def encode_sidecar(header: bytes | bytearray, digests: bytes | bytearray) -> bytes:
    """Write the file that holds a data file's digests: the header's, then those of all blocks."""
    return _APART_MAGIC + digest(header) + digests


def decode_sidecar(data: bytes, *, blocks: int, where: str) -> tuple[bytes, bytes]:
    """Take the digest of the header, and those of all blocks, out of a file whose own checksum was already checked."""
    if len(data) != sidecar_nbytes(blocks) or not data.startswith(_APART_MAGIC):
        raise MalformedFile(f"{where}: it holds no digests for {blocks} blocks", file=where)
    at = len(_APART_MAGIC) + DIGEST_NBYTES
    return data[len(_APART_MAGIC) : at], data[at:]
