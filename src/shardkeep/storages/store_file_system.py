"""
Places of a store in the terms of a file system of the storages: URLs for paths.

What is ours goes through the store's own verbs (`storages.choosing.store_of`). The streams here are for extensions,
planners and writers of others, who know nothing else.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from shardkeep.errors import BlobNotFound, CheckpointError
from shardkeep.layout.torch_files import MAX_METADATA_NBYTES
from shardkeep.options import Options
from shardkeep.storages.blob_streams import BlobInput, BlobOutput
from shardkeep.storages.file_systems import FileSystemBase, PathLike
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

_READ_AHEAD_NBYTES = 1 << 20


class StoreFileSystem(FileSystemBase):
    """What lies below URLs of stores. There are no directories: `mkdir` does nothing, and nothing depends on it."""

    def __init__(self, *stores: Store) -> None:
        """Know these stores by their URLs; others are opened when they are first used."""
        self._lock = threading.Lock()
        self._stores = {_trimmed(store.url): store for store in stores}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # connections do not travel to other processes, which open their own

    def __setstate__(self, _: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # as if it were new

    def store(self, path: PathLike) -> Store:
        """Return the store of a place."""
        url = _trimmed(os.fspath(path))
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url, direct=Options().direct_io)
            return self._stores[url]

    def _blob(self, path: PathLike) -> tuple[Store, str]:
        above, _, name = _trimmed(os.fspath(path)).rpartition("/")
        return self.store(above), name

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        store, name = self._blob(path)
        if mode == "rb":
            with io.BufferedReader(BlobInput(store.open(name)), _READ_AHEAD_NBYTES) as source:
                yield source
            return
        if mode != "wb":
            raise CheckpointError(f"{os.fspath(path)}: a stream of a store is opened as 'rb' or 'wb', not {mode!r}")
        stream = BlobOutput(store, name)
        try:
            yield stream
        except BaseException:
            stream.discard()
            raise
        stream.close()

    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        return f"{_trimmed(os.fspath(path))}/{suffix}"

    def init_path(self, path: PathLike) -> PathLike:
        return _trimmed(os.fspath(path))

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        """Copy a small blob to another name and delete it: stores cannot rename."""
        (store, name), (target, new_name) = self._blob(path), self._blob(new_path)
        target.put(new_name, store.get(name, limit=MAX_METADATA_NBYTES), replace=True)
        store.delete(name)

    def mkdir(self, path: PathLike) -> None:
        """Do nothing: there are no directories."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return isinstance(checkpoint_id, str) and "://" in checkpoint_id

    def exists(self, path: PathLike) -> bool:
        store, name = self._blob(path)
        try:
            store.open(name).close()
        except BlobNotFound:
            return False
        return True

    def rm_file(self, path: PathLike) -> None:
        store, name = self._blob(path)
        store.delete(name)

    def ls(self, path: PathLike) -> list[str]:
        """Return the URLs of what is at a place."""
        return [cast("str", self.concat_path(path, info.name)) for info in self.store(path).list()]


def _trimmed(url: str) -> str:
    return url.rstrip("/")
