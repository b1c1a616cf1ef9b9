"""
Checksums: xxh3-128, computed while bytes are in host memory and verified when they are read.

xxhash releases the GIL and runs at about memory speed, so checksums are never turned off to save time.
"""

from __future__ import annotations

from functools import cache, lru_cache

import xxhash

ALGORITHM = "xxh3_128"
DIGEST_NBYTES = 16

digest = xxhash.xxh3_128_digest
"""Digest of any bytes-like object: 16 bytes."""


def block_digests(data: memoryview, block_nbytes: int) -> bytes:
    """Return the digests of all blocks of `data`, end to end. The last block may be short."""
    return b"".join([digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)])


def checksum_text(digest_bytes: bytes) -> str:
    """Return a digest as text, as in the commit record."""
    return f"{ALGORITHM}:{digest_bytes.hex()}"


# -- CRC-32 in parts ---------------------------------------------------------------------------------------------------

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
    """Return x to the power of 8 * nbytes."""
    product, bit = _ONE, 3
    while nbytes:
        if nbytes & 1:
            product = _times(_square(bit), product)
        nbytes >>= 1
        bit += 1
    return product


@cache
def _square(times: int) -> int:
    """Return x squared this many times over."""
    if not times:
        return _ONE >> 1
    half = _square(times - 1)
    return _times(half, half)


def _times(a: int, b: int) -> int:
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
