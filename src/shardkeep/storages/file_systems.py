"""
Where the storages of torch's layout keep files: streams by path, in the terms that users implement.

`FileSystem` is this machine's. `FsspecFileSystem` is whatever fsspec opens; it is imported when it is used.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardkeep.errors import CheckpointError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

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
