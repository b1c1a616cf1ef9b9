"""
Torch's file system interface (`FileSystemBase`), its implementations, and adapters between file systems and stores.

    a path, file://             `FileSystem`: local files
    s3://, gs://, az://, ...    `StoreFileSystem`: our own stores
    any other scheme            `FsspecFileSystem`: whatever fsspec opens, as with torch
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from typing_extensions import Buffer

from shardkeep.errors import BrokenProtocol, CheckpointError
from shardkeep.options import Options
from shardkeep.storage import base
from shardkeep.storage.base import BlobReader, BlobWriter, Store, broken_path, check_below, exists, read_blob, scheme_of
from shardkeep.storage.buffers import PerThread
from shardkeep.storage.fsspec import url_to_fs
from shardkeep.storage.local import LocalStore, storage_errors
from shardkeep.storage.object_client import SCHEMES
from shardkeep.storage.resolve import open_store

PathLike = str | os.PathLike[str]


class FileSystemBase(ABC):
    """What torch's file storages need: streams, and a few operations on paths."""

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
        """Move a file to another path."""

    @abstractmethod
    def init_path(self, path: PathLike) -> PathLike:
        """Return a path in the form that this file system uses."""

    @abstractmethod
    def mkdir(self, path: PathLike) -> None:
        """Create a directory and its parents if they do not exist."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Return whether a checkpoint of this id can be in such a file system."""

    @abstractmethod
    def exists(self, path: PathLike) -> bool:
        """Return whether a file exists."""

    @abstractmethod
    def rm_file(self, path: PathLike) -> None:
        """Delete a file."""


class FileSystem(FileSystemBase):
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
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as exc:
            raise type(exc)(exc.errno, broken_path(LocalStore(path)) or exc.strerror) from exc

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        if isinstance(checkpoint_id, Path):
            return True
        if "://" in str(checkpoint_id):
            return False
        # An existing checkpoint can be read even where nothing can be written.
        path = Path(checkpoint_id)
        return path.exists() or any(parent.exists() and os.access(parent, os.W_OK) for parent in path.parents)

    def exists(self, path: PathLike) -> bool:
        return Path(path).exists()

    def rm_file(self, path: PathLike) -> None:
        Path(path).unlink()

    def ls(self, path: PathLike) -> list[str]:
        return [str(each) for each in Path(path).iterdir()]


class FsspecFileSystem(FileSystemBase):
    """Whatever fsspec opens: object stores, HTTP, memory, local files."""

    def __init__(self) -> None:
        self.fs: Any = None
        """The `AbstractFileSystem` of fsspec; None until it is opened."""
        self.url: str | None = None
        """Where it is opened when it is first used, unless `init_path` was called."""

    @property
    def _opened(self) -> Any:
        if self.fs is None and self.url is not None:
            self.fs, _ = url_to_fs(self.url)
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
            if writes:  # remove the incomplete file; errors of any class matter less than the one that led here
                with suppress(Exception):
                    stream.discard() if hasattr(stream, "discard") else stream.close()
                with suppress(Exception):
                    self.rm_file(path)
            raise
        finally:
            if not stream.closed:
                stream.close()

    def concat_path(self, path: PathLike, suffix: str) -> PathLike:
        return os.path.join(path, suffix)

    def init_path(self, path: PathLike, **kwargs: Any) -> PathLike:
        self.fs, _ = url_to_fs(os.fspath(path), **kwargs)
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
            url_to_fs(os.fspath(checkpoint_id))
        except (ValueError, ImportError):
            return False
        return True

    def exists(self, path: PathLike) -> bool:
        return bool(self._opened.exists(os.fspath(path)))

    def rm_file(self, path: PathLike) -> None:
        self._opened.rm(os.fspath(path))

    def ls(self, path: PathLike) -> list[str]:
        return [str(each) for each in self._opened.ls(os.fspath(path), detail=False)]


