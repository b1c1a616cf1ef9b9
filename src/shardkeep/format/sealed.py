"""A digest behind a pickle, where readers of pickles do not look: damage to the pickle is found."""

from __future__ import annotations

from shardkeep.errors import ChecksumMismatch
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, digest

_MARK = f"shardkeep {ALGORITHM} ".encode()
_SEAL_NBYTES = len(_MARK) + DIGEST_NBYTES


def sealed(raw: bytes) -> bytes:
    """Put the digest behind it."""
    return raw + _MARK + digest(raw)


def unsealed(data: bytes, where: str) -> bytes:
    """Return what was sealed, which must be what the seal is of; what has no seal as it is."""
    raw, seal = data[:-_SEAL_NBYTES], data[-_SEAL_NBYTES:]
    if not seal.startswith(_MARK):
        return data
    if seal[len(_MARK) :] != digest(raw):
        raise ChecksumMismatch(f"{where}: the metadata are not what was saved", file=where, offset=0)
    return raw
