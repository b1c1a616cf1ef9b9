"""
Where the storages of torch's layout keep files: streams by path, in the terms that users implement.

`FileSystem` is this machine's. `FsspecFileSystem` is whatever fsspec opens; it is imported when it is used.
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardkeep.errors import BlobNotFound, CheckpointError, MalformedFile, StorageError, WrongSize
from shardkeep.options import Options
from shardkeep.storage.base import Store, check_below
from shardkeep.storage.local import LocalStore
from shardkeep.storage.object_client import SCHEMES
from shardkeep.storage.resolve import open_store

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
    from typing_extensions import Buffer

    from shardkeep.storage.base import BlobReader, BlobWriter


PathLike = str | os.PathLike[str]


class FileSystemBase(ABC):
    """What a file storage needs: streams, and a few verbs on paths."""

    @contextmanager
    @abstractmethod
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        """Open a stream, "rb" or "wb"; it is closed at the end of the block."""
        yield io.BytesIO()

    @abstractmethod
    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        """Return the path of a name below a path."""

    @abstractmethod
    def rename(self, path: PathLike, new_path: PathLike) -> None:
        """Give a file another path."""

    @abstractmethod
    def init_path(self, path: PathLike) -> PathLike:
        """Return a path as this file system likes it."""

    @abstractmethod
    def mkdir(self, path: PathLike) -> None:
        """Make a directory, and those above it, where they are not there yet."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Say whether a checkpoint of this id can be in a file system of this kind."""

    @abstractmethod
    def exists(self, path: PathLike) -> bool:
        """Say whether there is a file."""

    @abstractmethod
    def rm_file(self, path: PathLike) -> None:
        """Delete a file."""


class FileSystem(FileSystemBase):
    """The files of this machine."""

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode) as stream:
            yield cast("io.IOBase", stream)

    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        return Path(path) / suffix

    def init_path(self, path: PathLike) -> PathLike:
        return Path(path)

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        os.replace(path, new_path)

    def mkdir(self, path: PathLike) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        if isinstance(checkpoint_id, Path):
            return True
        if "://" in str(checkpoint_id):
            return False
        # A checkpoint that is there can be read, also from where nothing can be written.
        path = Path(checkpoint_id)
        return path.exists() or any(parent.exists() and os.access(parent, os.W_OK) for parent in path.parents)

    def exists(self, path: PathLike) -> bool:
        return Path(path).exists()

    def rm_file(self, path: PathLike) -> None:
        Path(path).unlink()

    def ls(self, path: PathLike) -> list[str]:
        """Return the paths of what is in a directory."""
        return [str(each) for each in Path(path).iterdir()]


class FsspecFileSystem(FileSystemBase):
    """Whatever fsspec opens: object stores, HTTP, memory, this machine."""

    def __init__(self) -> None:
        self.fs: AbstractFileSystem | None = None
        self._url: str | None = None

    @classmethod
    def at(cls, url: str) -> FsspecFileSystem:
        """Return the file system of a URL, which is opened when it is first used."""
        made = cls()
        made._url = url
        return made

    @property
    def _opened(self) -> AbstractFileSystem:
        if self.fs is None and self._url is not None:
            self.fs = _url_to_fs(self._url)
        if self.fs is None:
            raise CheckpointError("the file system is not open yet", hint="call init_path with its URL")
        return self.fs

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        writes = any(letter in mode for letter in "wa+")
        stream = self._opened.open(os.fspath(path), mode)
        try:
            yield stream
        except BaseException:
            if writes:
                self._discard(stream, path)
            raise
        finally:
            if not stream.closed:
                stream.close()

    def _discard(self, stream: Any, path: PathLike) -> None:
        """Remove what was written of a file that will not be whole."""
        with suppress(Exception):  # whatever the file system raises: the reason to discard is what counts
            stream.discard() if hasattr(stream, "discard") else stream.close()
        with suppress(Exception):
            self.rm_file(path)

    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        return os.path.join(path, suffix)

    def init_path(self, path: PathLike, **kwargs: Any) -> PathLike:
        self.fs = _url_to_fs(path, **kwargs)
        return path

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        self._opened.rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: PathLike) -> None:
        self._opened.makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        if isinstance(checkpoint_id, Path):
            return False
        try:
            _url_to_fs(checkpoint_id)
        except (ValueError, ImportError):
            return False
        return True

    def exists(self, path: PathLike) -> bool:
        return bool(self._opened.exists(os.fspath(path)))

    def rm_file(self, path: PathLike) -> None:
        self._opened.rm(os.fspath(path))

    def ls(self, path: PathLike) -> list[str]:
        """Return the paths of what is in a directory."""
        return [str(each) for each in self._opened.ls(os.fspath(path), detail=False)]


