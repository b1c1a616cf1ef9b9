"""
Digests that lie beside the data file they are of, as the store had no place for them in it.
"""

from __future__ import annotations

from contextlib import closing

from shardkeep.errors import BlobNotFound, ChecksumMismatch, WrongSize
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.header import apart_nbytes, decode_apart
from shardkeep.format.record import FileEntry
from shardkeep.layout.rereading import Again, decoded
from shardkeep.store.protocol import Opens


def read_apart(store: Opens, entry: FileEntry, blocks: int) -> tuple[bytes, bytes]:
    """
    Return the digest of a data file's header, and those of all its blocks, from the file beside it.

    Raises:
        WrongSize: that is missing, or is not as large as it must be.
        ChecksumMismatch: it is not what was written.

    """
    name = entry.blocks or ""
    try:
        reader = store.open(name)
    except BlobNotFound as exc:
        raise WrongSize(f"{name}: the file is missing", hint="restore it from a copy", file=name) from exc
    with closing(reader):
        if reader.nbytes != apart_nbytes(blocks):
            raise WrongSize(
                f"{name}: {reader.nbytes} bytes, and {apart_nbytes(blocks)} are the digests of {entry.name}",
                hint="the file was cut short or changed after the save",
                file=name,
            )
        data = bytearray(reader.nbytes)
        reader.read_into(0, memoryview(data))

    def decode(data: bytearray) -> tuple[bytes, bytes]:
        if text_of(digest(data)) != entry.checksum:
            raise ChecksumMismatch(
                f"{name}: the digests of {entry.name} have checksum {text_of(digest(data))}, the commit record says"
                f" {entry.checksum}",
                hint="the file was damaged after the save",
                file=name,
                offset=0,
            )
        return decode_apart(bytes(data), blocks=blocks, where=name)

    with closing(Again(name, store)) as again:
        return decoded(data, decode, lambda: again.read(0, len(data)), name=name)
