"""A root that fsspec opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from shardkeep.errors import BlobNotFound
from shardkeep.store.fsspec_files import fs_errors
from shardkeep.store.fsspec_store import FsspecStore
from shardkeep.store.protocol import is_name
from shardkeep.store.roots import empty


class FsspecRoot(FsspecStore):
    """A directory of directories, of a file system of fsspec."""

    def places(self) -> Iterator[str]:
        found = [
            each["name"].rstrip("/").rpartition("/")[2] for each in self._level() if each.get("type") == "directory"
        ]
        return iter([name for name in found if is_name(name)])

    def place(self, name: str) -> FsspecStore:
        return FsspecStore(self._fs, self._at(name), f"{self.url}/{name}", settle_s=self._settle_s)

    def remove(self, name: str) -> None:
        empty(self.place(name))
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self._fs.exists(self._at(name)):
                self._fs.rm(self._at(name), recursive=True)

    def drop_empty(self, name: str) -> None:
        path = self._at(name)
        with suppress(BlobNotFound), fs_errors("cannot remove", self.url, name):
            if self._fs.isdir(path) and not self._fs.ls(path):
                self._fs.rmdir(path)
