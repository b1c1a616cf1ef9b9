"""
An archive as `torch.save` writes it, with any number of storages, laid out before the first of them is read.

    archive/data.pkl    the pickle of what was saved, in which storages stand as numbers
    archive/byteorder   "little"
    archive/version     "3"
    archive/data/0      the storages, each at a multiple of 64
    archive/data/1
    ...
    directory of the archive

Sizes are known beforehand, so every byte has its place. Checksums are known once a storage has gone by: they stand
behind it and in the directory. What is written is therefore one row, from the first byte to the last: what stands
before storage 0, storage 0, what stands before storage 1, and so on. No torch is needed.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Sequence
from typing import Any

from shardkeep.format.torch_archive import _LOCAL, _MAX32, _SIZES_FOLLOW, _UTF8, _central, _ends, _padding, _wide

ALIGNMENT = 64
"""Every storage begins at a multiple of this, as in torch's files: no element of one lies across such a multiple."""


class ArchiveLayout:
    """Where everything goes in an archive of a pickle and storages of known sizes."""

    def __init__(self, pickled: bytes, sizes: Sequence[int]) -> None:
        """
        Lay an archive out.

        Args:
            pickled: the contents of `data.pkl`.
            sizes: bytes of each storage; number i of them is the one that the pickle calls by the text of i.

        """
        self.sizes = list(sizes)
        self.starts: list[int] = []
        """Where the bytes of each storage begin."""
        self._entries, self._listed = _first_entries(pickled)
        self._headers: list[int] = []
        at = len(self._entries)
        for number, nbytes in enumerate(self.sizes):
            self._headers.append(at)
            at += len(_header(number, nbytes, at))
            self.starts.append(at)
            at += nbytes + len(_descriptor(nbytes, 0))
        self._directory_at = at
        self.nbytes = at + len(self._directory([0] * len(self.sizes)))
        """Size of the whole archive."""

    def before(self, number: int, crcs: Sequence[int]) -> bytes:
        """
        Return what stands between storage `number` and the one before it; past the last one, what ends the archive.

        `crcs` are the CRC-32 of at least the storages before that number.
        """
        parts = [self._entries] if number == 0 else [_descriptor(self.sizes[number - 1], crcs[number - 1])]
        if number < len(self.sizes):
            parts.append(_header(number, self.sizes[number], self._headers[number]))
        else:
            parts.append(self._directory(crcs))
        return b"".join(parts)

    def _directory(self, crcs: Sequence[int]) -> bytes:
        rows = zip(self.sizes, self._headers, crcs, strict=True)
        entries = [
            _central(_name(n), _UTF8 | _SIZES_FOLLOW, crc, nbytes, at) for n, (nbytes, at, crc) in enumerate(rows)
        ]
        listed = b"".join([*self._listed, *entries])
        return listed + _ends(len(self._listed) + len(entries), self._directory_at, len(listed))


def _first_entries(pickled: bytes) -> tuple[bytes, list[bytes]]:
    """Return the entries before the storages, and what the directory says of each."""
    entries, listed = bytearray(), []
    for name, data in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        raw, crc = f"archive/{name}".encode(), zlib.crc32(data)
        listed.append(_central(raw, _UTF8, crc, len(data), len(entries)))
        extra, size = (_wide(len(data), len(data)), _MAX32) if len(data) >= _MAX32 else (b"", len(data))
        entries += _LOCAL.pack(b"PK\3\4", 0, _UTF8, 0, 0, 0, crc, size, size, len(raw), len(extra))
        entries += raw + extra + data
    return bytes(entries), listed


def _name(number: int) -> bytes:
    return b"archive/data/%d" % number


def _header(number: int, nbytes: int, at: int) -> bytes:
    """Return what stands directly before a storage, from `at` of the file on."""
    name = _name(number)
    # The reader must know that 8 bytes hold each size that follows.
    wide = _wide(0, 0) if nbytes >= _MAX32 else b""
    size = _MAX32 if wide else 0
    extra = wide + _padding(-(at + _LOCAL.size + len(name) + len(wide)) % ALIGNMENT, ALIGNMENT)
    fields: tuple[Any, ...] = (b"PK\3\4", 0, _UTF8 | _SIZES_FOLLOW, 0, 0, 0, 0, size, size, len(name), len(extra))
    return _LOCAL.pack(*fields) + name + extra


def _descriptor(nbytes: int, crc: int) -> bytes:
    """Return what stands directly behind a storage."""
    return b"PK\7\x08" + struct.pack("<I2Q" if nbytes >= _MAX32 else "<3I", crc, nbytes, nbytes)
