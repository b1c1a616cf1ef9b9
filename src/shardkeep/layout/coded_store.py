"""
Stores in which some blobs go through codecs: all above them reads and writes plain bytes, at any offset.

Which blobs, and through which chain, is known by name: on the way in from rank 0's orders, on the way out from the commit
record.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from shardkeep.codec.frame_chain import Chain
from shardkeep.errors import DamagedCheckpoint, MalformedFile
from shardkeep.format.checksum import digest, text_of
from shardkeep.format.frames import FRAME_NBYTES, FrameTable, table_nbytes
from shardkeep.format.record import Blob
from shardkeep.layout.frame_reader import SCRATCH_NBYTES, FrameReader, check_size, read_table
from shardkeep.layout.frame_writer import FrameWriter, Seal, room_for, scratch_nbytes
from shardkeep.store.aligned import ScratchPool
from shardkeep.store.protocol import BlobReader, BlobWriter, Creates, Deletes, Gets, Opens, create_upto

_TABLES_NBYTES = 64 << 20


class _Writes(Creates, Deletes, Protocol):
    """What writing needs of a store."""


class _Reads(Opens, Gets, Protocol):
    """What reading needs of a store."""


def checksum_of(data: bytes | bytearray, chain: Chain | None) -> str:
    """Return the checksum of plain bytes that the commit record shows; of what is secret it tells nothing."""
    code = chain.mac(bytes(data)) if chain is not None and chain.is_secret else None
    return text_of(digest(data if code is None else code))


class EncodingStore:
    """A store to write to. May be used by several threads."""

    def __init__(self, inner: _Writes, chains: Mapping[str, Chain]) -> None:
        """`chains` says which blobs go through which chain; all others are written as they are."""
        self._inner = inner
        self._chains = chains
        self._scratch = {id(chain): ScratchPool(scratch_nbytes(chain)) for chain in chains.values()}
        self.seals: dict[str, Seal] = {}
        """What stands for each coded blob that is finished."""

    def create(self, name: str, nbytes: int) -> BlobWriter:
        """Begin a blob of so many plain bytes."""
        chain = self._chains.get(name)
        if chain is None:
            return self._inner.create(name, nbytes)
        writer = create_upto(self._inner, name, room_for(nbytes, chain))
        try:
            return FrameWriter(writer, name, nbytes, chain, self._scratch[id(chain)], self._keep)
        except BaseException:
            writer.abandon()
            raise

    def _keep(self, name: str, seal: Seal) -> None:
        self.seals[name] = seal

    def delete(self, name: str) -> None:
        """Remove a blob."""
        self._inner.delete(name)


def put_coded(store: _Writes, name: str, data: bytes, chain: Chain, *, frame_nbytes: int = FRAME_NBYTES) -> Seal:
    """
    Write a whole blob through a chain, durable on return, and return what stands for it.

    `frame_nbytes` is the most plain bytes of a frame, from 64 KiB on: there is no room for the table of smaller ones.
    """
    coded = EncodingStore(store, {name: chain})
    writer = coded.create(name, len(data))
    try:
        for at in range(0, len(data), frame_nbytes):
            writer.write_at(at, memoryview(data)[at : at + frame_nbytes])
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return coded.seals[name]


class DecodingStore:
    """A store to read a checkpoint from. May be used by several threads."""

    def __init__(self, inner: _Reads, blobs: Iterable[Blob], chains: Sequence[Chain]) -> None:
        """`blobs` are those of the commit record, and `chains` its chains, opened."""
        self.inner = inner
        self._coded = {blob.name: (blob, chains[blob.chain]) for blob in blobs if blob.chain is not None}
        self._scratch = ScratchPool(SCRATCH_NBYTES)
        self._tables: dict[str, FrameTable] = {}
        self._room_nbytes = _TABLES_NBYTES
        self._lock = threading.Lock()
        self._noted: list[DamagedCheckpoint] | None = None
        # Whoever asks how to use this store means the one below.
        self.requests = getattr(inner, "requests", None)

    def is_coded(self, name: str) -> bool:
        """Tell whether a blob goes through codecs: what is asked for of it may be anywhere in what is stored."""
        return name in self._coded

    def noting(self, noted: list[DamagedCheckpoint]) -> DecodingStore:
        """Return one over the same store that adds damaged frames to a list, and gives zeros for them."""
        other = DecodingStore(self.inner, (), ())
        other._coded, other._noted = self._coded, noted
        return other

    def open(self, name: str) -> BlobReader:
        """Open a blob, to read what it was before it went through codecs."""
        reader = self.inner.open(name)
        if name not in self._coded:
            return reader
        blob, chain = self._coded[name]
        try:
            check_size(reader, blob)
            table = self._table(reader, blob)
            return FrameReader(reader, blob, table, chain, self._scratch, self._noted, self.inner)
        except BaseException:
            reader.close()
            raise

    def _table(self, reader: BlobReader, blob: Blob) -> FrameTable:
        """Return a blob's table; it is read once, unless it is large."""
        with self._lock:
            known = self._tables.get(blob.name)
        if known is not None:
            return known
        table = read_table(reader, blob, self.inner)
        nbytes = table_nbytes(len(table))
        with self._lock:
            if blob.name not in self._tables and nbytes <= self._room_nbytes:
                self._room_nbytes -= nbytes
                self._tables[blob.name] = table
        return table

    def get(self, name: str, *, limit: int) -> bytes:
        """Read a whole small blob; of a coded one, what it was before."""
        if name not in self._coded:
            return self.inner.get(name, limit=limit)
        with closing(self.open(name)) as reader:
            if reader.nbytes > limit:
                raise MalformedFile(f"{name}: {reader.nbytes} bytes, expected at most {limit}", name=name)
            data = bytearray(reader.nbytes)
            reader.read_into(0, memoryview(data))
            return bytes(data)