class StreamStore:
    """The files of one directory, for reading. It has no verb `list`, because streams do not know the ages of files."""

    def __init__(self, fs: FileSystemBase, path: PathLike) -> None:
        self._fs = fs
        self._path = path
        self.url = os.fspath(path)

    def open(self, name: str) -> StreamReader:
        return StreamReader(self._fs, self._fs.concat_path(self._path, check_below(name)), self.url, name)

    def get(self, name: str, *, limit: int) -> bytes:
        return read_blob(self.open(name), f"{self.url}/{name}", name, limit)


def write_all(stream: Any, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        done = stream.write(view)
        view = view[len(view) if done is None else done :]


def sync_stream(stream: Any, *, sync: bool) -> None:
    """Make a stream durable if it is a local file. Others are durable when they are closed, or cannot be made so."""
    stream.flush()
    if sync:
        with suppress(AttributeError, io.UnsupportedOperation):
            os.fsync(stream.fileno())


class StreamReader:
    """A file that each thread reads through a stream of its own; one without `seek` is read once and kept in memory."""

    def __init__(self, fs: FileSystemBase, path: PathLike, url: str, name: str) -> None:
        self._fs, self._path, self._url, self._name = fs, path, url, name
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._streams = PerThread(self._open)
        self.nbytes = int(self._streams.get().seek(0, io.SEEK_END))

    def read_into(self, offset: int, into: memoryview, *, cached: bool = False) -> None:
        view = into.cast("B")
        done = 0
        stream = self._streams.get()
        with storage_errors("cannot read", self._url, self._name, offset):
            stream.seek(offset)
            while done < len(view):
                got = int(stream.readinto(view[done:]) or 0)
                if not got:
                    raise base.short_read(str(self._path), self._name, offset, len(view), done)
                done += got

    def _open(self) -> Any:
        with storage_errors("cannot open", self._url, self._name), self._lock:
            stream: Any = self._opened.enter_context(self._fs.create_stream(self._path, "rb"))
            return stream if stream.seekable() else io.BytesIO(stream.read())

    def close(self) -> None:
        with suppress(Exception), self._lock:  # nothing is lost for a file that was only read
            self._opened.close()


# -- blobs of a store as streams: for extensions, planners and writers of users ----------------------------------------

_WRITE_PIECE_NBYTES = 8 << 20
"""The size of a buffered write. A stream of at most this size becomes one small blob."""
_ROOM_NBYTES = 64 << 30
"""The largest stream. A store must know in advance how large a blob may become, to choose the size of upload parts."""


class BlobInput(io.RawIOBase):
    """An open blob as a seekable stream. Wrap it in an `io.BufferedReader`, because each read is a request."""

    def __init__(self, reader: BlobReader) -> None:
        """Read from a reader, which stays open when the stream is closed."""
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

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


class BlobOutput(io.RawIOBase):
    """A blob written in order. It replaces another when it is closed, unless `discard` is called first."""

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
        if self._writer is not None:
            self._writer.abandon()
        super().close()


# -- stores as a file system -------------------------------------------------------------------------------------------
#
# Our own code uses the store (`store_of`). The streams are for extensions, planners and writers of users.

_READ_AHEAD_NBYTES = 1 << 20
_MOST_RENAMED_NBYTES = 4 << 30


class StoreFileSystem(FileSystemBase):
    """The contents of stores, by URL. There are no directories: `mkdir` does nothing."""

    def store(self, path: PathLike) -> Store:
        return open_store(os.fspath(path).rstrip("/"), direct=Options().direct_io)

    def _blob(self, path: PathLike) -> tuple[Store, str]:
        above, _, name = os.fspath(path).rstrip("/").rpartition("/")
        return self.store(above), name

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[io.IOBase]:
        store, name = self._blob(path)
        if mode == "rb":
            with (
                closing(store.open(name)) as reader,
                io.BufferedReader(BlobInput(reader), _READ_AHEAD_NBYTES) as source,
            ):
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
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: PathLike) -> PathLike:
        return os.fspath(path).rstrip("/")

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
        return exists(*self._blob(path))

    def rm_file(self, path: PathLike) -> None:
        store, name = self._blob(path)
        store.delete(name)


