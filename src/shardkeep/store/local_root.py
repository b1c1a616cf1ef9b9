"""A root that is a directory of directories."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

from shardkeep.store.files import storage_errors, sync_directory
from shardkeep.store.local import LocalStore
from shardkeep.store.protocol import check_name, is_name
from shardkeep.store.roots import empty

_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})


class LocalRoot(LocalStore):
    """A directory whose directories are places; it is made when the first blob in it or below it is."""

    def places(self) -> Iterator[str]:
        found: list[str] = []
        with storage_errors("cannot list", self.url), suppress(FileNotFoundError), os.scandir(self._path) as entries:
            found.extend(entry.name for entry in entries if is_name(entry.name) and entry.is_dir())
        return iter(found)

    def place(self, name: str) -> LocalStore:
        return LocalStore(os.path.join(self.url, check_name(name)), direct=self._direct, durable=self._durable)

    def remove(self, name: str) -> None:
        path = self._path_of(name)
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError):
            if os.path.islink(path):
                os.unlink(path)
            else:
                empty(self.place(name))
                # What no blob is called, or is no file: left by others, and never looked at through a link.
                shutil.rmtree(path)
            sync_directory(self._path)

    def drop_empty(self, name: str) -> None:
        path = self._path_of(name)
        with storage_errors("cannot remove", self.url, name), suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.rmdir(path)
            except OSError as exc:
                if exc.errno not in _NOT_EMPTY:
                    raise

    def _path_of(self, name: str) -> str:
        return os.path.join(self._path, check_name(name))
