"""
The one checksum: xxh3-128, taken while bytes are in host memory and checked when they come back.

xxhash releases the GIL and runs at about memory speed, so it is never turned off to save time.
"""

from __future__ import annotations

import xxhash

ALGORITHM = "xxh3_128"
DIGEST_NBYTES = 16

digest = xxhash.xxh3_128_digest
"""Digest of any bytes-like object: 16 bytes."""


def block_digests(data: memoryview, block_nbytes: int) -> bytes:
    """Digest every block of `data`, the last one as long as it is; the digests end to end."""
    return b"".join([digest(data[at : at + block_nbytes]) for at in range(0, len(data), block_nbytes)])


def text_of(digest_bytes: bytes) -> str:
    """Write a digest the way the commit record does."""
    return f"{ALGORITHM}:{digest_bytes.hex()}"