# -- choosing a file system --------------------------------------------------------------------------------------------

_BROKEN_URL = re.compile(rf"({'|'.join(sorted(SCHEMES))}|file):/[^/]")


def is_of_store(path: object) -> bool:
    return isinstance(path, str) and scheme_of(path) in {*SCHEMES, "file"}


def is_local(fs: FileSystemBase) -> bool:
    """Return whether a file system is exactly `FileSystem`, and not a subclass that may open or rename differently."""
    return type(fs) is FileSystem


def has_store(fs: FileSystemBase) -> bool:
    return is_local(fs) or type(fs) is StoreFileSystem


def keeps(party: object, own: type, names: Sequence[str]) -> bool:
    """Return whether neither an object nor its class overrides these methods of a base class."""
    return all(getattr(type(party), name) is getattr(own, name) and name not in vars(party) for name in names)


def keeps_all(party: object, own: type) -> bool:
    """Return whether an object is of a class, and neither it nor its own class overrides a method of that."""
    methods = [name for name, value in vars(own).items() if callable(value)]
    return isinstance(party, own) and keeps(party, own, methods)


def file_system_for(path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """Return the file system of a path or URL, and the path in its form. Nothing is opened yet."""
    where = os.fspath(path)
    if not isinstance(path, str):
        if _BROKEN_URL.match(where):
            raise CheckpointError(f"{where}: a Path cannot hold a URL", hint="pass the URL as a str")
        return FileSystem(), Path(path)
    scheme = scheme_of(where)
    if scheme == "file":
        return FileSystem(), Path(open_store(where, direct=False).url)
    if scheme in SCHEMES:
        stores = StoreFileSystem()
        return stores, stores.init_path(where)
    if scheme is not None:
        lazy = FsspecFileSystem()
        lazy.url = where
        return lazy, where
    return FileSystem(), Path(path)


def file_system_at(fs: FileSystemBase, path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """Return file system and path for another path; a file system that the user set is kept."""
    if has_store(fs):
        found, place = file_system_for(path)
        return (fs if type(found) is type(fs) else found), place
    return fs, fs.init_path(path)


def by_store(fs: FileSystemBase, path: PathLike) -> tuple[FileSystemBase, PathLike]:
    """Return stores instead of fsspec, where only stores will do; a file system that is already open is kept."""
    if type(fs) is FsspecFileSystem and fs.fs is None:
        fs = StoreFileSystem()
        return fs, fs.init_path(path)
    return fs, path


def store_of(fs: FileSystemBase, path: PathLike, *, durable: bool = True, foreign: bool = False) -> Store | None:
    """Return the store for a path, of any files if `foreign`; None if only the file system can open its files."""
    if is_local(fs):
        return LocalStore(path, direct=Options().direct_io, durable=durable, foreign=foreign)
    return fs.store(path) if type(fs) is StoreFileSystem else None


class CheckpointPlace:
    fs: FileSystemBase
    path: PathLike
    sync_files: bool = True
    _file_system: type[Any] = FileSystem
    _foreign: bool = False
    """Whether its files may be of other programs, of any name."""

    @property
    def checkpoint_id(self) -> PathLike:
        return self.path

    def open_store(self) -> Store:
        """Return the store of the place; a file system of the user's own has none, and is refused."""
        store = store_of(self.fs, self.path, durable=self.sync_files, foreign=self._foreign)
        if store is None:
            raise BrokenProtocol(
                f"{type(self).__name__}.fs is a {type(self.fs).__qualname__}, which would not be used: these files are read and"
                " written on the local file system or in a store",
                hint="give the URL of the place, or use FsspecWriter and FsspecReader",
            )
        return store

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return is_of_store(checkpoint_id) or cls._file_system.validate_checkpoint_id(checkpoint_id)
