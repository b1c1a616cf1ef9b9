"""
The checksum of zip files, for data that several threads hash in parts.

`zlib.crc32` goes through data in order; here the checksums of two parts that follow each other become that of both. A
checksum is a polynomial over two elements, kept with its highest power in the lowest bit: appending n bytes multiplies
it by x to the power of 8n, modulo the polynomial of CRC-32.
"""

from __future__ import annotations

from functools import cache, lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine(first: int, second: int, second_nbytes: int) -> int:
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
