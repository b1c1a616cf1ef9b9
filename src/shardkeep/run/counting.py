"""
A place to write to that tells how much has been written to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardkeep.events import SaveProgressed, heard
from shardkeep.run.telling import SaveTelling
from shardkeep.run.write import Writes
from shardkeep.store.protocol import BlobWriter


def counted(store: Writes, telling: SaveTelling, total: int) -> Writes:
    """Return the store, or where somebody watches, one that tells of what is written to it, of so many bytes."""
    if not heard(SaveProgressed):
        return store
    lock = threading.Lock()
    so_far = 0

    def told(nbytes: int) -> None:
        nonlocal so_far
        with lock:
            so_far = min(so_far + nbytes, total)  # digests beside a file are more than was reckoned with
        telling.progressed(staged=total, written=so_far, total=total)

    return _Counting(store, told)


class _Counting:
    def __init__(self, store: Writes, told: Callable[[int], None]) -> None:
        self._store = store
        self._told = told

    def create(self, name: str, nbytes: int) -> BlobWriter:
        return _CountingWriter(self._store.create(name, nbytes), self._told)

    def delete(self, name: str) -> None:
        self._store.delete(name)


class _CountingWriter:
    def __init__(self, writer: BlobWriter, told: Callable[[int], None]) -> None:
        self._writer = writer
        self._told = told

    def write_at(self, offset: int, data: memoryview) -> None:
        self._writer.write_at(offset, data)
        self._told(data.nbytes)

    def finish(self, nbytes: int | None = None) -> None:
        self._writer.finish(nbytes)

    def abandon(self) -> None:
        self._writer.abandon()
