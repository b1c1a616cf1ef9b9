"""
The place that a save in torch's layout is committed in: a store, or a file system that somebody gave to a storage.

Both do the same few things. Of a store it is also known how large its files are and when they were written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from shardkeep.errors import BlobNotFound, MalformedFile
from shardkeep.layout.torch_files import is_data
from shardkeep.run.read import Reads
from shardkeep.storages.choosing import store_of
from shardkeep.storages.file_systems import FileSystemBase, PathLike
from shardkeep.storages.stream_store import StreamStore, read_up_to, write_all
from shardkeep.store.files import storage_errors
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import BlobInfo, Store, check_below

_SKEW_S = 3600.0
"""How far the clock of a store on another machine may be from ours."""


class Place(Protocol):
    """What a commit needs."""

    url: str
    reads: Reads
    """Opens its files."""
    store: Store | None
    """Itself, where it is one."""
    shared: bool
    """Whether every rank sees what others wrote: directories may be of one machine each."""
    skew_s: float
    """How far its clock may be from ours."""

    def names(self) -> list[str]:
        """Name the files that are there; none where the file system does not tell."""

    def infos(self) -> dict[str, BlobInfo]:
        """Say what is known of the files that are there; nothing where only their names are."""

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the sizes of those of these files that are there; None where nobody knows."""

    def exists(self, name: str) -> bool:
        """Say whether there is a file."""

    def holds(self, name: str, data: bytes) -> bool:
        """Say whether there is a file of this name with these bytes."""

    def put(self, name: str, data: bytes) -> None:
        """Put a file in place of what has its name, in one step where that is possible."""

    def delete(self, name: str) -> None:
        """Remove a file."""


def place_for(fs: FileSystemBase, path: PathLike, *, sync: bool) -> Place:
    """Return the place that a path of a file system is."""
    store = store_of(fs, path, durable=sync)
    return StreamPlace(fs, path, sync=sync) if store is None else place_of(store)


def place_of(store: Store) -> Place:
    """Return the place that a store is."""
    return LocalPlace(store) if isinstance(store, LocalStore) else StorePlace(store)


def first_number(place: Place) -> int:
    """
    Return the number that the data files of a save are counted from.

    Large uploads to a store replace what has their name, so that two jobs that save to one place at the same time must
    not come to the same names.
    """
    return secrets.randbelow(10**9) * 1000 if place.shared else 0


class StorePlace:
    """A store that all ranks see."""

    shared = True
    skew_s = _SKEW_S

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.reads: Reads = store
        self.store: Store | None = store
        self._store = store

    def names(self) -> list[str]:
        return [info.name for info in self._store.list()]

    def infos(self) -> dict[str, BlobInfo]:
        return {info.name: info for info in self._store.list()}

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        infos = self.infos()
        return {name: infos[name].nbytes for name in names if name in infos}

    def exists(self, name: str) -> bool:
        try:
            self._store.open(name).close()
        except BlobNotFound:
            return False
        return True

    def holds(self, name: str, data: bytes) -> bool:
        try:
            return self._store.get(name, limit=len(data)) == data
        except (BlobNotFound, MalformedFile):  # the latter: it is longer
            return False

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data, replace=True)

    def delete(self, name: str) -> None:
        self._store.delete(name)


class LocalPlace(StorePlace):
    """A directory of this machine. Writers of others may have called files what they liked, also in directories below."""

    shared = False
    skew_s = 0.0

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.reads = store.of_foreign_files()

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        found: dict[str, int] = {}
        for name in names:
            with suppress(FileNotFoundError), storage_errors("cannot look at", self.url, name):
                found[name] = os.stat(os.path.join(self.url, name)).st_size
        return found

    def delete(self, name: str) -> None:
        # Not made durable: a file that comes back is swept by a later save.
        with suppress(FileNotFoundError), storage_errors("cannot delete", self.url, name):
            os.unlink(os.path.join(self.url, check_below(name)))


class StreamPlace:
    """A place of a file system that gives streams. Nobody knows how old its files are."""

    store: Store | None = None
    shared = False
    skew_s = 0.0

    def __init__(self, fs: FileSystemBase, path: PathLike, *, sync: bool) -> None:
        self.url = os.fspath(path)
        self.reads: Reads = StreamStore(fs, path)
        self._fs = fs
        self._path = path
        self._sync = sync

    def _at(self, name: str) -> PathLike:
        return self._fs.concat_path(self._path, name)

    def names(self) -> list[str]:
        ls = getattr(self._fs, "ls", None)
        found = ls(self._path) if callable(ls) else []
        return [os.path.basename(os.fspath(each).rstrip("/")) for each in found]

    def infos(self) -> dict[str, BlobInfo]:
        return {}

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        return None

    def exists(self, name: str) -> bool:
        return self._fs.exists(self._at(name))

    def holds(self, name: str, data: bytes) -> bool:
        if not self.exists(name):
            return False
        with self._fs.create_stream(self._at(name), "rb") as stream:
            return read_up_to(stream, len(data) + 1) == data

    def put(self, name: str, data: bytes) -> None:
        if is_data(name):  # nothing is to be replaced, and nobody looks at it yet
            with self._fs.create_stream(self._at(name), "wb") as stream:
                write_all(stream, data, sync=self._sync)
            return
        path, temporary = self._at(name), self._at(f"{name}.tmp")
        with self._fs.create_stream(temporary, "wb") as stream:
            write_all(stream, data, sync=self._sync)
        try:
            self._fs.rename(temporary, path)
        except FileExistsError:
            self._fs.rm_file(path)
            self._fs.rename(temporary, path)

    def delete(self, name: str) -> None:
        if self.exists(name):
            self._fs.rm_file(self._at(name))
