"""Helpers for tests under torch's names: an example of a stream extension, and decorators for test methods."""

from __future__ import annotations

import functools
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from shardkeep.codecs.stream_extensions import ExtensionRegistry, OutputStream, StreamTransformExtension
from shardkeep.errors import BrokenProtocol, UnknownExtension

if TYPE_CHECKING:
    from typing_extensions import Buffer

F = TypeVar("F", bound=Callable[..., Any])


class Rot13Example(StreamTransformExtension):
    """An example of a stream extension, for tests: swaps the case of letters, as torch's example of this name does."""

    def __init__(self, chunk_size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__()
        self._chunk_size = chunk_size

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version: str) -> Rot13Example:
        if version.partition(".")[0] != "1":
            raise UnknownExtension(f"Unknown extension {version=} of {Rot13Example.registry_name()}; known is 1")
        return Rot13Example()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    @staticmethod
    def _rot13bytes(b: Buffer, count: int) -> None:  # by torch's name, for those who call it
        view = memoryview(b).cast("B")
        view[:count] = bytes(view[:count]).swapcase()

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast("IO[bytes]", self.Writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return cast("IO[bytes]", self.Reader(input))

    class Writer(OutputStream):
        """Transforms a copy of what is written to it."""

        def write(self, b: Buffer, /) -> int:
            return super().write(bytes(b).swapcase())

    class Reader(io.RawIOBase):
        """Restores what was written; seekable if the inner stream is."""

        def __init__(self, input: IO[bytes]) -> None:  # noqa: A002 - torch's name
            self.input = input

        def readable(self) -> bool:
            return True

        def readinto(self, b: Buffer, /) -> int | None:
            view = memoryview(b).cast("B")
            data: bytes | None = self.input.read(len(view))
            if data is None:
                return None
            view[: len(data)] = data.swapcase()
            return len(data)

        def seekable(self) -> bool:
            return self.input.seekable()

        def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
            return self.input.seek(offset, whence)

        def tell(self) -> int:
            return self.input.tell()


def get_test_extension_registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Rot13Example)
    return registry


def with_temp_dir(func: F | None = None) -> F | None:
    """Set `self.temp_dir` of a test method: a new folder that all ranks share, deleted after the last of them."""
    if func is None:
        raise BrokenProtocol("with_temp_dir was given no function", hint="write @with_temp_dir, without brackets")

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist  # noqa: PLC0415 - takes seconds

        spread = dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if spread else (0, 1)
        root = [tempfile.mkdtemp(prefix="checkpoint-test-") if rank == 0 else ""]
        if spread:
            dist.broadcast_object_list(root)
        self.temp_dir = os.path.join(root[0], "shared")
        os.makedirs(self.temp_dir, exist_ok=True)
        try:
            return func(self, *args, **kwargs)
        finally:
            # Delete the folder if all other ranks have left it; no rank waits here for one that failed.
            left = os.path.join(root[0], "left", str(rank))
            os.makedirs(left, exist_ok=True)
            if len(os.listdir(os.path.dirname(left))) == ranks:
                shutil.rmtree(root[0], ignore_errors=True)

    return cast("F", wrapper)


def with_checkpoint_logging(
    func: F | None = None, logger_name: str = "torch.distributed.checkpoint", level: int = logging.INFO
) -> F | None:
    """Set the level of a logger while a test method runs."""
    if func is None:
        raise BrokenProtocol("with_checkpoint_logging was given no function", hint="write it without brackets")

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        logger = logging.getLogger(logger_name)
        before = logger.level
        logger.setLevel(level)
        try:
            return func(self, *args, **kwargs)
        finally:
            logger.setLevel(before)

    return cast("F", wrapper)
