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

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, WrongSize
from shardkeep.format.record import RECORD_NAME
from shardkeep.layouts import native
from shardkeep.layouts.torch import (
    MAX_METADATA_NBYTES,
    METADATA_NAME,
    Sums,
    columns_of,
    is_data,
    is_metadata,
    with_sums,
)
from shardkeep.layouts.torch_pickle import data_files_of, decode_metadata
from shardkeep.storage import base
from shardkeep.storage.file_systems import FileSystemBase, PathLike, StreamStore, store_of, sync_stream, write_all
from shardkeep.storage.local import storage_errors

log = logging.getLogger("shardkeep")

_SKEW_S = 3600.0
"""How far the clock of a remote store may differ from ours."""


class _StreamFiles(StreamStore):
    """The files at a path of a file system with streams, which may not list them, and knows neither sizes nor ages."""

    def __init__(self, fs: FileSystemBase, path: PathLike, *, sync: bool) -> None:
        super().__init__(fs, path)
        self._sync = sync

    def _at(self, name: str) -> PathLike:
        return self._fs.concat_path(self._path, name)

    def get(self, name: str, *, limit: int) -> bytes:
        if not self._fs.exists(self._at(name)):
            raise BlobNotFound(f"{self.url}/{name}: there is no such file", name=name)
        return super().get(name, limit=limit)

    def put(self, name: str, data: bytes, *, replace: bool = False, over: base.Version | None = None) -> None:
        """Create or replace a file, in one step if the file system's `rename` can replace."""
        path, temporary = self._at(name), self._at(f"{name}.tmp")
        with self._fs.create_stream(temporary, "wb") as stream:
            write_all(stream, data)
            sync_stream(stream, sync=self._sync)
        try:
            self._fs.rename(temporary, path)
        except FileExistsError:
            self._fs.rm_file(path)
            self._fs.rename(temporary, path)

    def delete(self, name: str) -> None:
        if self._fs.exists(self._at(name)):
            self._fs.rm_file(self._at(name))


def commit_at(fs: FileSystemBase, path: PathLike, *, sync: bool) -> Commit:
    return Commit(store_of(fs, path, durable=sync) or _StreamFiles(fs, path, sync=sync))