def _url_to_fs(path: PathLike, **kwargs: Any) -> AbstractFileSystem:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415 - slow to import
    except ImportError as exc:
        raise CheckpointError(f"{os.fspath(path)}: fsspec is not installed", hint="pip install fsspec") from exc
    return url_to_fs(path, **kwargs)[0]


# A file system of the storages as a store to read from: what the read pipeline needs, over streams.
#
# Each thread that reads at the same time gets a stream of its own; a stream that gives no ranges (no `seek`) is read
# once
# and kept.

_READ_PIECE_NBYTES = 1 << 20


class StreamStore:
    """The files of one directory, to be read."""

    def __init__(self, fs: FileSystemBase, path: PathLike) -> None:
        self._fs = fs
        self._path = path
        self.url = os.fspath(path)

    def open(self, name: str) -> StreamReader:
        """Open a file for reads at any offset, from any thread."""
        return StreamReader(self._fs, self._below(name), name)

    def get(self, name: str, *, limit: int) -> bytes:
        """Read a whole small file."""
        with stream_errors(str(self._below(name)), name), self._fs.create_stream(self._below(name), "rb") as stream:
            data = read_up_to(stream, limit + 1)
        if len(data) > limit:
            raise MalformedFile(f"{self._below(name)}: more than {limit} bytes", name=name)
        return data

    def _below(self, name: str) -> PathLike:
        return self._fs.concat_path(self._path, check_below(name))


def read_up_to(stream: Any, limit: int) -> bytes:
    """Read a stream to its end, or so much of it; in pieces, as many streams take all they are asked for beforehand."""
    held = io.BytesIO()
    while held.tell() < limit and (piece := stream.read(min(_READ_PIECE_NBYTES, limit - held.tell()))):
        held.write(piece)
    return held.getvalue()


def write_all(stream: Any, data: bytes, *, sync: bool) -> None:
    """Write all of it, to a stream that may take less than it is given, and make it durable if asked for."""
    view = memoryview(data)
    while view:
        done = stream.write(view)
        view = view[len(view) if done is None else done :]
    sync_stream(stream, sync=sync)


def sync_stream(stream: Any, *, sync: bool) -> None:
    """Make a stream durable if it is a file of this machine; others are when they are closed, or nobody can tell."""
    stream.flush()
    if sync:
        with suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(stream.fileno())


@contextmanager
def stream_errors(path: str, name: str, offset: int | None = None) -> Iterator[None]:
    """Turn whatever a file system raises into our errors, with the file and the offset in it."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as exc:
        raise BlobNotFound(f"{path}: there is no such file", name=name, errno=exc.errno) from exc
    except OSError as exc:
        at = "" if offset is None else f" at offset {offset}"
        raise StorageError(f"{path}: cannot read{at}: {exc}", name=name, offset=offset, errno=exc.errno) from exc


class StreamReader:
    """A file read through streams; as many as threads read at once."""

    def __init__(self, fs: FileSystemBase, path: PathLike, name: str) -> None:
        self._fs = fs
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[tuple[AbstractContextManager[Any], Any]] = []
        self._open: list[AbstractContextManager[Any]] = []
        with self._stream() as stream:
            self._nbytes = int(stream.seek(0, io.SEEK_END) if stream.seekable() else len(stream.read()))

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened."""
        return self._nbytes

    def cached(self, offset: int, nbytes: int) -> bool:
        """Say nothing of what is at hand: only the file system knows."""
        return False

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        """Fill all of `into`."""
        view = into.cast("B")
        done = 0
        with stream_errors(str(self._path), self._name, offset), self._stream() as stream:
            stream.seek(offset)
            while done < len(view):
                got = self._some(stream, view[done:])
                if not got:
                    raise WrongSize(
                        f"{self._path}: wanted {len(view)} bytes at offset {offset}, got {done}: the file ends there",
                        name=self._name, offset=offset, wanted=len(view), got=done,
                    )  # fmt: skip
                done += got

    @staticmethod
    def _some(stream: Any, view: memoryview) -> int:
        if hasattr(stream, "readinto"):
            return int(stream.readinto(view) or 0)
        data = stream.read(len(view))
        view[: len(data)] = data
        return len(data)

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is None:
            with stream_errors(str(self._path), self._name):
                manager = self._fs.create_stream(self._path, "rb")
                found = (manager, _seekable(manager.__enter__()))
            with self._lock:
                self._open.append(manager)
        yield found[1]
        with self._lock:  # not where it failed: nobody knows where such a stream stands
            self._idle.append(found)

    def close(self) -> None:
        """Close all streams; safe when called twice."""
        with self._lock:
            managers, self._open, self._idle = self._open, [], []
        for manager in managers:
            with suppress(Exception):  # of a file only read, nothing is lost
                manager.__exit__(None, None, None)


