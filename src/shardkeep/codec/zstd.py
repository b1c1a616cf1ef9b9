"""
Compression of streams with zstd, readable by torch's extension of the same name, and the other way round.

A stream is one frame, as one of the modules that torch uses reads only the first; when reading, any number of frames
is taken. A stream that ends inside a frame is an error, not an end.
"""

from __future__ import annotations

import io
from typing import IO, TYPE_CHECKING, cast

from shardkeep.codec.extensions import StreamTransformExtension
from shardkeep.codec.problems import ExtensionUnavailable, UnknownExtension
from shardkeep.codec.zstd_engines import MODULES, Decompressor, Engine, find_engine
from shardkeep.errors import MalformedFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WRITE_PIECE = 4 << 20
_READ_PIECE = 128 << 10


class ZStandard(StreamTransformExtension):
    """
    Compresses what is written. Needs one of several modules that know zstd; see `is_available`.

    Raises:
        ExtensionUnavailable: (a ValueError) none of them is installed.

    """

    def __init__(self) -> None:
        super().__init__()
        self._engine()

    @staticmethod
    def is_available() -> bool:
        """Say whether a module that knows zstd is installed."""
        return find_engine() is not None

    @staticmethod
    def registry_name() -> str:
        """Return the name that torch's extension has too."""
        return "stream.zstd"

    @staticmethod
    def from_descriptor(version: str) -> ZStandard:
        """Make the extension for streams of version 1 or 1.x, which are plain zstd."""
        if version.partition(".")[0] != "1":
            raise UnknownExtension(f"Unknown extension {version=} of {ZStandard.registry_name()}; known is 1")
        return ZStandard()

    def get_descriptor(self) -> str:
        """Return what is stored with the data."""
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses to `output`, and closes it when it is closed itself."""
        return cast("IO[bytes]", _Writer(self._engine(), output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        """Return a stream that gives what was compressed to `input`."""
        return cast("IO[bytes]", _Reader(self._engine(), input))

    @staticmethod
    def _engine() -> Engine:
        # Not kept in the extension, which travels to other processes with its storage writer.
        engine = find_engine()
        if engine is None:
            raise ExtensionUnavailable(
                f"ZStandard cannot be used: there is no module named {' or '.join(map(repr, MODULES))}",
                hint="pip install backports.zstd (Python 3.14 has compression.zstd)",
            )
        return engine


class _Writer(io.RawIOBase):
    def __init__(self, engine: Engine, output: IO[bytes]) -> None:
        self._compressor = engine.compressor()
        self._output = output
        self._behind = False
        self._ended = False

    def writable(self) -> bool:
        return True

    def write(self, b: Buffer, /) -> int:
        if self._ended:
            raise ValueError("write to a closed zstd stream")
        view = memoryview(b).cast("B")
        for start in range(0, len(view), _WRITE_PIECE):
            self._behind = True
            self._pass_on(self._compressor.compress(view[start : start + _WRITE_PIECE]))
        return len(view)

    def flush(self) -> None:
        if self._ended:
            return
        if self._behind:
            self._behind = False
            self._pass_on(self._compressor.end_block())
        self._output.flush()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._pass_on(self._compressor.end_frame())
        finally:
            super().close()
            self._output.close()

    def _pass_on(self, data: bytes) -> None:
        if data:
            self._output.write(data)


class _Reader(io.RawIOBase):
    def __init__(self, engine: Engine, source: IO[bytes]) -> None:
        self._engine = engine
        self._source = source
        self._frame: Decompressor | None = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, b: Buffer, /) -> int:
        view = memoryview(b).cast("B")
        data = self._next(len(view)) if len(view) else b""
        view[: len(data)] = data
        return len(data)

    def _next(self, most: int) -> bytes:
        """Return some bytes, or none at the end of the stream."""
        while True:
            if not self._pending and (self._frame is None or self._frame.needs_input):
                self._pending = self._source.read(_READ_PIECE)
                if not self._pending:
                    if self._frame is None:
                        return b""
                    raise MalformedFile(
                        "a zstd stream ends inside a frame",
                        hint="the file was cut short: use another checkpoint, or another copy of this one",
                    )
            if self._frame is None:
                self._frame = self._engine.decompressor()
            try:
                data = self._frame.decompress(self._pending, most)
            except self._engine.error as exc:
                raise MalformedFile(f"a zstd stream is damaged, or is none: {exc}") from exc
            self._pending = b""
            if self._frame.eof:
                self._pending, self._frame = self._frame.unused_data, None
            if data:
                return data
