"""
Torch's layout on whatever fsspec opens: object stores, HTTP, memory. Object stores it has nothing for are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkeep.codec.extensions import StreamTransformExtension
from shardkeep.errors import CheckpointError
from shardkeep.protocol.stored_items import SerializationFormat
from shardkeep.storages.choosing import file_system_for, is_of_store
from shardkeep.storages.file_reader import FileSystemReader
from shardkeep.storages.file_systems import FileSystemBase, FsspecFileSystem, PathLike
from shardkeep.storages.file_writer import FileSystemWriter


class FsspecWriter(FileSystemWriter):
    """Writes a checkpoint in torch's layout to a place that fsspec opens."""

    def __init__(
        self,
        path: PathLike,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        """
        Point to a place.

        Args:
            path: a URL, or a path.
            single_file_per_rank: one file a rank and thread, instead of one for each tensor or object.
            sync_files: make files of this machine survive a loss of power; others are durable when they are closed.
            thread_count: how many files a rank writes at the same time.
            per_thread_copy_ahead: has no effect: copies from a device are always made a window ahead.
            overwrite: replace a checkpoint that is there; otherwise it is an error.
            _extensions: transform what is written, the first one nearest to the file.
            serialization_format: tensors as `torch.save` writes them, or safetensors files.
            kwargs: for the file system: credentials, endpoints.

        """
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self.fs, self.path = _opened(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return FsspecFileSystem.validate_checkpoint_id(checkpoint_id) or is_of_store(checkpoint_id)


class FsspecReader(FileSystemReader):
    """Reads a checkpoint from a place that fsspec opens."""

    def __init__(self, path: PathLike, **kwargs: Any) -> None:
        """
        Point to a checkpoint.

        Args:
            path: a URL, or a path.
            kwargs: for the file system: credentials, endpoints.

        """
        super().__init__(path)
        self.fs, self.path = _opened(path, kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return FsspecFileSystem.validate_checkpoint_id(checkpoint_id) or is_of_store(checkpoint_id)


def _opened(path: PathLike, kwargs: dict[str, Any]) -> tuple[FileSystemBase, PathLike]:
    """
    Open a place with fsspec; where it has nothing for an object store that we have a store for, with that.

    What is said in `kwargs` is meant for fsspec, and would not be understood by another.
    """
    fs = FsspecFileSystem()
    try:
        return fs, fs.init_path(path, **kwargs)
    except (ImportError, ValueError, CheckpointError):
        if kwargs or not is_of_store(path):
            raise
    return file_system_for(path)
