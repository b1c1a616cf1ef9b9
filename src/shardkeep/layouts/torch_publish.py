"""
The commit of a save in torch's layout: data files under new names first, then the marker that names them, then clean-up.

The marker is `.metadata`, or that of one rank. It is put in place in one step. On local file systems and in stores that step
is atomic and durable; on a file system that the user provides it is what its `rename` makes of it.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, WrongSize
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.layouts.torch import METADATA_NAME, Sums, is_data, is_metadata
from shardkeep.layouts.torch_pickle import data_files_of, read_metadata
from shardkeep.storage.base import BlobInfo, Gets, Store, check_below, local_path, with_any_names
from shardkeep.storage.file_systems import FileSystemBase, PathLike, StreamStore, read_up_to, store_of, write_all
from shardkeep.storage.local import storage_errors

_SKEW_S = 3600.0
"""How far the clock of a remote store may differ from ours."""


class CommitTarget(Protocol):
    """What a commit needs of a store or a file system."""

    url: str
    reads: Gets
    """Reads its files, whatever their names."""
    store: Store | None
    """The store; None for a file system."""
    shared: bool
    """Whether every rank sees the files of all ranks. Each rank may have a local directory of its own."""
    skew_s: float
    """How far its clock may differ from ours."""

    def names(self) -> list[str]:
        """Return the names of all files; none if the file system cannot list."""

    def infos(self) -> dict[str, BlobInfo]:
        """Return size and time of all files, by name; empty for a file system, which only knows names."""

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the sizes of those of these files that exist; None for a file system."""

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""

    def holds(self, name: str, data: bytes) -> bool:
        """Return whether a file has exactly these bytes."""

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file, in one step if possible."""

    def delete(self, name: str) -> None:
        """Delete a file."""


def commit_target_for(fs: FileSystemBase, path: PathLike, *, sync: bool) -> CommitTarget:
    """Return the target for a path of a file system."""
    store = store_of(fs, path, durable=sync)
    return StreamTarget(fs, path, sync=sync) if store is None else commit_target(store)


def commit_target(store: Store) -> CommitTarget:
    """Return the target for a store."""
    return StoreTarget(store) if local_path(store) is None else LocalTarget(store)


def first_number(place: CommitTarget) -> int:
    """
    Return the number of the first data file of a save.

    In a store it is random: an upload replaces a blob of the same name, so two jobs that save to one place at the same time
    must not choose the same names.
    """
    return secrets.randbelow(10**9) * 1000 if place.shared else 0


class StoreTarget:
    """A store that all ranks share."""

    shared = True
    skew_s = _SKEW_S

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.reads: Gets = store
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


class LocalTarget(StoreTarget):
    """A local directory. Other writers may have used any file names, also in directories below."""

    shared = False
    skew_s = 0.0

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.reads = with_any_names(store)

    def sizes(self, names: Iterable[str]) -> dict[str, int] | None:
        found: dict[str, int] = {}
        for name in names:
            with suppress(FileNotFoundError), storage_errors("cannot look at", self.url, name):
                found[name] = os.stat(os.path.join(self.url, name)).st_size
        return found

    def delete(self, name: str) -> None:
        # Not made durable: a file that reappears after a crash is removed by a later save.
        with suppress(FileNotFoundError), storage_errors("cannot delete", self.url, name):
            os.unlink(os.path.join(self.url, check_below(name)))


class StreamTarget:
    """A path of a file system with streams, which does not know the age of its files."""

    store: Store | None = None
    shared = False
    skew_s = 0.0

    def __init__(self, fs: FileSystemBase, path: PathLike, *, sync: bool) -> None:
        self.url = os.fspath(path)
        self.reads: Gets = StreamStore(fs, path)
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


log = logging.getLogger("shardkeep")


class Commit:
    """The last step of a save."""

    def __init__(self, place: CommitTarget) -> None:
        self._place = place

    def _check_written(self, sums: Mapping[str, Sums], own: Collection[str]) -> None:
        """
        Check the sizes of all data files: another save into the same place may have removed or replaced one.

        The files of other ranks may be in local directories of other machines, where this rank cannot see them.
        """
        sizes = self._place.sizes(sums)
        if sizes is None:
            return
        for name, each in sums.items():
            found = sizes.get(name, -1)
            if found != each.nbytes and (found >= 0 or name in own or self._place.shared):
                raise WrongSize(
                    f"{self._place.url}/{name}: {found if found >= 0 else 'no'} bytes where {each.nbytes} were written",
                    hint="another job may be saving into the same place; nothing was committed",
                    file=name,
                )

    def publish(
        self,
        name: str,
        data: bytes,
        *,
        sums: Mapping[str, Sums],
        own: Collection[str],
        keep: set[str],
        began_s: float,
    ) -> None:
        """
        Check that all data files are complete, put the metadata in place, then remove the files that they replace.

        Args:
            name: the file of the metadata.
            data: its contents.
            sums: size and checksum of each data file.
            own: the data files that this rank wrote.
            keep: the files that the metadata refer to.
            began_s: when the save began. Younger files that no metadata refer to are not removed.

        """
        old = self._files_of_old(name)
        try:
            self._check_written(sums, own)
            self._place.put(name, data)
        except BaseException:
            self._take_back(name, data, keep)
            raise
        # Only files with names of data files: old metadata may come from another writer and name any file.
        self.remove(filter(is_data, old - keep))
        if name == METADATA_NAME:
            self._supersede_others(keep)
        if self._place.store is not None:
            self.remove(self._abandoned(name, keep, began_s))

    def _supersede_others(self, keep: set[str]) -> None:
        """Remove the markers of other checkpoints in this place: metadata of single ranks, and a native record."""
        others = [each for each in self._listed() if is_metadata(each) and each != METADATA_NAME]
        # In a store, `_abandoned` finds their data files by age.
        data: set[str] = set() if self._place.store is not None else set().union(*map(self._files_of_old, others))
        self.remove(others)
        self.remove(filter(is_data, data - keep))
        self._supersede_native()

    def _listed(self) -> list[str]:
        """Return the names of all files; none if they cannot be listed."""
        try:
            return self._place.names()
        except Exception as exc:  # noqa: BLE001 - a file system may raise anything, and the save has succeeded
            log.warning("%s cannot be listed, so files of older saves are not removed: %s", self._place.url, exc)
            return []

    def supersede_common(self) -> None:
        """Remove the metadata of all ranks together, and a native record."""
        self.remove([METADATA_NAME])
        self._supersede_native()

    def _supersede_native(self) -> None:
        files: list[str] = []
        if self._place.store is not None:
            with suppress(CheckpointError):
                files = native.read_record(self._place.store).names
        self.remove([RECORD_NAME])  # first: without it, the other files are not a checkpoint
        self.remove(files)

    def _take_back(self, name: str, data: bytes, files: set[str]) -> None:
        """Remove the files of a save that failed, unless it failed after the marker was in place."""
        try:
            if self._place.holds(name, data):
                return
        except Exception as exc:  # noqa: BLE001 - a file system may raise anything; the save may be committed, so nothing is removed
            log.warning(
                "%s/%s cannot be read, so files of the failed save are not removed: %s", self._place.url, name, exc
            )
            return
        self.remove(files)

    def _files_of_old(self, name: str) -> set[str]:
        try:
            if not self._place.exists(name):
                return set()
            return data_files_of(read_metadata(self._place.reads, name, where=f"{self._place.url}/{name}"))
        except Exception as exc:  # noqa: BLE001 - as above
            log.warning("%s/%s cannot be read, so the files it names are not removed: %s", self._place.url, name, exc)
            return set()

    def _abandoned(self, published: str, keep: set[str], began_s: float) -> set[str]:
        """Return data files that no metadata name and that are older than this save: dead saves left them."""
        try:
            infos = self._place.infos()
        except CheckpointError as exc:
            log.warning("%s cannot be listed, so files of dead saves are not removed: %s", self._place.url, exc)
            return set()
        # A rank that saves alone removes only its own files: other ranks may be writing files that no metadata name yet.
        alone = published.removesuffix(METADATA_NAME)
        for name in filter(is_metadata, infos):
            if name in (published, METADATA_NAME) or not alone:
                owned = self._files_of_old(name)
                if not owned and name != published:
                    return set()  # metadata that cannot be read may name any file
                keep = keep | owned
        before_s = began_s - self._place.skew_s
        return {
            name
            for name in filter(is_data, infos.keys() - keep)
            if name.startswith((f"{alone}_", f"{alone}.") if alone else "") and infos[name].modified_s < before_s
        }

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint needs any more; log those that cannot be removed."""
        for name in names:
            try:
                self._place.delete(name)
            except Exception as exc:  # noqa: BLE001 - as above
                log.warning(
                    "could not remove %s/%s, which no checkpoint needs any more: %s", self._place.url, name, exc
                )
