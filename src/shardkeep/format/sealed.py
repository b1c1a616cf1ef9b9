"""
A digest behind a pickle, where readers of pickles do not look: damage to the pickle is found.

    pickle | perhaps: mark, digest of the columns beside it | mark, digest of all that is before

The pickle of a large checkpoint has a second file beside it, with the same contents in columns; it is named here.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkeep.errors import ChecksumMismatch
from shardkeep.format.checksum import ALGORITHM, DIGEST_NBYTES, digest

_MARK = f"shardkeep {ALGORITHM} ".encode()
_SEAL_NBYTES = len(_MARK) + DIGEST_NBYTES
_COLUMNS_MARK = b"shardkeep columns "
_COLUMNS_NBYTES = len(_COLUMNS_MARK) + DIGEST_NBYTES
_TAIL_NBYTES = _COLUMNS_NBYTES + _SEAL_NBYTES


class Tail(NamedTuple):
    """What stands behind a pickle that has columns beside it."""

    seal: bytes
    """The digest of all that is before the seal."""
    columns: bytes
    """The digest of the columns."""


def sealed(raw: bytes, columns: bytes | None = None) -> bytes:
    """Put the digest behind it, and before that the digest of its columns, if it has some."""
    if columns is not None:
        raw += _COLUMNS_MARK + columns
    return raw + _MARK + digest(raw)


def tail_of(data: bytes) -> Tail | None:
    """Return what stands at the end; None where it speaks of no columns."""
    tail = data[-_TAIL_NBYTES:]
    columns, seal = tail[:-_SEAL_NBYTES], tail[-_SEAL_NBYTES:]
    if not columns.startswith(_COLUMNS_MARK) or not seal.startswith(_MARK):
        return None
    return Tail(seal[len(_MARK) :], columns[len(_COLUMNS_MARK) :])


def unsealed(data: bytes, where: str) -> bytes:
    """Return what was sealed, which must be what the seal is of; what has no seal as it is."""
    raw, seal = data[:-_SEAL_NBYTES], data[-_SEAL_NBYTES:]
    if not seal.startswith(_MARK):
        return data
    if seal[len(_MARK) :] != digest(raw):
        raise ChecksumMismatch(f"{where}: the metadata are not what was saved", file=where, offset=0)
    return raw if tail_of(data) is None else raw[:-_COLUMNS_NBYTES]