def _seekable(stream: Any) -> Any:
    return stream if stream.seekable() else io.BytesIO(stream.read())


# Blobs of a store as streams, for those who write and read files so: extensions, planners and writers of others.

_WRITE_PIECE_NBYTES = 8 << 20
"""So much is held, and written at once; what is no more than that is put as one small blob."""
_ROOM_NBYTES = 64 << 30
"""Stores want to know beforehand how large a blob may become: the parts of an upload are measured by it."""


class BlobInput(io.RawIOBase):
    """A blob, to be read from any position. Give it to an `io.BufferedReader`: each read of its own is a request."""

    def __init__(self, reader: BlobReader, *, closes: bool = True) -> None:
        """`closes`: the reader is closed with the stream."""
        super().__init__()
        self._reader = reader
        self._closes = closes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.nbytes}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        nbytes = max(0, min(len(view), self._reader.nbytes - self._at))
        if nbytes:
            self._reader.read_into(self._at, view[:nbytes])
        self._at += nbytes
        return nbytes

    def close(self) -> None:
        if not self.closed and self._closes:
            self._reader.close()
        super().close()


class BlobOutput(io.RawIOBase):
    """
    A blob that is written from its first byte to its last, in place of one that is there.

    It appears when the stream is closed, or not at all if `discard` is called first.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._held = bytearray()
        self._writer: BlobWriter | None = None
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written + len(self._held)

    def write(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        if self.tell() + len(view) > _ROOM_NBYTES:
            raise StorageError(
                f"{self._store.url}/{self._name}: more than {_ROOM_NBYTES >> 30} GiB in one stream",
                hint="write more files: a larger thread_count, or single_file_per_rank=False",
                name=self._name,
                errno=errno.EFBIG,
            )
        for start in range(0, len(view), _WRITE_PIECE_NBYTES):
            self._held += view[start : start + _WRITE_PIECE_NBYTES]
            if len(self._held) > _WRITE_PIECE_NBYTES:
                self._pass_on()
        return len(view)

    def _pass_on(self) -> None:
        if self._writer is None:
            self._store.delete(self._name)
            self._writer = self._store.create(self._name, _ROOM_NBYTES)
        self._writer.write_at(self._written, memoryview(bytes(self._held)))
        self._written += len(self._held)
        self._held = bytearray()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._writer is None:
                self._store.put(self._name, bytes(self._held), replace=True)
            else:
                self._pass_on()
                self._writer.finish(self._written)
        except BaseException:
            self.discard()
            raise
        super().close()

    def discard(self) -> None:
        """Close the stream without a blob."""
        if self._writer is not None:
            self._writer.abandon()
        super().close()


# Places of a store in the terms of a file system of the storages: URLs for paths.
#
# What is ours goes through the store's own verbs (`storages.choosing.store_of`). The streams here are for extensions,
# planners and writers of others, who know nothing else.

_READ_AHEAD_NBYTES = 1 << 20
_MOST_RENAMED_NBYTES = 4 << 30


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
        target.put(new_name, store.get(name, limit=_MOST_RENAMED_NBYTES), replace=True)
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


# Which file system a path or URL is in, and which store stands behind a file system.
#
#     a path, file://             files of this machine
#     s3://, gs://, az://, ...    object stores, through our own stores
#     any other scheme            whatever fsspec opens, as with torch

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


def file_system_at(fs: FileSystemBase, path: PathLike) -> tuple[FileSystemBase, PathLike]:
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
