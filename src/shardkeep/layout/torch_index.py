"""
The columns beside torch's `.metadata`, read instead of it.

Behind the pickle, under the same seal, stands the digest of the columns; they are a file whose name has that digest in
it. So `.metadata` that anybody else wrote has none, and columns of another `.metadata` are never found. Whatever is
wrong with them, the pickle is there.

Of `.metadata`, only the last bytes are looked at. What is before them may be damaged: the columns, whose digest is
checked, say what was saved.
"""

from __future__ import annotations

import logging
from contextlib import closing
from typing import NamedTuple, Protocol

from shardkeep.errors import BlobNotFound, MalformedFile
from shardkeep.format.checksum import digest
from shardkeep.format.sealed import Tail, tail_of
from shardkeep.format.torch_columns import TorchColumns, decode_columns
from shardkeep.layout.torch_files import MAX_METADATA_NBYTES, columns_name
from shardkeep.store.protocol import BlobReader, Gets, Opens

log = logging.getLogger("shardkeep")

_SMALL_NBYTES = 64 << 10
"""So much is read at first: all of a small file."""


class _Reads(Opens, Gets, Protocol):
    """What looking for columns needs of a store."""


class Found(NamedTuple):
    """Columns, and the `.metadata` they belong to."""

    columns: TorchColumns
    name: str
    """Of the file with the columns."""
    tail: Tail
    metadata_nbytes: int


def read_index(store: _Reads, name: str) -> Found | bytes:
    """
    Read the columns beside `.metadata`; where it has none, or they are not what it says, return `.metadata` itself.

    Raises:
        BlobNotFound: there is no `.metadata`.

    """
    with closing(store.open(name)) as reader:
        if reader.nbytes > MAX_METADATA_NBYTES:
            raise MalformedFile(f"{name}: {reader.nbytes} bytes are more than any metadata have", name=name)
        end = _read(reader, max(0, reader.nbytes - _SMALL_NBYTES))
        tail = tail_of(end)
        found = _find(store, name, tail, reader.nbytes) if tail is not None else None
        return found or (end if len(end) == reader.nbytes else _read(reader, 0))


def _read(reader: BlobReader, start: int) -> bytes:
    data = bytearray(reader.nbytes - start)
    reader.read_into(start, memoryview(data))
    return bytes(data)


def _find(store: Gets, name: str, tail: Tail, nbytes: int) -> Found | None:
    own = columns_name(name, tail.columns)
    try:
        data = store.get(own, limit=MAX_METADATA_NBYTES)
        if digest(data) == tail.columns:
            return Found(decode_columns(data, where=own), own, tail, nbytes)
        log.warning("%s is damaged, so %s is read instead, which takes longer", own, name)
    except BlobNotFound:
        log.info("%s is gone, so %s is read instead, which takes longer", own, name)
    except Exception as exc:  # noqa: BLE001 - file systems of others raise what they like, and the pickle is there
        log.warning("%s cannot be read, so %s is read instead: %s", own, name, exc)
    return None
