"""
Columns of numbers in one file: what the index is made of, and the columns beside torch's `.metadata`.

    magic | u32 length | msgpack header | sections, each on a 64-byte boundary

The header names each section with its number type, shape, place and digest, so that one section can be read without
the others. Whole numbers that are not negative are stored in the narrowest type that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shardkeep.errors import ChecksumMismatch, MalformedFile
from shardkeep.format.checksum import digest

_ALIGN = 64
_Table = list[tuple[str, str, tuple[int, ...], int, bytes]]


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """Which sections a file may have, by name."""

    texts: Collection[str]
    """Bytes."""
    matrices: Collection[str]
    columns: Collection[str]


def pack_sections(magic: bytes, sections: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Write sections."""
    table: _Table = []
    body = bytearray()
    for name, column in sections.items():
        narrow = _narrow(column)
        raw = narrow.tobytes()
        table.append((name, narrow.dtype.str, narrow.shape, len(body), digest(raw)))
        body += raw
        body += bytes(-len(body) % _ALIGN)
    header = msgspec.msgpack.encode(table)
    start = len(magic) + 4 + len(header)
    return b"".join((magic, len(header).to_bytes(4, "little"), header, bytes(-start % _ALIGN), body))


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Whatever bytes that were not written by us make go wrong inside is a `MalformedFile` that names the file."""
    try:
        yield
    except (MalformedFile, ChecksumMismatch):
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, msgspec.MsgspecError, RecursionError) as exc:
        raise MalformedFile(f"{where}: not a readable index: {exc}", file=where) from exc


def unpack_sections(magic: bytes, data: memoryview, shapes: Shapes, *, where: str) -> dict[str, npt.NDArray[Any]]:
    """
    Read the sections that are known, as views of the data; to be called inside `decoding`.

    Raises:
        ChecksumMismatch: a section is damaged.
        MalformedFile: it is no such file.
        ValueError, msgspec.MsgspecError: so it is, in other words.

    """
    if data[: len(magic)] != magic:
        raise MalformedFile(f"{where}: not an index: it does not begin with {magic!r}", file=where)
    at = len(magic) + 4
    header_nbytes = int.from_bytes(data[len(magic) : at], "little")
    table = msgspec.msgpack.decode(data[at : at + header_nbytes], type=_Table)
    at += header_nbytes
    at += -at % _ALIGN
    sections: dict[str, npt.NDArray[Any]] = {}
    for name, code, shape, offset, expected in table:
        if not any(name in names for names in (shapes.texts, shapes.matrices, shapes.columns)):
            continue  # of a later writer; not even hashed, for a forged header can name the same bytes a million times
        if (
            name in sections
            or code not in (("|u1",) if name in shapes.texts else ("|u1", "<u2", "<u4", "<u8", "<i8"))
            or len(shape) != (2 if name in shapes.matrices else 1)
            or min(offset, *shape) < 0
        ):
            raise MalformedFile(
                f"{where}: section {name!r} of the index is declared in a way no writer does", file=where
            )
        raw = data[at + offset : at + offset + math.prod(shape) * np.dtype(code).itemsize]
        if digest(raw) != expected:
            raise ChecksumMismatch(f"{where}: section {name!r} of the index is damaged", file=where, offset=at + offset)
        sections[name] = _whole_numbers(np.frombuffer(raw, code).reshape(shape))
    return sections


def _narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if column.dtype.itemsize == 1 or column.size == 0:
        return np.ascontiguousarray(column)
    return np.ascontiguousarray(column, dtype=np.min_scalar_type(int(column.max())).newbyteorder("<"))


def _whole_numbers(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Refuse negative numbers, and those that a signed integer of 64 bits would take for negative."""
    if column.dtype.itemsize < 8:
        return column
    signed = column.view("<i8")
    if signed.size and signed.min() < 0:
        raise ValueError("a number that is negative or beyond 63 bits")
    return signed