class Commit:
    """The last step of a save to a store, or to a file system with streams."""

    def __init__(self, files: base.Store | _StreamFiles) -> None:
        self._files = files
        self._store = store = None if isinstance(files, _StreamFiles) else files
        self._path = None if store is None else base.local_path(store)
        self._shared = store is not None and self._path is None
        """Whether every rank sees the files of all ranks. Each rank may have a local directory of its own."""

    def first_number(self) -> int:
        """Return the number of the first data file: random in a store, where two jobs must not choose the same names."""
        return secrets.randbelow(10**9) * 1000 if self._shared else 0

    def publish(
        self, name: str, data: bytes, *, sums: Mapping[str, Sums], own: Collection[str], keep: set[str], began_s: float
    ) -> None:
        """
        Check that all data files are complete, put the metadata in place, then remove the files that they replace.

        `sums` are sizes and checksums of all data files, and `own` those that this rank wrote; the metadata refer to the
        files `keep`. Files younger than `began_s` that no metadata refer to are not removed.
        """
        old = self._files_of(name)
        try:
            self._check_written(sums, own)
            self._files.put(name, data, replace=True)
        except BaseException:
            self._take_back(name, data, keep)
            raise
        # Only files with names of data files: old metadata may come from another writer and name any file.
        self.remove(filter(is_data, old - keep))
        if name == METADATA_NAME:
            self._supersede_native()
        if self._store is not None:
            self._sweep(self._store, name, keep, began_s)

    def _check_written(self, sums: Mapping[str, Sums], own: Collection[str]) -> None:
        """Check the sizes of data files that this rank can see: another save here may have removed or replaced one."""
        if self._store is None:
            return
        sizes: dict[str, int] = {}
        if self._path is None:
            sizes = {info.name: info.nbytes for info in self._store.list()}
        else:  # a user's writer may have put files into directories below
            for name in sums:
                with suppress(FileNotFoundError), storage_errors("cannot look at", self._files.url, name):
                    sizes[name] = os.stat(os.path.join(self._path, name)).st_size
        for name, each in sums.items():
            found = sizes.get(name, -1)
            if found != each.nbytes and (found >= 0 or name in own or self._shared):
                raise WrongSize(
                    f"{self._files.url}/{name}: {found if found >= 0 else 'no'} bytes where {each.nbytes} were written",
                    hint="another job may be saving into the same place; nothing was committed",
                    file=name,
                )

    def supersede_common(self) -> None:
        """Remove the metadata of all ranks together, and a native record."""
        self.remove([METADATA_NAME])
        self._supersede_native()

    def _supersede_native(self) -> None:
        files: list[str] = []
        if self._store is not None:
            with suppress(CheckpointError):
                files = native.record_in(self._store).names
        self.remove([RECORD_NAME, *files])  # the record first: without it, the other files are not a checkpoint

    def _take_back(self, name: str, data: bytes, files: set[str]) -> None:
        """Remove the files of a save that failed, unless it failed after the marker was in place."""
        try:
            with suppress(BlobNotFound, MalformedFile):  # the latter: it is longer
                if self._files.get(name, limit=len(data)) == data:
                    return
        except Exception as exc:  # noqa: BLE001 - as above; the save may be committed, so nothing is removed
            where = f"{self._files.url}/{name}"
            log.warning("%s cannot be read, so files of the failed save are not removed: %s", where, exc)
            return
        self.remove(files)

    def _files_of(self, name: str) -> set[str]:
        """Return the data files that metadata name; none if they do not exist or cannot be read."""
        where = f"{self._files.url}/{name}"
        try:
            data = base.with_any_names(self._files).get(name, limit=MAX_METADATA_NBYTES)
            columns = columns_of(data, where=where)
            return with_sums(columns.files) if columns else data_files_of(decode_metadata(data, where=where))
        except BlobNotFound:
            return set()
        except Exception as exc:  # noqa: BLE001 - as above
            log.warning("%s cannot be read, so the files it names are not removed: %s", where, exc)
            return set()

    def _sweep(self, store: base.Store, published: str, keep: set[str], began_s: float) -> None:
        """Remove metadata that were replaced, and data files of dead saves: older than this one, and named by no metadata."""
        try:
            infos = {info.name: info for info in store.list()}
        except CheckpointError as exc:
            log.warning("%s cannot be listed, so files of older saves are not removed: %s", store.url, exc)
            return
        # A rank that saves alone removes only its own files: other ranks may be writing files that no metadata name yet.
        alone = published.removesuffix(METADATA_NAME)
        if not alone:
            self.remove([name for name in infos if is_metadata(name) and name != METADATA_NAME])
        elif METADATA_NAME in infos:
            owned = self._files_of(METADATA_NAME)
            if not owned:
                return  # metadata that cannot be read may name any file
            keep = keep | owned
        before_s = began_s - (_SKEW_S if self._shared else 0.0)
        for name in filter(is_data, infos.keys() - keep):
            if name.startswith((f"{alone}_", f"{alone}.") if alone else "") and infos[name].modified_s < before_s:
                self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint needs any more; log those that cannot be removed."""
        for name in names:
            try:
                if self._path is None:
                    self._files.delete(name)
                    continue
                # Not made durable: a file that reappears after a crash is removed by a later save.
                with suppress(FileNotFoundError), storage_errors("cannot delete", self._files.url, name):
                    os.unlink(os.path.join(self._path, base.check_below(name)))
            except Exception as exc:  # noqa: BLE001 - as above
                where = f"{self._files.url}/{name}"
                log.warning("could not remove %s, which no checkpoint needs any more: %s", where, exc)
