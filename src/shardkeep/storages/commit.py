"""
How a save in torch's layout becomes the checkpoint of its directory, and what then goes away.

One small file, put in place in one step, says which data files belong to the checkpoint. On this machine's file
systems that step is atomic and durable; on others it is what their rename or upload makes of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from shardkeep.errors import CheckpointError, WrongSize
from shardkeep.format.record import RECORD_NAME
from shardkeep.layout import native
from shardkeep.layout.torch_files import METADATA_NAME, Sums, is_data, is_metadata
from shardkeep.storages.file_systems import FileSystem, FileSystemBase, PathLike
from shardkeep.storages.metadata_files import MetadataFiles, read_file_names
from shardkeep.storages.stream_store import StreamStore, read_up_to, write_all
from shardkeep.store.files import storage_errors
from shardkeep.store.local import LocalStore

log = logging.getLogger("shardkeep")


def is_local(fs: FileSystemBase) -> bool:
    """Say whether a file system is this machine's, as it is: nobody changed how it opens or renames."""
    return type(fs) is FileSystem


class Commit:
    """The last step of a save, in one directory."""

    def __init__(self, fs: FileSystemBase, path: PathLike, *, sync: bool) -> None:
        self._fs = fs
        self._path = path
        self._sync = sync

    def _check_written(self, sums: Mapping[str, Sums], own: Collection[str]) -> None:
        """
        Insist that data files are whole: another save into the same place may have removed or replaced one.

        Those of other ranks may be on other machines, out of sight.
        """
        if not is_local(self._fs):
            return
        for name, each in sums.items():
            found = -1
            with storage_errors("cannot look at", os.fspath(self._path), name), suppress(FileNotFoundError):
                found = os.stat(Path(self._path) / name).st_size
            if found != each.nbytes and (found >= 0 or name in own):
                raise WrongSize(
                    f"{Path(self._path) / name}: {found if found >= 0 else 'no'} bytes where {each.nbytes} were written",
                    hint="does another job save into the same directory? nothing was committed",
                    file=name,
                )

    def publish(
        self,
        files: MetadataFiles,
        *,
        sums: Mapping[str, Sums],
        own: Collection[str],
        keep: set[str],
        began_s: float,
    ) -> None:
        """
        Put the metadata in place if all files are, then remove the files that belonged to what they replace.

        Args:
            files: the metadata.
            sums: what is known of each data file.
            own: the data files that this rank wrote.
            keep: the files that the metadata name.
            began_s: when the save began: files that nobody names are left alone if they are younger.

        """
        name, data = files.name, files.data
        old = self._files_of_old(name)
        keep = keep if files.columns_name is None else keep | {files.columns_name}
        try:
            self._check_written(sums, own)
            if files.columns_name is not None:  # before the metadata, which name it
                self._put(files.columns_name, files.columns)
            self._put(name, data)
        except BaseException:
            self._take_back(name, data, keep)
            raise
        # By their names, whatever old metadata say: those may be somebody else's, and name anything.
        self.remove(filter(is_data, old - keep))
        if name == METADATA_NAME:
            self._supersede_others(keep)
        if is_local(self._fs):
            self.remove(self._abandoned(name, keep, began_s))
        else:
            # Nobody knows how old data files are there. Columns may go whoever wrote them: the pickle says the same.
            columns = (each for each in self._listed() if is_data(each) and each.endswith(".columns"))
            mine = "" if name == METADATA_NAME else f"{name}."
            self.remove(each for each in columns if each.startswith(mine) and each not in keep)

    def _supersede_others(self, keep: set[str]) -> None:
        """Take away what says that another checkpoint exists here: ranks' own metadata, and a native record."""
        others = [each for each in self._listed() if is_metadata(each) and each != METADATA_NAME]
        # On this machine, their data are found by their age.
        data: set[str] = set() if is_local(self._fs) else set().union(*map(self._files_of_old, others))
        self.remove(others)
        self.remove(filter(is_data, data - keep))
        self._supersede_native()

    def _listed(self) -> list[str]:
        """Return the names of the files that are here; none where the file system does not tell."""
        ls = getattr(self._fs, "ls", None)
        try:
            found = ls(self._path) if callable(ls) else []
            return [os.path.basename(os.fspath(each).rstrip("/")) for each in found]
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises: the checkpoint is what counts
            log.warning("%s cannot be listed, so files of older saves stay: %s", self._path, exc)
            return []

    def supersede_common(self) -> None:
        """Take away the metadata of all ranks together, and a native record."""
        columns = [name for name in self._files_of_old(METADATA_NAME) if name.startswith(f"{METADATA_NAME}.")]
        self.remove([METADATA_NAME, *filter(is_data, columns)])
        self._supersede_native()

    def _supersede_native(self) -> None:
        files: list[str] = []
        if is_local(self._fs):
            with suppress(CheckpointError):
                record = native.read_record(LocalStore(self._path))
                files = record.names
        self.remove([RECORD_NAME])  # first: without it, the files mean nothing
        self.remove(files)

    def _take_back(self, name: str, data: bytes, files: set[str]) -> None:
        """Remove the files of a save that was not committed; one that failed only after that keeps them."""
        path = self._fs.concat_path(self._path, name)
        try:
            if self._fs.exists(path):
                with self._fs.create_stream(path, "rb") as stream:
                    if read_up_to(stream, len(data) + 1) == data:
                        return
        except Exception as exc:  # noqa: BLE001 - whatever a file system raises: then nobody knows, and they stay
            log.warning("%s cannot be read, so the files of the failed save stay: %s", path, exc)
            return
        self.remove(files)

    def _put(self, name: str, data: bytes) -> None:
        if is_local(self._fs):
            LocalStore(self._path, durable=self._sync).put(name, data, replace=True)
            return
        if is_data(name):  # nothing is to be replaced, and nobody looks at it yet
            with self._fs.create_stream(self._fs.concat_path(self._path, name), "wb") as stream:
                write_all(stream, data, sync=self._sync)
            return
        path, temporary = (self._fs.concat_path(self._path, each) for each in (name, f"{name}.tmp"))
        with self._fs.create_stream(temporary, "wb") as stream:
            write_all(stream, data, sync=self._sync)
        try:
            self._fs.rename(temporary, path)
        except FileExistsError:
            self._fs.rm_file(path)
            self._fs.rename(temporary, path)

    def _files_of_old(self, name: str) -> set[str]:
        path = self._fs.concat_path(self._path, name)
        try:
            if not self._fs.exists(path):
                return set()
            return read_file_names(StreamStore(self._fs, self._path), name, where=str(path))
        except Exception as exc:  # noqa: BLE001 - as above
            log.warning("%s cannot be read, so the files it names stay: %s", path, exc)
            return set()

    def _abandoned(self, published: str, keep: set[str], began_s: float) -> set[str]:
        """Find data files that nobody's metadata name, left by saves that ended before this one began."""
        directory = Path(self._path)
        try:
            names = {each.name: each for each in directory.iterdir()}
        except OSError as exc:
            log.warning("%s cannot be listed, so files of dead saves stay: %s", directory, exc)
            return set()
        # Of a rank that saved alone, only its own: others may be at work, and nothing names their files yet.
        alone = published.removesuffix(METADATA_NAME)
        for name in filter(is_metadata, names):
            if name in (published, METADATA_NAME) or not alone:
                owned = self._files_of_old(name)
                if not owned and name != published:
                    return set()  # metadata that cannot be read may name any of them
                keep = keep | owned
        left = set()
        for name in filter(is_data, names.keys() - keep):
            with suppress(OSError):
                if (
                    name.startswith((f"{alone}_", f"{alone}.") if alone else "")
                    and names[name].stat().st_mtime < began_s
                ):
                    left.add(name)
        return left

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint needs any more; what cannot be removed stays."""
        for name in names:
            path = self._fs.concat_path(self._path, name)
            try:
                if self._fs.exists(path):
                    self._fs.rm_file(path)
            except Exception as exc:  # noqa: BLE001 - whatever a file system raises: the checkpoint is what counts
                log.warning("could not remove %s, which no checkpoint needs any more: %s", path, exc)
