"""
A file system of the storages as a store to read from: what the read pipeline needs, over streams.

Each thread that reads at the same time gets a stream of its own; a stream that gives no ranges (no `seek`) is read once
and kept.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from shardkeep.errors import BlobNotFound, MalformedFile, StorageError, WrongSize
from shardkeep.storages.file_systems import FileSystemBase, PathLike
from shardkeep.store.protocol import check_below

_PIECE_NBYTES = 1 << 20


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
    while held.tell() < limit and (piece := stream.read(min(_PIECE_NBYTES, limit - held.tell()))):
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
