"""
Checksums, and data files with the checksums of their blocks.

The checksum is xxh3-128, computed while bytes are in host memory and verified when they are read. xxhash releases the
GIL and runs at about memory speed, so checksums cannot be turned off.

A data file begins with a valid safetensors header that also holds the digest of every block of the data. Only the
digests are not known before the first byte is written: the header has room for them, and they are filled in after the
last block has been hashed. It is padded with spaces, so that data begin on a page boundary and direct I/O works.

In a store that takes bytes only in order, the digests are in a sidecar: a small file beside the data file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from shardkeep.errors import MalformedFile, StateError

ALGORITHM = "xxh3_128"
DIGEST_NBYTES = 16

digest = xxhash.xxh3_128_digest
"""Digest of any bytes-like object: 16 bytes."""


def block_digests(data: memoryview, block_nbytes: int) -> bytes:
    return b"".join([digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)])


def checksum_text(digest_bytes: bytes) -> str:
    return f"{ALGORITHM}:{digest_bytes.hex()}"


ALIGNMENT = 4096
MIN_BLOCK_NBYTES = 64 << 10
MAX_BLOCK_NBYTES = 1 << 20
MOST_BLOCKS = 4096
"""Blocks grow with the file until there are at most this many, or they have MAX_BLOCK_NBYTES."""
MAX_HEADER_NBYTES = 100_000_000
"""The limit of every safetensors reader."""

_MARK = b'"shardkeep.blocks":"'
_APART_MAGIC = b"SKBLOCK1"
_LARGE_BLOCKS = 128


class HeaderEntry(NamedTuple):
    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    start: int
    stop: int


def block_nbytes_for(data_nbytes: int) -> int:
    """Choose the block size of a file: small enough to read single rows cheaply, large enough for few digests."""
    block = MIN_BLOCK_NBYTES
    while block < MAX_BLOCK_NBYTES and data_nbytes > block * MOST_BLOCKS:
        block *= 2
    return block


def count_blocks(data_nbytes: int, block_nbytes: int) -> int:
    return -(-data_nbytes // block_nbytes)


def build_header(
    entries: Iterable[HeaderEntry], *, save_id: str, data_nbytes: int, block_nbytes: int, sidecar: bool
) -> bytearray:
    """Build the header with room for digests, which `seal_header` fills in, or without, if they go into a sidecar."""
    metadata = {"format": "pt", "shardkeep.checksum": ALGORITHM, "shardkeep.save_id": save_id}
    metadata["shardkeep.block_nbytes"] = str(block_nbytes)
    if not sidecar:
        digests_nbytes = DIGEST_NBYTES * count_blocks(data_nbytes, block_nbytes)
        metadata["shardkeep.blocks"] = base64.b64encode(bytes(digests_nbytes)).decode()
    # With a sidecar, windows of a large file then begin where the parts of a multipart upload do.
    unit = block_nbytes if sidecar and data_nbytes >= _LARGE_BLOCKS * block_nbytes else ALIGNMENT
    return encode_header(entries, metadata, unit=unit)


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str], *, unit: int = ALIGNMENT) -> bytearray:
    """Make the header of a safetensors file; the data behind it begin at a multiple of `unit`."""
    tensors: dict[str, Any] = {}
    for name, dtype, shape, start, stop in entries:
        if name in tensors:
            raise StateError(f"two tensors of one file would be called {name!r}", hint="rename one of them")
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    head, listed = (json.dumps(each, separators=(",", ":")) for each in ({"__metadata__": metadata}, tensors))
    text = (f"{head[:-1]},{listed[1:]}" if tensors else head).encode()
    total = -(-(8 + len(text)) // unit) * unit
    if total > MAX_HEADER_NBYTES:
        raise StateError(
            f"a file with {len(tensors):,} tensors needs a header of {total:,} bytes, more than safetensors allows",
            hint="spread the tensors over more files",
        )
    header = bytearray((total - 8).to_bytes(8, "little") + text)
    header.extend(b" " * (total - len(header)))
    return header


def seal_header(header: bytearray, digests: bytes | bytearray) -> None:
    at = header.index(_MARK) + len(_MARK)
    encoded = base64.b64encode(digests)
    header[at : at + len(encoded)] = encoded


def most_until_digests_end(blocks: int) -> int:
    """Return how much of a header has the digests at most: they are the last of its metadata, which come before all tensors."""
    return 1024 + 4 * -(-DIGEST_NBYTES * blocks // 3)


def read_block_digests(header: bytes | bytearray | memoryview, *, blocks: int, where: str) -> bytes:
    encoded, end, _ = bytes(header).partition(_MARK)[2].partition(b'"')
    try:
        digests = base64.b64decode(encoded, validate=True)
    except ValueError:
        digests = b""
    if not end or len(digests) != blocks * DIGEST_NBYTES:
        raise MalformedFile(f"{where}: the header does not hold the digests of its {blocks} blocks", file=where)
    return digests


def sidecar_nbytes(blocks: int) -> int:
    return len(_APART_MAGIC) + DIGEST_NBYTES * (1 + blocks)


def encode_sidecar(header: bytes | bytearray, digests: bytes | bytearray) -> bytes:
    return _APART_MAGIC + digest(header) + digests


def decode_sidecar(data: bytes, *, blocks: int, where: str) -> tuple[bytes, bytes]:
    """Return the digest of the header, and those of all blocks, from a sidecar that was already verified."""
    if len(data) != sidecar_nbytes(blocks) or not data.startswith(_APART_MAGIC):
        raise MalformedFile(f"{where}: it does not hold the digests of {blocks} blocks", file=where)
    at = len(_APART_MAGIC) + DIGEST_NBYTES
    return data[len(_APART_MAGIC) : at], data[at:]


# `zlib.crc32` needs data in order. For data that several threads hash in parts, the checksums of two adjacent parts are
# combined here. A checksum is a polynomial over two elements, with its highest power in the lowest bit: appending n bytes
# multiplies it by x to the power of 8n, modulo the polynomial of CRC-32.

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two adjacent parts, from the CRC-32 of each and the length of the second."""
    return _times(_power(second_nbytes), first) ^ second


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    product, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            product = _times(square, product)
        square = _times(square, square)
        nbytes >>= 1
    return product


def _times(a: int, b: int) -> int:
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
