"""
The one checksum: xxh3-128, taken while bytes are in host memory and checked when they come back.

xxhash releases the GIL and runs at about memory speed, so it is never turned off to save time.
"""

from __future__ import annotations

from functools import cache, lru_cache

import xxhash

ALGORITHM = "xxh3_128"
DIGEST_NBYTES = 16

digest = xxhash.xxh3_128_digest
"""Digest of any bytes-like object: 16 bytes."""


def block_digests(data: memoryview, block_nbytes: int) -> bytes:
    """Digest every block of `data`, the last one as long as it is; the digests end to end."""
    return b"".join([digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)])


def checksum_text(digest_bytes: bytes) -> str:
    """Write a digest the way the commit record does."""
    return f"{ALGORITHM}:{digest_bytes.hex()}"


# The checksum of zip files, for data that several threads hash in parts.
#
# `zlib.crc32` goes through data in order; here the checksums of two parts that follow each other become that of both.
# A
# checksum is a polynomial over two elements, kept with its highest power in the lowest bit: appending n bytes
# multiplies
# it by x to the power of 8n, modulo the polynomial of CRC-32.

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two parts laid end to end, from that of each and the length of the second."""
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
