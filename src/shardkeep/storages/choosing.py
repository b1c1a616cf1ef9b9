"""
Which file system a path or URL is in, and which store stands behind a file system.

    a path, file://             files of this machine
    s3://, gs://, az://, ...    object stores, through our own stores
    any other scheme            whatever fsspec opens, as with torch
"""

from __future__ import annotations

import os
import re

from shardkeep.errors import CheckpointError
from shardkeep.options import Options
from shardkeep.storages.file_systems import FileSystem, FileSystemBase, FsspecFileSystem, PathLike
from shardkeep.storages.store_file_system import StoreFileSystem
from shardkeep.store.local import LocalStore
from shardkeep.store.object_client import SCHEMES
from shardkeep.store.place import open_store
from shardkeep.store.protocol import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
"""Also several that fsspec chains: `simplecache::s3`."""
_BROKEN_URL = re.compile(rf"({'|'.join(sorted(SCHEMES))}|file):/[^/]")


def is_of_store(path: object) -> bool:
    """Say whether a path is a URL that a store of ours is for: of an object store, or of files of this machine."""
    return isinstance(path, str) and _scheme(path) in {*SCHEMES, "file"}


def is_local(fs: FileSystemBase) -> bool:
    """Say whether a file system is this machine's, as it is: nobody changed how it opens or renames."""
    return type(fs) is FileSystem


def file_system_for(path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """
    Return the file system that a place is in, and the place as it likes it. Nothing is opened yet.

    Raises:
        CheckpointError: the place is a `Path` that was made of a URL, which it cannot hold.

    """
    where = os.fspath(path)
    if not isinstance(path, str):
        if _BROKEN_URL.match(where):
            raise CheckpointError(f"{where}: a Path cannot hold a URL", hint="give the URL as a str")
        return FileSystem(), FileSystem().init_path(path)
    scheme = _scheme(where)
    if scheme == "file":
        where = open_store(where, direct=False).url
        return FileSystem(), FileSystem().init_path(where)
    if scheme in SCHEMES:
        stores = StoreFileSystem()
        return stores, stores.init_path(where)
    if scheme is not None:
        return FsspecFileSystem.at(where), where
    return FileSystem(), FileSystem().init_path(path)


def pointed(fs: FileSystemBase, path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """Return file system and place for another place; a file system that was given to a storage stays what it is."""
    if is_local(fs) or type(fs) is StoreFileSystem:
        found, place = file_system_for(path)
        return (fs if type(found) is type(fs) else found), place
    return fs, fs.init_path(path)


def by_store(fs: FileSystemBase, path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """Return stores instead of fsspec, for what only stores can do; one that was opened already stays."""
    if type(fs) is FsspecFileSystem and fs.fs is None:
        fs = StoreFileSystem()
        return fs, fs.init_path(path)
    return fs, path


def store_of(fs: FileSystemBase, path: PathLike, *, durable: bool = True, foreign: bool = False) -> Store | None:
    """
    Return the store that a place of a file system is; None where only the file system knows how to open its files.

    Args:
        fs: the file system.
        path: the place.
        durable: whether files of this machine are to survive a loss of power.
        foreign: read files of this machine whatever they are called, and through links.

    """
    if is_local(fs):
        return LocalStore(path, direct=Options().direct_io, durable=durable, foreign=foreign)
    return fs.store(path) if type(fs) is StoreFileSystem else None


def _scheme(path: str) -> str | None:
    found = _SCHEME.match(path)
    return found[1].lower() if found else None
